from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from fedmtl.config import SmartConfig
from fedmtl.methods.smart import SameDropout, Smart, SmartMethod, divergences, example_norms, project, step_passes
from fedmtl.model.multitask import BoundModel, Inputs
from fedmtl.sharing.weights import initial_weights
from fedmtl.tasks.batches import collate
from fedmtl.training.local import Objective, task_loss, to_tensors, train
from fedmtl.training.local_method import LocalClient
from training.small_client import (
    CPU,
    CROSS,
    DUAL,
    PLAN,
    SINGLE,
    bind,
    copied,
    furthest,
    make_methods,
    make_settings,
    make_shard,
    make_task,
)
from training.small_client import small_model as plain_or_fast

TASKS = [SINGLE, CROSS, DUAL]
CE = make_task("ce", labels=("x", "y", "z"))
BCE = make_task("bce", outputs=1)
MSE = make_task("mse", kind="regression", labels=())


def small_model(*tasks, is_plain=False, **options):
    model = plain_or_fast(*tasks, **options)
    if is_plain:
        model.layout = None
    return model


def first_batch(task, tmp_path, count=12) -> tuple[Inputs, torch.Tensor]:
    shard = make_shard(task, tmp_path)
    return to_tensors(collate(shard, np.arange(count), 0, None), CPU)


def begun(bound, config, device=CPU) -> Smart:
    """SMART at a client whose loop knows that it makes more passes than one."""
    bound.model.adds_gradients = SmartMethod.more_passes
    return Smart(bound, config, 0, device)


def opened(model, **keys) -> Smart:
    return begun(bind(model), SmartConfig(**keys))


# The divergence.


# The ball.


@pytest.mark.parametrize("task", [SINGLE, DUAL])
@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["inf", "2"]), st.floats(1e-4, 10.0), st.floats(1e-6, 1e3), st.integers(0, 2**31))
def test_projected_noise_is_in_the_ball_and_noise_inside_stays(task, norm, radius, scale, seed):
    noise = scale * torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    inside = project(task, noise, norm, radius)
    examples = inside.view(2, 3, -1).transpose(0, 1).reshape(3, -1) if task.is_dual else inside.view(6, -1)
    norms = torch.linalg.vector_norm(examples, float(norm), dim=1)
    assert (norms <= radius * (1 + 1e-12)).all()
    assert torch.allclose(project(task, inside, norm, radius), inside, rtol=1e-12, atol=0)


def test_both_texts_of_a_dual_pair_are_one_example():
    # Rows 0 and 2 are one pair: lengths 3 and 4 make 5; rows 1 and 3: 0 and 2 make 2.
    noise = torch.tensor([3.0, 0.0, 4.0, 2.0]).view(4, 1, 1)
    assert example_norms(DUAL, noise, "2").flatten().tolist() == [5.0, 2.0, 5.0, 2.0]
    assert example_norms(SINGLE, noise, "2").flatten().tolist() == [3.0, 0.0, 4.0, 2.0]


@pytest.mark.parametrize("norm", ["inf", "2"])
@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_found_noise_is_in_its_ball_and_not_at_padding(task, steps, norm, tmp_path):
    inputs, _ = first_batch(task, tmp_path)
    for radius, step_size in ((1e-3, None), (0.5, 0.1), (2.0, 50.0)):
        smart = opened(small_model(task), radius=radius, norm=norm, steps=steps, step_size=step_size)
        with torch.no_grad():
            outputs = smart._bound.model(task.name, inputs)
        noise = smart.find_noise(task.name, inputs, outputs, None, SameDropout(CPU))
        norms = example_norms(task, noise, norm)
        assert (norms <= radius * (1 + 1e-12)).all()
        assert norms.max() > 0.1 * radius
        assert not noise[inputs.mask == 0].any()


# What is added.


@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
@pytest.mark.parametrize("perturb", ["one", "both"])
def test_without_noise_nothing_is_added_whatever_is_dropped(task, is_plain, perturb, tmp_path):
    dropping = replace(task, dropout=0.3)
    model = small_model(dropping, dropout=0.2, dtype=torch.float32, is_plain=is_plain).train()
    inputs, _ = first_batch(task, tmp_path)
    smart = opened(model, noise=0.0, weight=1.0, steps=2, bregman=1.0, perturb=perturb)
    outputs, added = smart.outputs(task.name, inputs)
    assert added.item() == 0.0
    assert not torch.equal(outputs, model(task.name, inputs)), "another pass drops other values"
    assert opened(model, weight=1.0).outputs(task.name, inputs)[1].item() > 0.0


@pytest.mark.parametrize("is_plain", [False, True])
def test_dropout_goes_on_as_without_smart(is_plain, tmp_path):
    model = small_model(SINGLE, dropout=0.2, is_plain=is_plain).train()
    inputs, _ = first_batch(SINGLE, tmp_path)
    smart = opened(model, bregman=1.0)
    torch.manual_seed(3)
    outputs, _ = smart.outputs("single", inputs)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    assert torch.equal(model("single", inputs), outputs)
    assert torch.equal(torch.get_rng_state(), after)


def test_noise_found_is_worse_than_random_noise_of_its_norm(tmp_path):
    # A trained model, the defaults, and 48 batches of four; random noise at the edge of the ball, every entry of it.
    task = make_task("single", pool="cls")
    shards = {"single": make_shard(task, tmp_path)}
    model = small_model(task, dropout=0.1, dtype=torch.float32)
    bound = bind(model)
    train(bound, shards, make_settings(task, local_epochs=8), round_number=1, seed=0, device=CPU)
    model.train()
    smart = begun(bound, SmartConfig())
    random = torch.Generator().manual_seed(1)
    wins = 0
    for number in range(48):
        chosen = np.random.Generator(np.random.PCG64(number)).permutation(12)[:4]
        inputs, _ = to_tensors(collate(shards["single"], chosen, 0, None), CPU)
        dropout = SameDropout(CPU)
        with torch.no_grad():
            clean = model("single", inputs)
        noise = smart.find_noise("single", inputs, clean, None, dropout)
        other = noise.abs().max() * torch.randn(noise.shape, generator=random).sign() * inputs.mask.unsqueeze(-1)
        with torch.no_grad():
            found, drawn = (
                divergences(task, smart._pass("single", inputs, each, dropout), clean).mean() for each in (noise, other)
            )
        wins += bool(found > drawn)
    assert wins >= 0.95 * 48


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_padding_does_not_matter(task, tmp_path):
    inputs, _ = first_batch(task, tmp_path)
    wide = Inputs(*(F.pad(part, (0, 5)) for part in (inputs.ids, inputs.mask, inputs.segments)))
    found = []
    for given_inputs in (inputs, wide):
        model = small_model(task)
        smart = opened(model, steps=2)
        start = torch.randn(len(inputs.ids), 40, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        start = project(task, start[:, : given_inputs.ids.shape[1]] * given_inputs.mask.unsqueeze(-1), "inf", 1e-2)
        smart._start = lambda task, inputs, start=start: start.clone()
        outputs, added = smart.outputs(task.name, given_inputs)
        found.append((outputs, added.item()))
    assert torch.allclose(found[0][0], found[1][0], rtol=1e-10)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-6)
    assert found[0][1] > 0


@pytest.mark.parametrize("perturb", ["one", "both"])
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_gradients_are_autograds_on_the_plain_module(task, perturb, tmp_path):
    keys = {"weight": 0.7, "radius": 0.05, "steps": 2, "bregman": 0.4, "momentum": 0.5, "perturb": perturb}
    settings = make_settings(task, smart=keys)
    shard = make_shard(task, tmp_path)
    batch = np.arange(12)
    bound = bind(small_model(task))
    # Apart from where it started, so that the average has something to hold on to.
    methods = make_methods(settings)
    methods.start(LocalClient(bound, {task.name: shard}, CPU, seed=5, round=1))
    objective = Objective(bound, {task.name: shard}, CPU, methods)
    nudge = 0.02 * torch.randn(bound.flat.values.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    start = copied(bound.weights())
    bound.flat.values.add_(nudge)
    [method] = methods.methods
    smart = method._smart
    with mock.patch.object(smart, "_pass", wraps=smart._pass) as passes:
        loss = objective.loss(task.name, batch)
    loss.backward()
    found = {key: parameter.grad for key, parameter in bound.parameters.items() if parameter.grad is not None}

    # The same noise, added by hook to two plain modules: one with the values of now, one with those it began with.
    around, worst = passes.call_args_list[1].args[2], passes.call_args_list[-1].args[2].detach()
    inputs, labels = to_tensors(collate(shard, batch, 0, None), CPU)
    now, before = small_model(task, is_plain=True), small_model(task, is_plain=True)
    plain = bind(now, copied(bound.weights()))
    bind(before, start)
    clean, perturbed = _answers(now, task, inputs, around), _answers(now, task, inputs, worst)
    past = _answers(before, task, inputs, around).detach()
    expected = task_loss(task, clean, labels, objective._class_weights[task.name])
    expected = expected + 0.7 * _both_ways(task, clean, perturbed) + 0.4 * _both_ways(task, clean, past)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-10)
    wanted = {key: parameter.grad for key, parameter in plain.parameters.items() if parameter.grad is not None}
    assert found.keys() == wanted.keys()
    assert furthest(found, wanted) < 1e-9
    assert (around is None) == (perturb == "one")


def _answers(model, task, inputs, noise):
    handle = model.token_table().register_forward_hook(lambda _, ids, out: out if noise is None else out + noise)
    outputs = model(task.name, inputs)
    handle.remove()
    return outputs


def _both_ways(task, first, second):
    """From the definitions, by torch's own functions."""
    if task.kind == "regression":
        return F.mse_loss(first, second)
    if task.outputs == 1:
        first, second = (torch.cat([torch.zeros_like(part), part], -1) for part in (first, second))
    logs = F.log_softmax(first, -1), F.log_softmax(second, -1)
    return sum(F.kl_div(a, b, reduction="batchmean", log_target=True) for a, b in (logs, logs[::-1]))


# The averaged weights.


def test_the_average_starts_at_the_received_weights_and_follows_every_step(tmp_path):
    # Momentum 0.75 and two steps of +1: w0, then 0.75 w0 + 0.25 (w0 + 1) = w0 + 0.25, then w0 + 0.1875 + 0.5.
    bound = bind(small_model(SINGLE))
    smart = begun(bound, SmartConfig(bregman=1.0, momentum=0.75, weight=0))
    start = bound.flat.values.clone()
    assert torch.equal(smart._average, start)
    for expected in (0.25, 0.6875):
        bound.flat.values.add_(1.0)
        smart.stepped()
        assert torch.allclose(smart._average - start, torch.full_like(start, expected))


def test_bregman_holds_one_moved_parameter_by_mu_times_the_divergence(tmp_path):
    # Only the head's bias moves, by 0.3: every score by 0.3, the squared difference is 0.09, times mu 2.
    bound = bind(small_model(DUAL))
    inputs, _ = first_batch(DUAL, tmp_path)
    smart = begun(bound, SmartConfig(bregman=2.0, weight=0))
    assert smart.outputs("dual", inputs)[1].item() == 0.0
    bias = next(value for key, value in bound.parameters.items() if key.name == "heads.dual.bias")
    with torch.no_grad():
        bias += 0.3
    _, added = smart.outputs("dual", inputs)
    assert added.item() == pytest.approx(0.18)
    added.backward()
    # d/db of 2 (b - b0)^2 at 0.3.
    assert bias.grad.item() == pytest.approx(1.2)


# In the loop.


def test_smart_changes_training_and_the_model_is_fast_again_afterwards(tmp_path):
    shards = {task.name: make_shard(task, tmp_path) for task in (SINGLE, DUAL)}
    values = []
    for smart in (None, {"weight": 5.0}, {"weight": 5.0}, {"weight": 5.0, "perturb": "both"}, {"bregman": 5.0}):
        bound = bind(small_model(SINGLE, DUAL, dropout=0.1, dtype=torch.float32))
        options = make_settings(SINGLE, DUAL, smart=smart, local_epochs=2)
        train(bound, shards, options, round_number=1, seed=0, device=CPU, methods=make_methods(options))
        values.append(copied(bound.weights()))
        assert bind(bound.model).model.writes_gradients
    assert furthest(values[1], values[2]) == 0.0
    assert min(furthest(values[1], other) for other in (values[0], values[3], values[4])) > 1e-5


def test_a_weight_of_zero_is_training_without_smart_up_to_rounding(tmp_path):
    shards = {"single": make_shard(SINGLE, tmp_path)}
    values = []
    for smart in (None, {"weight": 0.0}):
        bound = bind(small_model(SINGLE))
        options = make_settings(SINGLE, smart=smart, optimizer="sgd")
        train(bound, shards, options, round_number=1, seed=0, device=CPU, methods=make_methods(options))
        values.append(copied(bound.weights()))
    assert furthest(*values) < 1e-9


def test_every_pass_of_a_step_is_counted(tmp_path):
    inputs, _ = first_batch(SINGLE, tmp_path)
    for keys in ({}, {"steps": 3, "bregman": 1.0}, {"weight": 0.0, "bregman": 1.0}, {"steps": 0}):
        smart = opened(small_model(SINGLE), **keys)
        with mock.patch.object(smart, "_pass", wraps=smart._pass) as passes:
            smart.outputs("single", inputs)
        assert step_passes(SmartConfig(**keys))["forward"] == passes.call_count
    # Clean, search and the noise found; followed back: both of the loss's, and the search.
    assert step_passes(SmartConfig()) == {"forward": 3, "backward": 3}
    assert step_passes(None) == {"forward": 1, "backward": 1}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("is_plain", [False, True])
def test_without_noise_nothing_is_added_on_a_gpu(is_plain, tmp_path):
    device = torch.device("cuda")
    model = small_model(SINGLE, dropout=0.2, dtype=torch.float32, is_plain=is_plain).to(device).train()
    weights = initial_weights(model, PLAN)
    bound = BoundModel(model, PLAN, ["single"], "c1", weights, device=device)
    inputs = first_batch(SINGLE, tmp_path)[0].to(device)
    for noise, is_zero in ((0.0, True), (None, False)):
        smart = begun(bound, SmartConfig(noise=noise, weight=1.0, bregman=1.0), device)
        assert (smart.outputs("single", inputs)[1].item() == 0.0) == is_zero
