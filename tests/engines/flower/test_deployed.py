"""A server and three sites as processes: the same weights as on one machine, and nothing left behind."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from engines.flower.deployment import make_certs, of_kind
from engines.flower.processes import Programs, free_port
from fedmtl import Run
from fedmtl.config.file import dump_config
from fedmtl.experiment.run import start_run
from fedmtl.runs.folder import RunFolder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts processes in /proc")

TASKS = {f"{task}_client": task for task in ("sentiment", "paraphrase", "similarity")}


@pytest.fixture
def programs(tmp_path):
    started = Programs(tmp_path)
    yield started
    started.end()


@pytest.fixture
def config(make_config, tmp_path):
    rules = 'federation.aggregation={average: tasks, scopes: {all: centered_clipping, "task:*": multi_krum}}'
    skewed = ("training.logit_adjustment=1", rules)
    head = "tasks.sentiment.head={hidden: 8, activation: tanh}"
    found = make_config("federation.clients_per_task=1", "compute.workers=1", *skewed, head)
    (tmp_path / "run.yaml").write_text(dump_config(found))
    return found


def digest(run: RunFolder) -> str:
    (end,) = of_kind(run, "end")
    sha: str = end["weights_sha256"]
    return sha


def start_site(programs: Programs, name: str, port: int, *options: str):
    return programs.start(name, "client", "--client-id", name, "--tasks", TASKS[name], "--server", f"127.0.0.1:{port}",
                          *options)  # fmt: skip


@pytest.mark.slow
def test_three_sites_with_tls_give_the_weights_of_one_machine(config, programs, tmp_path):
    make_certs(tmp_path / "certs", {name: [task] for name, task in TASKS.items()})
    port = free_port()
    server = programs.start("server", "server", "--config", "run.yaml", "--listen", f"127.0.0.1:{port}",
                            "--certs", "certs", "--name", "tls")  # fmt: skip
    sites = [
        start_site(programs, name, port, "--ca", "certs/ca.crt", "--key", f"certs/sites/{name}.key",
                   *(["--save-model", "saved"] if name == "sentiment_client" else []))
        for name in TASKS
    ]  # fmt: skip
    alone = start_run(config, "alone")
    assert server.wait() == 0, server.text()
    assert [site.wait() for site in sites] == [0, 0, 0]
    assert programs.left() == []
    deployed = RunFolder(Path(config.output) / "tls")
    assert digest(deployed) == digest(alone)
    for kind in ("start", "clients", "plan", "aggregation"):
        assert of_kind(deployed, kind) == of_kind(alone, kind)
    sizes = [[(event["client"], event["bytes_up"], event["bytes_down"]) for event in of_kind(run, "update")]
             for run in (deployed, alone)]  # fmt: skip
    assert sizes[0] == sizes[1]
    assert deployed.report.exists()
    # A site that requested the model has it; no other site does.
    texts = ["a fine film", "dull"]
    assert Run(tmp_path / "saved").predict(texts) == [row[:1] for row in Run(deployed.path).predict(texts)]
    assert [path.name for path in tmp_path.glob("saved*")] == ["saved"]
    assert not deployed.spool.exists()


@pytest.mark.slow
def test_ctrl_c_ends_server_and_site_and_what_they_started(config, programs):
    port = free_port()
    server = programs.start("server", "server", "--config", "run.yaml", "--listen", f"127.0.0.1:{port}")
    site = start_site(programs, "sentiment_client", port)
    server.wait_for("sentiment_client is here")
    for program, number in ((server, signal.SIGINT), (site, signal.SIGTERM)):
        program.process.send_signal(number)
        assert program.wait(20) == 128 + number, program.text()
        assert f"ended by {number.name}" in program.text().splitlines()[-1]
    assert programs.left() == []


def test_without_keys_only_loopback_is_served(programs):
    server = programs.start("server", "server", "--listen", "0.0.0.0:0")
    site = programs.start("site", "client", "--client-id", "a", "--tasks", "b", "--server", "192.0.2.1:1")
    for program, remedy in ((server, "--certs"), (site, "--ca")):
        assert program.wait() == 2
        (line,) = program.text().splitlines()
        assert "needs TLS and keys" in line
        assert remedy in line
