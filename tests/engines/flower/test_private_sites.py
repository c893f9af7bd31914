"""Noise on gradients over sites with TLS: each draws from a secret of its own, and holds the server to its policy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engines.flower.deployment import Server, Site, make_certs, of_kind
from fedmtl.deploy.site_client import SECRET, site_secret
from fedmtl.errors import FedmtlError
from fedmtl.experiment.run import start_run
from fedmtl.federation.policy import Policy
from fedmtl.methods.example_account import LEDGER
from fedmtl.methods.example_privacy import NAME
from fedmtl.runs.folder import RunFolder

PRIVATE = ("privacy.example.noise_multiplier=0.8", "evaluation.every=100", "federation.clients_per_task=1")
TASKS = ("sentiment", "paraphrase", "similarity")
REQUIRED = Policy.model_validate({"require": {"example_privacy": {"max_epsilon": 100}}})


def sha(run: RunFolder) -> str:
    found: str = of_kind(run, "end")[0]["weights_sha256"]
    return found


@pytest.mark.slow
def test_sites_draw_noise_that_the_server_cannot(make_config, tmp_path):
    config = make_config(*PRIVATE)
    keys = make_certs(tmp_path / "certs", {f"{task}_client": [task] for task in TASKS})
    server = Server(config, certs=tmp_path / "certs")
    sites = {
        task: Site(server, tmp_path / task, f"{task}_client", (task,), keys[f"{task}_client"], policy=REQUIRED)
        for task in TASKS
    }
    run = server.finish()
    for site in sites.values():
        site.finish()
    assert server.failures() == {}
    last = of_kind(run, NAME)[-1]
    # Forty examples, batches of eight: five steps in each of two rounds.
    assert {task: one["releases"] for task, one in last["tasks"].items()} == {
        task: [{"chance": 0.2, "noise_multiplier": 0.8, "times": 10}] for task in TASKS
    }
    simulated = start_run(config, "simulated")
    assert [event["tasks"] for event in of_kind(simulated, NAME)] == [event["tasks"] for event in of_kind(run, NAME)]
    # The simulation's noise follows from the seed; the sites' follows from nothing that the server has.
    assert sha(simulated) != sha(run)
    secrets = [(tmp_path / task / SECRET).read_bytes() for task in TASKS]
    assert len(set(secrets)) == 3
    assert all((tmp_path / task / SECRET).stat().st_mode & 0o077 == 0 for task in TASKS)


def test_a_job_that_is_asked_again_is_not_counted_again(make_config, tmp_path):
    server = Server(make_config(*PRIVATE, "training.num_rounds=3"))
    sites = [Site(server, tmp_path / task, f"{task}_client", (task,)) for task in TASKS[1:]]
    leaving = Site(server, tmp_path / "sentiment", "sentiment_client", ("sentiment",), leaves_after=1)
    assert leaving.finish() == "left"
    # It comes back with the same folder, and gets the open job once more.
    sites.append(Site(server, tmp_path / "sentiment", "sentiment_client", ("sentiment",)))
    run = server.finish()
    for site in sites:
        site.finish()
    (path,) = (tmp_path / "sentiment").glob(f"*/sentiment_client/{LEDGER}")
    assert len(json.loads(path.read_text())["sentiment"]) == 3
    assert [one["times"] for one in of_kind(run, NAME)[-1]["tasks"]["sentiment"]["releases"]] == [15]


def test_a_site_that_requires_noise_does_not_join_without(make_config, tmp_path):
    server = Server(make_config("federation.clients_per_task=1", "federation.join_timeout=3"))
    site = Site(server, tmp_path / "sentiment", "sentiment_client", ("sentiment",), policy=REQUIRED)
    assert "the policy requires noise on gradients (require.example_privacy)" in str(site.finish())
    with pytest.raises(FedmtlError):
        server.finish()


def test_a_secret_is_made_once(tmp_path: Path) -> None:
    first = site_secret(tmp_path / "site")
    assert len(first) == 32
    assert site_secret(tmp_path / "site") == first != site_secret(tmp_path / "other")
    (tmp_path / "site" / SECRET).write_bytes(b"short")
    with pytest.raises(FedmtlError, match="is not the 32 bytes"):
        site_secret(tmp_path / "site")
