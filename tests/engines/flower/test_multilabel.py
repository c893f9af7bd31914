"""Sites whose texts have several labels: the weights of one machine, and counts of labels instead of predictions."""

import json
import sys

import pytest

from engines.flower.deployment import of_kind
from engines.flower.processes import deployed_and_alone
from experiment.test_multilabel import write_moods
from fedmtl.config.file import load_config
from fedmtl.predict.run import load_run

pytestmark = [
    # A server and two sites are processes that import torch.
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="counts processes in /proc"),
]


def test_sites_give_the_weights_and_the_scores_of_one_machine(tmp_path):
    sites = {f"site{n}": write_moods(tmp_path, f"at{n}", 40, n) for n in range(2)}
    clients = {name: {"tasks": ["moods"], "source": {"moods": str(path)}} for name, path in sites.items()}
    overrides = [
        "defaults=plain", "model.server_model=random-1x32", "training.num_rounds=2", "training.learning_rate=3e-3",
        "tasks.moods={kind: multilabel, labels: [anger, fear, joy]}", "evaluation.where=clients", "compute.device=cpu",
        "compute.workers=1", f"output={tmp_path / 'runs'}",
    ]  # fmt: skip
    config = load_config(None, [*overrides, f"clients={json.dumps(clients)}"])
    deployed, alone = deployed_and_alone(tmp_path, config, {name: ("moods", path) for name, path in sites.items()})
    assert of_kind(deployed, "end")[0]["weights_sha256"] == of_kind(alone, "end")[0]["weights_sha256"]
    assert of_kind(deployed, "evaluation") == of_kind(alone, "evaluation")
    assert {event["by_label"] is not None for event in of_kind(deployed, "evaluation")} == {True}
    assert of_kind(deployed, "data")[0]["labels"] == of_kind(alone, "data")[0]["labels"]
    # The server has no texts to fit thresholds to.
    assert load_run(deployed).saved.tasks["moods"].fitted == ()
