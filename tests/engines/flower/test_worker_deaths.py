"""Deaths in a deployment: a site's worker gets its job once more, and a server that had said goodbye waits for nobody.

The workers live at the top of this file, so that they can be imported.
"""

from __future__ import annotations

import os
import queue
import shutil
import signal
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engines.flower.deployment import Server, Site, of_kind
from fedmtl.deploy import server as serve
from fedmtl.deploy.server import resume_served
from fedmtl.deploy.site_worker import SiteSettings, start_site
from fedmtl.engines.flower.addresses import Address
from fedmtl.engines.flower.calls import SiteJob
from fedmtl.engines.processes import Handler, WorkerPool
from fedmtl.errors import RunNotFound
from fedmtl.experiment.run import start_run
from fedmtl.runs.events import WaitingEvent
from fedmtl.runs.folder import find_run, write_atomic
from fedmtl.runs.log import cut_back
from raw_events import raw_events

CLIENT, TASK = "sentiment_client", "sentiment"
OPENING = ("start", "data", "clients", "plan")


def start_mortal(settings: SiteSettings, deaths: int) -> Handler:
    """A worker that does its first jobs to the end, the client's state and the answer's file included, and dies."""
    handler = start_site(settings)

    def handle(call: Any) -> Any:
        result = handler(call)
        died = len(list(settings.folder.glob("died-*")))
        if isinstance(call, SiteJob) and died < deaths:
            (settings.folder / f"died-{died}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return handle


@dataclass
class MortalSite(Site):
    """A site with a worker process of its own, which dies that many times."""

    deaths: int = 0

    def pool(self) -> WorkerPool:
        settings = SiteSettings(self.client, self.tasks, self.folder, self.folder / "spool", device="cpu")
        self.made = WorkerPool(partial(start_mortal, deaths=self.deaths), settings, 1)
        return self.made


# Processes that load the model three times.
@pytest.mark.slow
@pytest.mark.parametrize("deaths", [1, 2])
def test_a_sites_worker_that_dies_gets_its_job_once_more(make_config, tmp_path, deaths):
    config = make_config(
        f"tasks={{{TASK}: {{train_samples: 40, val_samples: 24}}}}",
        "federation.clients_per_task=1",
        "training.keep_optimizer=true",
        "training.num_rounds=1",
        "wire.up=int8",
        "wire.down=int8",
        "federation.min_clients=1",
    )
    calm = start_run(config, "calm")
    server = Server(config)
    site = MortalSite(server, tmp_path / CLIENT, CLIENT, (TASK,), deaths=deaths)
    try:
        if deaths == 1:
            run = server.finish()
            assert server.failures() == {}
            assert of_kind(run, "end")[0]["weights_sha256"] == of_kind(calm, "end")[0]["weights_sha256"]
            assert [event["client"] for event in of_kind(run, "update")] == [CLIENT]
        else:
            with pytest.raises(Exception, match=f"{CLIENT}: its worker process ended"):
                server.finish()
        assert len(list((tmp_path / CLIENT).glob("died-*"))) == deaths
    finally:
        site.made.close()


@pytest.fixture
def served(make_config, tmp_path):
    """A run of one round over one site, which is done."""
    config = make_config(
        f"tasks={{{TASK}: {{train_samples: 40, val_samples: 24}}}}",
        "federation.clients_per_task=1",
        "training.num_rounds=1",
        "federation.round_timeout=30",
    )
    server = Server(config)
    site = Site(server, tmp_path / CLIENT, CLIENT, (TASK,))
    run = server.finish()
    site.finish()
    return run


def test_a_server_killed_after_its_last_round_waits_for_no_site(served):
    sha = of_kind(served, "end")[0]["weights_sha256"]
    # As if it had been killed while it wrote the model.
    cut_back(served, 1)
    served.report.unlink()
    began = time.monotonic()
    resume_served(served)
    assert time.monotonic() - began < 25
    assert [event["weights_sha256"] for event in of_kind(served, "end")] == [sha]
    assert [event["round"] for event in of_kind(served, "round")] == [0, 1]
    assert served.report.exists()


def test_a_server_killed_while_it_told_its_opening_tells_it_once(served, tmp_path):
    whole = raw_events(served)
    opening = [event["event"] for event in whole if event["event"] in OPENING]
    # As if it had been killed after the data's event, before round 0.
    lines = served.events.read_bytes().splitlines(keepends=True)
    cut = 1 + [event["event"] for event in whole].index("data")
    served.events.write_bytes(b"".join(lines[:cut]))
    shutil.rmtree(served.checkpoints)
    served.results.unlink()
    address: queue.Queue[Address] = queue.Queue()

    def observe(event):
        if isinstance(event, WaitingEvent):
            host, _, port = event.address.rpartition(":")
            address.put(Address(host, int(port)))

    thread = threading.Thread(target=resume_served, args=(served, None, observe), daemon=True)
    thread.start()
    site = Site(SimpleNamespace(address=address.get(timeout=60)), tmp_path / "again", CLIENT, (TASK,))
    thread.join(60)
    site.finish()
    assert [event["event"] for event in raw_events(served) if event["event"] in OPENING] == opening
    assert of_kind(served, "end")[0]["weights_sha256"] == whole[-1]["weights_sha256"]


@pytest.mark.parametrize("at", [0, 1])
def test_a_server_killed_while_it_made_its_folder_left_a_run_or_none(make_config, tmp_path, monkeypatch, at):
    class Killed(BaseException):
        pass

    countdown = iter(range(10))

    def dying(path, *parts):
        if next(countdown) == at:
            raise Killed
        write_atomic(path, *parts)

    monkeypatch.setattr("fedmtl.runs.folder.write_atomic", dying)
    config = make_config()
    with pytest.raises(Killed):
        serve.serve_run(config, "killed", serve.Endpoint(Address("127.0.0.1", 0), None))
    with pytest.raises(RunNotFound):
        find_run("killed", Path(config.output))
