"""Server and sites in network namespaces of their own: a slow, lossy network, one site cut off and brought back."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.flower.deployment import make_certs, of_kind
from engines.flower.processes import Programs
from engines.flower.slow_network import Network, why_not
from engines.flower.test_chaos import last_round
from fedmtl.config.file import dump_config, load_config
from fedmtl.experiment.run import start_run
from fedmtl.runs.folder import RunFolder
from small_config import SMALL

pytestmark = pytest.mark.slow

SITES = {f"{task}_client": task for task in ("sentiment", "paraphrase", "similarity")}
SERVER = "10.77.0.1"


@pytest.fixture
def network() -> Iterator[Network]:
    """A namespace for the server and each site; 50 ms each way to a site, and 1% loss."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    addresses = {"server": SERVER, **{name: f"10.77.0.{10 + number}" for number, name in enumerate(SITES)}}
    made = Network(f"fm{os.getpid() % 10000}", addresses, SITES, delay=0.05, loss=0.01)
    yield made
    made.close()


def test_a_site_that_is_cut_off_for_a_while_still_contributes(network, tmp_path):
    overrides = [*SMALL, "federation.clients_per_task=1", "training.num_rounds=4", "training.local_epochs=40",
                 "federation.round_timeout=120", "compute.workers=1", f"output={tmp_path / 'runs'}"]  # fmt: skip
    config = load_config(None, overrides)
    (tmp_path / "run.yaml").write_text(dump_config(config))
    make_certs(tmp_path / "certs", {name: [task] for name, task in SITES.items()}, SERVER)
    programs = Programs(tmp_path)
    run = RunFolder(tmp_path / "runs/far")

    def start(name: str, *arguments: str):
        return programs.start(name, *arguments, prefix=("ip", "netns", "exec", network.names[name]))

    try:
        server = start("server", "server", "--config", "run.yaml", "--listen", f"{SERVER}:9092", "--certs", "certs",
                       "--name", "far")  # fmt: skip
        sites = []
        for name, task in SITES.items():
            keys = ("--ca", "certs/ca.crt", "--key", f"certs/sites/{name}.key")
            told = ("client", "--client-id", name, "--tasks", task, "--server", f"{SERVER}:9092")
            sites.append(start(name, *told, *keys))
        alone = start_run(config, "alone")
        end = time.monotonic() + 180
        while last_round(run) < 1:
            assert time.monotonic() < end, server.text()
            time.sleep(0.05)
        network.cut.add("paraphrase_client")
        time.sleep(8)
        assert last_round(run) == 1, "the round waits for the site that is away"
        network.cut.clear()
        assert server.wait(180) == 0, server.text()
        assert [site.wait(60) for site in sites] == [0, 0, 0]
        assert programs.left() == []
    finally:
        programs.end()
    assert network.dropped > 0
    contributed = [(event["round"], event["client"]) for event in of_kind(run, "update")]
    assert contributed == [(number, name) for number in range(1, 5) for name in sorted(SITES)]
    assert of_kind(run, "end")[0]["weights_sha256"] == of_kind(alone, "end")[0]["weights_sha256"]
    assert Path(run.report).exists()
