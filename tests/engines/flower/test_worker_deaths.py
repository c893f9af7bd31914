"""Deaths in a deployment: a site's worker gets its job once more, and a server that had said goodbye waits for nobody.

The workers live at the top of this file, so that they can be imported.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from engines.flower.deployment import Server, Site, of_kind
from fedmtl.engines.flower.site_service import SiteJob
from fedmtl.engines.worker import Handler, WorkerPool
from fedmtl.experiment.run import start_run
from fedmtl.experiment.serve import resume_served
from fedmtl.experiment.site_worker import SiteSettings, start_site
from fedmtl.runs import cut_back

CLIENT, TASK = "sentiment_client", "sentiment"


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
            with pytest.raises(Exception, match=f"{CLIENT}.*both processes that had its job died"):
                server.finish()
        assert len(list((tmp_path / CLIENT).glob("died-*"))) == deaths
    finally:
        site.made.close()


def test_a_server_killed_after_its_last_round_waits_for_no_site(make_config, tmp_path):
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
    sha = of_kind(run, "end")[0]["weights_sha256"]
    # As if it had been killed while it wrote the model.
    cut_back(run, 1)
    run.report.unlink()
    began = time.monotonic()
    resume_served(run)
    assert time.monotonic() - began < 25
    assert [event["weights_sha256"] for event in of_kind(run, "end")] == [sha]
    assert [event["round"] for event in of_kind(run, "round")] == [0, 1]
    assert run.report.exists()
