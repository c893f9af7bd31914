"""Secure aggregation between machines: the weights of one machine, keys that the server cannot exchange, policies."""

from __future__ import annotations

import json

import pytest

from engines.flower.deployment import Server, Site, make_certs, of_kind
from fedmtl.engines.flower.certificates import fingerprint, make_node_key, read_private_key
from fedmtl.engines.flower.peers import PEERS, SiteIdentity
from fedmtl.experiment.run import start_run
from fedmtl.federation.policy import Policy
from fedmtl.federation.server import RoundFailed
from fedmtl.runs.folder import RunFolder

NAMES = ("a", "b", "c", "d")
MASKED = ("privacy.secure_aggregation={}", "federation.vocabulary_slices=false")


@pytest.fixture
def config(make_config):
    def make(*overrides: str):
        clients = ", ".join(f"{name}: {{tasks: [sentiment]}}" for name in NAMES)
        every = "tasks={sentiment: {train_samples: 160, val_samples: 24}}"
        made = make_config(f"clients={{{clients}}}", every, "training.num_rounds=2", *overrides)
        return made.model_copy(update={"tasks": {"sentiment": made.tasks["sentiment"]}})

    return make


def digest(run: RunFolder) -> str:
    (end,) = of_kind(run, "end")
    sha: str = end["weights_sha256"]
    return sha


def sites(server: Server, folder, certs=None, policy: Policy | None = None, **changes) -> list[Site]:
    def make(name: str) -> Site:
        key = None if certs is None else folder / "certs" / "sites" / f"{name}.key"
        keys = None if certs is None else certs[name]
        more = changes.get(name, {})
        return Site(
            server, folder / name, name, ("sentiment",), keys, key=key, **{"policy": policy or Policy(), **more}
        )

    return [make(name) for name in NAMES]


@pytest.mark.slow
def test_sites_without_keys_give_the_weights_and_scores_of_one_machine(config, tmp_path):
    wanted = config(*MASKED, "evaluation.where=clients")
    alone = start_run(wanted, "alone")
    server = Server(wanted)
    there = sites(server, tmp_path)
    run = server.finish()
    assert digest(run) == digest(alone)
    for kind in ("evaluation", "secure_aggregation"):
        found = [of_kind(each, kind) for each in (run, alone)]
        for events in found:
            for event in events:
                for key in ("seconds", "bytes_up", "bytes_down"):
                    event.pop(key, None)
        assert found[0] == found[1]
    assert [site.finish() for site in there] == ["deployed is done"] * 4


def test_sites_sign_their_keys_and_know_each_other(config, tmp_path):
    wanted = config(*MASKED)
    alone = start_run(wanted, "alone")
    certs = make_certs(tmp_path / "certs", {name: ["sentiment"] for name in NAMES})
    server = Server(wanted, tmp_path / "certs")
    there = sites(server, tmp_path, certs)
    run = server.finish()
    assert digest(run) == digest(alone)
    assert [site.finish() for site in there] == ["deployed is done"] * 4
    book = json.loads((tmp_path / "certs" / "enrolled.json").read_text())
    known = json.loads((tmp_path / "a" / PEERS).read_text())
    assert {name: found[:16] for name, found in known.items()} == {
        name: fingerprint(book[name]["key"]) for name in "bcd"
    }
    # What a site has of a session in the end are the shares that it gave out, and no secret.
    (left,) = (tmp_path / "a").glob("*/a/secure_aggregation.json")
    assert "answered" in json.loads(left.read_text())
    assert not {"cipher_secret", "mask_secret"} & set(json.loads(left.read_text()))


def test_a_key_that_changed_is_refused_by_name(config, tmp_path):
    """A server that took the place of b, with a key of its own, gets nothing from who knew b before."""
    certs = make_certs(tmp_path / "certs", {name: ["sentiment"] for name in NAMES})
    for name in "acd":
        (tmp_path / name).mkdir()
        (tmp_path / name / PEERS).write_text(json.dumps({"b": "0" * 64}))
    server = Server(config(*MASKED), tmp_path / "certs")
    there = sites(server, tmp_path, certs)
    with pytest.raises(RoundFailed, match=r"1 clients shared their secrets, and 3 are needed"):
        server.finish()
    said = "\n".join(there[0].said)
    assert "secure aggregation: b: its key is" in said
    assert "and was 0000000000000000 before" in said
    # Its words stay at the site; the server knows the code.
    assert "an exchange of a capability broke a rule of it" in server.failures()["a"][0]


def test_a_policy_names_the_keys_of_the_others(config, tmp_path):
    certs = make_certs(tmp_path / "certs", {name: ["sentiment"] for name in NAMES})
    book = json.loads((tmp_path / "certs" / "enrolled.json").read_text())
    peers = {name: fingerprint(book[name]["key"]) for name in NAMES}

    def policy(**peers: str) -> Policy:
        return Policy.model_validate({"require": {"secure_aggregation": {"peers": peers}}})

    server = Server(config(*MASKED, "training.num_rounds=1"), tmp_path / "certs")
    there = sites(server, tmp_path, certs, policy(**peers), d={"policy": policy(a=peers["a"], b="f" * 16)})
    run = server.finish()
    assert [event["client"] for event in of_kind(run, "update")] == ["a", "b", "c"]
    assert "secure aggregation: b: its key is" in "\n".join(there[3].said)
    assert not (tmp_path / "a" / PEERS).exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noise", "event", "ledger"),
    [
        ("privacy.example={noise_multiplier: 1, max_sampling_rate: 0.5}", "example_privacy", "sentiment"),
        ("privacy.client={epsilon: 20, noise_at: clients}", "privacy", "client_privacy"),
    ],
)
def test_sites_add_noise_from_secrets_of_their_own_and_count_it(config, tmp_path, noise, event, ledger):
    wanted = config(*MASKED, "federation.average=uniform", noise)
    alone = start_run(wanted, "alone")
    certs = make_certs(tmp_path / "certs", {name: ["sentiment"] for name in NAMES})
    server = Server(wanted, tmp_path / "certs")
    there = sites(server, tmp_path, certs)
    run = server.finish()
    assert [site.finish() for site in there] == ["deployed is done"] * 4
    assert digest(run) != digest(alone)
    # What the server states is what it states of the simulation: the same rounds, clients and noise.
    found, simulated = of_kind(run, event)[-1], of_kind(alone, event)[-1]
    assert {**found, "words": "", "time": 0} == {**simulated, "words": "", "time": 0}
    for name in NAMES:
        (file,) = (tmp_path / name).glob(f"*/{name}/{event if event == 'example_privacy' else ledger}.json")
        assert len(json.loads(file.read_text())[ledger]) == 2


@pytest.mark.slow
def test_a_site_that_goes_away_costs_its_own_part(config, tmp_path):
    """The third job of b would be the one that trains: its keys are known then, and its masks have to be removed."""
    server = Server(config(*MASKED, "federation.round_timeout=6", "training.num_rounds=1"))
    there = sites(server, tmp_path, b={"leaves_after": 2})
    run = server.finish()
    assert there[1].finish() == "left"
    (event,) = of_kind(run, "secure_aggregation")
    assert event["opened"] == {"all": 3, "task:sentiment": 3, "counts:sentiment": 3}
    assert event["dropped"] == {"train": 1}


def test_a_policy_that_requires_masks_refuses_a_server_without(config, tmp_path):
    server = Server(config("federation.join_timeout=2"))
    required = Policy.model_validate({"require": {"secure_aggregation": True}})
    there = sites(server, tmp_path, None, None, a={"policy": required})
    server.finish()
    assert "requires" in str(there[0].finish())
    assert "requires a protection of updates" in server.failures()["a"][0]


@pytest.mark.slow
def test_the_larger_number_of_clients_counts(config, tmp_path):
    """The policy of c wants four in every sum: without d, nobody's is opened."""
    wants = Policy.model_validate({"require": {"secure_aggregation": {"min_clients": 4}}})
    server = Server(config(*MASKED, "federation.round_timeout=4"))
    sites(server, tmp_path, c={"policy": wants}, d={"leaves_after": 2})
    with pytest.raises(RoundFailed, match="no sum has enough clients: the largest has 3"):
        server.finish()


def test_an_identity_takes_what_is_signed_and_remembers_the_key(tmp_path):
    keys = {name: read_private_key(make_node_key(name, tmp_path)[0]) for name in "ab"}
    mine = SiteIdentity(keys["a"], tmp_path / PEERS, {})
    other = SiteIdentity(keys["b"], tmp_path / "others.json", {})
    assert mine.refuses("b", other.public_key, b"words", other.sign(b"words")) is None
    assert mine.refuses("b", other.public_key, b"words", other.sign(b"word")) is not None
    assert mine.refuses("b", "no key", b"words", b"") == "its key is none"
    third = SiteIdentity(read_private_key(make_node_key("c", tmp_path)[0]), tmp_path / PEERS, {})
    assert "and was" in str(mine.refuses("b", third.public_key, b"words", third.sign(b"words")))
    assert (tmp_path / PEERS).stat().st_mode & 0o777 == 0o600
