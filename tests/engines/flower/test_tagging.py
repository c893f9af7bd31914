"""Sites that tag words: the weights of one machine, and counts of spans instead of predictions."""

import sys

import pytest

from engines.flower.deployment import of_kind
from engines.flower.processes import deployed_and_alone
from fedmtl.config.file import load_config

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="counts processes in /proc"),
]
TASKS = {"roles_client": "roles", "settings_client": "settings"}


def test_sites_give_the_weights_and_the_scores_of_one_machine(tmp_path):
    overrides = [
        "defaults=plain", "model.server_model=random-1x32", "federation.clients_per_task=1", "training.num_rounds=2",
        "tasks.roles={train_samples: 40, val_samples: 20}", "tasks.settings={train_samples: 40, val_samples: 20}",
        "training.learning_rate=3e-3", "evaluation.where=clients", "compute.device=cpu", "compute.workers=1",
        f"output={tmp_path / 'runs'}",
    ]  # fmt: skip
    config = load_config(None, overrides)
    deployed, alone = deployed_and_alone(tmp_path, config, {name: (task, None) for name, task in TASKS.items()})
    assert of_kind(deployed, "end")[0]["weights_sha256"] == of_kind(alone, "end")[0]["weights_sha256"]
    assert of_kind(deployed, "evaluation") == of_kind(alone, "evaluation")
    assert {event["by_label"] is not None for event in of_kind(deployed, "evaluation")} == {True}
