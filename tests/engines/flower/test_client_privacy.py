"""Client-level differential privacy over sites with TLS: noise and samples come from the server's secret."""

from __future__ import annotations

import secrets
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from engines.flower.deployment import Server, Site, make_certs, of_kind
from fedmtl.deploy import server as deployed
from fedmtl.deploy.server import SECRET, SECRET_BYTES, resume_served
from fedmtl.errors import FedmtlError
from fedmtl.experiment.run import start_run
from fedmtl.federation.checkpoint import load_checkpoint
from fedmtl.federation.policy import Policy
from fedmtl.methods.client_privacy import NAME
from fedmtl.methods.noise import KeyedNoise, derive_key

TASKS = {f"{task}_client": [task] for task in ("sentiment", "paraphrase", "similarity")}
ON = (
    "federation.clients_per_task=1",
    "federation.average=uniform",
    "federation.vocabulary_slices=false",
    "privacy.client={noise_multiplier: 1.0, max_norm: 0.5, sampling_rate: 0.5, delta: 1e-3}",
    "evaluation.where=clients",
)


def sizes(secret, num_rounds):
    keys = (derive_key(secret, NAME, "sample", number) for number in range(1, num_rounds + 1))
    return [len(KeyedNoise(key).chosen(len(TASKS), 0.5)) for key in keys]


@pytest.fixture
def secret(monkeypatch):
    """A secret that draws somebody in round 1 and nobody in round 2."""
    found = next(secret for number in count() if sizes(secret := number.to_bytes(SECRET_BYTES, "big"), 2) == [2, 0])
    monkeypatch.setattr(
        deployed, "secrets", SimpleNamespace(token_bytes=lambda size: found, token_hex=secrets.token_hex)
    )
    return found


def test_sites_are_drawn_and_hidden_by_the_servers_secret(make_config, tmp_path, secret):
    config = make_config(*ON)
    keys = make_certs(tmp_path / "certs", TASKS)
    server = Server(config, tmp_path / "certs")
    sites = [Site(server, tmp_path / name, name, tuple(tasks), keys[name]) for name, tasks in TASKS.items()]
    run = server.finish()
    for site in sites:
        site.finish()

    assert server.failures() == {}
    assert [event["clients"] for event in of_kind(run, "round")] == [0, 2, 0]
    last = of_kind(run, "privacy")[-1]
    assert last["releases"] == [{"chance": 0.5, "noise_multiplier": 1.0, "times": 2}]
    assert "seed" not in last["words"], "it is no simulation"
    # Nobody but the server's folder has what the noise is drawn from, and the config's seed does not give it.
    path = run.path / SECRET
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (secret, 0o600)
    alone = start_run(config, "alone")
    states = [load_checkpoint(each.checkpoints) for each in (run, alone)]
    assert not any(torch.equal(states[0].weights[key], value) for key, value in states[1].weights.items())
    path.unlink()
    with pytest.raises(FedmtlError, match=r"secret.bin: is not the run's secret of 32 bytes"):
        resume_served(run)


@pytest.mark.slow
def test_a_site_that_requires_noise_of_sites_does_not_join_where_the_server_adds_it(make_config, tmp_path):
    server = Server(make_config(*ON, "federation.join_timeout=3"))
    required = Policy.model_validate({"require": {"client_privacy": {}}})
    site = Site(server, tmp_path / "sentiment", "sentiment_client", ("sentiment",), policy=required)
    assert "requires noise that sites add (require.client_privacy.noise_at)" in str(site.finish())
    # Rounds of nobody go by, as those in which nobody is drawn.
    assert [event["clients"] for event in of_kind(server.finish(), "round")] == [0, 0, 0]
