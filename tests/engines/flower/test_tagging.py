"""Sites that tag words: the weights of one machine, and counts of spans instead of predictions."""

import sys
from pathlib import Path

import pytest

from engines.flower.deployment import make_certs, of_kind
from engines.flower.processes import Programs, free_port
from fedmtl.config.file import dump_config, load_config
from fedmtl.experiment.run import start_run
from fedmtl.runs.folder import RunFolder

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
    (tmp_path / "run.yaml").write_text(dump_config(config))
    programs = Programs(tmp_path)
    try:
        make_certs(tmp_path / "certs", {name: [task] for name, task in TASKS.items()})
        port = free_port()
        server = programs.start("server", "server", "--config", "run.yaml", "--listen", f"127.0.0.1:{port}",
                                "--certs", "certs", "--name", "sites")  # fmt: skip
        sites = [
            programs.start(name, "client", "--client-id", name, "--tasks", task, "--server", f"127.0.0.1:{port}",
                           "--ca", "certs/ca.crt", "--key", f"certs/sites/{name}.key")
            for name, task in TASKS.items()
        ]  # fmt: skip
        alone = start_run(config, "alone")
        assert server.wait() == 0, server.text()
        assert [site.wait() for site in sites] == [0, 0]
    finally:
        programs.end()
    deployed = RunFolder(Path(config.output) / "sites")
    assert of_kind(deployed, "end")[0]["weights_sha256"] == of_kind(alone, "end")[0]["weights_sha256"]
    assert of_kind(deployed, "evaluation") == of_kind(alone, "evaluation")
    assert {event["by_label"] is not None for event in of_kind(deployed, "evaluation")} == {True}
