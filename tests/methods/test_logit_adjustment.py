import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from federation.fake_engine import FakeEngine, make_server, scores, start
from fedmtl.federation.server import rounds
from fedmtl.methods.logit_adjustment import LabelCounts, check_received, label_offsets
from fedmtl.sharing.plan import Extra, Key
from fedmtl.training.local import Objective
from training.small_client import (
    CLASSES,
    CPU,
    SINGLE,
    bind,
    make_settings,
    make_shard,
    make_task,
    small_model,
    start_methods,
)

CE = make_task("ce", labels=("x", "y", "z"))
BCE = make_task("bce", outputs=1)
MSE = make_task("mse", kind="regression", labels=())
COUNTED = {"logit_adjustment": Extra({"label_counts": {"single": [40, 3]}})}


def test_outputs_are_offset_by_how_a_clients_labels_differ_from_all():
    # Here 5 + 1 and 1 + 1 of 8: 3/4 and 1/4. Everywhere 7 + 1 and 23 + 1 of 32: 1/4 and 3/4.
    labels = np.array([0, 0, 1, 0, 0, 0])
    counts = {"bce": [7, 23], "two": [7, 23]}
    two = label_offsets(make_task("two"), labels, counts, 1.0)
    assert two.tolist() == pytest.approx([math.log(3), -math.log(3)])
    assert label_offsets(BCE, labels, counts, 1.0).tolist() == pytest.approx([-2 * math.log(3)])
    assert label_offsets(BCE, labels, counts, 0.5).tolist() == pytest.approx([-math.log(3)])


def test_a_label_that_a_client_does_not_have_is_offset_as_if_there_were_one():
    # Of three labels only the first two were ever counted: 1, 9, 0 and here 0, 7, 0.
    shares = np.array([1 / 10, 8 / 10, 1 / 10]) / np.array([2 / 13, 10 / 13, 1 / 13])
    offsets = label_offsets(CE, np.ones(7, int), {"ce": [1, 9]}, 1.0)
    assert offsets.tolist() == pytest.approx(np.log(shares).tolist())


def test_without_adjustment_or_counts_nothing_is_offset(tmp_path):
    assert label_offsets(CE, np.array([0, 1]), {}, 1.0) is None
    assert label_offsets(MSE, np.array([0.5]), {"mse": [1]}, 1.0) is None
    assert make_settings(SINGLE, logit_adjustment=0).methods == {}
    bound, shards = bind(small_model(SINGLE)), {"single": make_shard(SINGLE, tmp_path)}
    adjusting = make_settings(SINGLE, logit_adjustment=1)
    plain, uncounted, counted = (
        Objective(bound, shards, CPU, start_methods(settings, bound, shards, received)).loss("single", np.arange(12))
        for settings, received in ((make_settings(SINGLE), COUNTED), (adjusting, {}), (adjusting, COUNTED))
    )
    assert plain.item() == uncounted.item() != counted.item()


def test_a_client_adds_the_offsets_to_what_its_loss_sees(tmp_path):
    # Here 4 + 1 and 8 + 1 of 14, everywhere 40 + 1 and 3 + 1 of 45.
    bound, shards = bind(small_model(SINGLE)), {"single": make_shard(SINGLE, tmp_path)}
    methods = start_methods(make_settings(SINGLE, logit_adjustment=1), bound, shards, COUNTED)
    seen = []
    bound.model.heads["single"].register_forward_hook(lambda module, given, outputs: seen.append(outputs.detach()))
    loss = Objective(bound, shards, CPU, methods).loss("single", np.arange(12))
    offsets = torch.tensor([5 / 14 / (41 / 45), 9 / 14 / (4 / 45)], dtype=torch.float64).log()
    assert loss.item() == pytest.approx(F.cross_entropy(seen[0] + offsets, torch.from_numpy(CLASSES)).item(), rel=1e-6)


def test_adjusted_training_of_a_skewed_client_finds_what_all_clients_would():
    """A model of no features, that is, a bias: of one client's labels alone it comes to the federation's shares."""
    # ce's loss at outputs z + log(here / everywhere) is lowest where softmax(z) is `everywhere`.
    here, everywhere = np.array([6.0, 2.0]) / 8, np.array([1.0, 3.0]) / 4
    offsets = label_offsets(make_task("two"), np.repeat([0, 1], [5, 1]), {"two": [0, 2]}, 1.0)
    z = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    for _ in range(2000):
        # the smoothed shares, as the offsets have them
        loss = -(torch.from_numpy(here) * F.log_softmax(z + torch.from_numpy(offsets).double(), 0)).sum()
        (step,) = torch.autograd.grad(loss, z)
        z = (z - 0.5 * step).detach().requires_grad_()
    assert z.softmax(0).tolist() == pytest.approx(everywhere.tolist(), abs=1e-6)


def test_clients_get_the_labels_of_all_that_are_sampled():
    class Counting(FakeEngine):
        def clients(self):
            counts = {"a": {"sst2": [1]}, "b": {"sst2": [1, 2]}, "c": {}}
            return {name: replace(info, label_counts=counts[name]) for name, info in super().clients().items()}

    def flat(state):
        return scores(sst2=0.5, stsb=0.5)

    engine, server = Counting(), make_server()
    list(rounds(start(), server, engine, flat))
    assert all("logit_adjustment" not in job.extra for job in engine.jobs)
    engine = Counting()
    list(rounds(start(), replace(server, methods=[*server.methods, LabelCounts()]), engine, flat))
    assert engine.jobs
    counted = {"label_counts": {"sst2": [2, 2], "stsb": []}}
    assert all(dict(job.extra["logit_adjustment"].values) == counted for job in engine.jobs)


@pytest.mark.parametrize(
    "values",
    [
        {"label_counts": [1, 2]},
        {"label_counts": {"other": [1, 2]}},
        {"label_counts": {"single": (1, 2)}},
        {"label_counts": {"single": [1, 2, 3]}},
        {"label_counts": {"single": [-1, 2]}},
        {"label_counts": {"single": [True, 2]}},
        {"label_counts": {"single": [0.5, 2]}},
        {"label_counts": {"single": [1 << 53, 2]}},
        {"more": 1},
    ],
)
def test_what_is_no_count_of_labels_is_refused_at_a_site(values):
    tasks = {"single": SINGLE}
    assert check_received(COUNTED["logit_adjustment"], tasks, {}) is None
    assert "label_counts" in check_received(Extra(values), tasks, {})
    tensors = {"mask": {Key("all", "layer"): torch.zeros(1)}}
    assert "label_counts" in check_received(Extra(tensors=tensors), tasks, {})
