"""The plug-ins of examples/plugins, as somebody else would write them: outside the package, on its public names."""

from __future__ import annotations

import csv
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from pydantic import BaseModel

import fedmtl
from fedmtl import capabilities
from fedmtl.errors import ConfigError
from fedmtl.experiment.run import start_run
from raw_events import raw_events

PLUGINS = Path(__file__).parents[2] / "examples" / "plugins"
ONE_STEP = ("training.num_rounds=2", "compute.workers=0", "training.local_steps=2")


@pytest.fixture(autouse=True)
def _plugins(monkeypatch):
    """Registered for one test: workers of other tests could not import them."""
    monkeypatch.syspath_prepend(str(PLUGINS))
    monkeypatch.setattr(capabilities, "_REGISTERED", {})
    monkeypatch.setattr(capabilities, "_KINDS", {})
    for path in PLUGINS.glob("*.py"):
        sys.modules.pop(path.stem, None)
        import_module(path.stem)


@pytest.mark.parametrize("path", sorted(PLUGINS.glob("*.py")), ids=lambda path: path.stem)
def test_a_plugin_is_short_and_stands_on_public_names(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 60
    assert "from fedmtl." not in text
    assert path.stem in sys.modules


@pytest.fixture
def plain_weights(run_once) -> str:
    """The weights of the same run without a plug-in."""
    return str(raw_events(run_once(*ONE_STEP))[-1]["weights_sha256"])


def weights_of(make_config, *overrides: str) -> str:
    run = start_run(make_config(*ONE_STEP, *overrides), "plugged")
    end = raw_events(run)[-1]
    assert end["status"] == "done", end["reason"]
    return str(end["weights_sha256"])


def test_a_median_aggregates_other_weights_than_a_mean(make_config, plain_weights):
    assert weights_of(make_config, "federation.aggregation=median") != plain_weights
    heads = 'federation.aggregation={scopes: {"task:*": median}}'
    assert weights_of(make_config, heads) != plain_weights


@pytest.mark.parametrize("compute", ["compute.workers=1", "compute.stack=3"])
def test_a_loss_term_works_in_workers_and_where_clients_are_stacked(make_config, plain_weights, compute):
    term = "methods={rdrop: {weight: 2.0}}"
    alone = weights_of(make_config, term)
    assert alone != plain_weights
    # Workers import the plug-in; in a stack its clients train one at a time, as it does not say that it can be stacked.
    assert weights_of(make_config, term, compute) == alone


def test_a_server_method_changes_weights_and_writes_its_event(make_config, plain_weights):
    run = start_run(make_config(*ONE_STEP, "methods={averaged_rounds: {momentum: 0.9}}"), "averaged")
    found = [event for event in raw_events(run) if event["event"] == "averaged_rounds"]
    assert [event["round"] for event in found] == [1, 2]
    assert raw_events(run)[-1]["weights_sha256"] != plain_weights


NOISE = "methods={update_noise: {max_norm: 0.05, noise: 0.0001}}"


def test_a_filter_clips_every_update_and_adds_the_noise_of_its_seed(make_config):
    """The norm of what arrives is the bound, and noise: sqrt(n) times its deviation, which is small beside it."""
    from fedmtl.experiment.prepare import open_engine, prepare
    from fedmtl.federation.dispatch import Dispatch
    from fedmtl.runs.folder import create_run

    def updates(*overrides: str):
        prepared = prepare(make_config(*ONE_STEP, *overrides))
        engine = open_engine(prepared, create_run(Path(prepared.config.output), f"run{len(made)}"))
        dispatch, settings = Dispatch(prepared.server), prepared.server.settings.to_dict()
        jobs = [
            dispatch.job(
                "train", prepared.state, client, prepared.server.active_tasks(client, 1), info.rows, 1, settings
            )
            for client, info in prepared.clients.items()
        ]
        try:
            made.append({answer.client: answer for answer in engine.run(jobs, 60)})
        finally:
            engine.close()
        return made[-1]

    def norm(delta):
        return sum(float(value.double().square().sum()) for value in delta.values()) ** 0.5

    made: list = []
    plain = updates()
    clipped = updates("methods={update_noise: {max_norm: 0.05}}")
    noisy = updates(NOISE)
    for client, update in plain.items():
        assert norm(update.delta) > 0.05
        assert norm(clipped[client].delta) == pytest.approx(0.05, rel=1e-5)
        added = {key: noisy[client].delta[key] - value for key, value in clipped[client].delta.items()}
        numbers = sum(value.numel() for value in added.values())
        assert norm(added) == pytest.approx(0.0001 * numbers**0.5, rel=0.05)
    # Clients that train at once are filtered as each by itself is.
    loud = "methods={update_noise: {max_norm: 0.05, noise: 0.1}}"
    alike = ("model.encoder_dropout=0", "model.head_dropout=0", "training.max_grad_norm=0.5", "training.epsilon=1e-3")
    at_once, alone = updates(loud, *alike, "compute.stack=3"), updates(loud, *alike)
    for client, update in alone.items():
        for key, value in update.delta.items():
            torch.testing.assert_close(at_once[client].delta[key], value, atol=1e-5, rtol=0)


def test_a_filter_works_in_workers_and_where_clients_are_stacked(make_config, plain_weights):
    alone = weights_of(make_config, NOISE)
    assert alone != plain_weights
    assert weights_of(make_config, NOISE, "compute.workers=1") == alone
    assert weights_of(make_config, NOISE, "compute.stack=3") != weights_of(make_config, "compute.stack=3")


def test_a_filter_says_what_it_cannot_work_with_before_round_1(make_config):
    with pytest.raises(ConfigError, match=r"^methods.update_noise: wire.error_feedback would add to an update after"):
        start_run(make_config(NOISE, "wire.up=int8"), "never")
    assert weights_of(make_config, NOISE, "wire.up=int8", "wire.error_feedback=false")


def test_a_tracker_sees_every_round(make_config):
    run = start_run(make_config(*ONE_STEP, "methods={csv_tracker: {file: scores.csv}}"), "tracked")
    with (run.path / "scores.csv").open() as file:
        assert [row[0] for row in csv.reader(file)] == ["0", "1", "2"]


def test_an_option_that_a_plugin_does_not_have_is_one_line_before_round_1(make_config):
    with pytest.raises(ConfigError, match=r"methods.rdrop.wieght: unknown key; did you mean `weight`"):
        start_run(make_config("methods={rdrop: {wieght: 2.0}}"), "never")
    with pytest.raises(ConfigError, match=r"methods.rdrop.weight: found -1"):
        start_run(make_config("methods={rdrop: {weight: -1}}"), "never")
    with pytest.raises(ConfigError, match=r"methods.rdorp: no capability is called so; did you mean `rdrop`"):
        start_run(make_config("methods={rdorp: {}}"), "never")
    with pytest.raises(ConfigError, match=r"federation.aggregation: found 'medain', no rule is called so; did"):
        start_run(make_config("federation.aggregation=medain"), "never")
    with pytest.raises(
        ConfigError, match=r"federation.aggregation.scopes.all: found 'krum', no rule is called so; it is one of"
    ):
        start_run(make_config("federation.aggregation={scopes: {all: krum}}"), "never")
    with pytest.raises(ConfigError, match=r"federation.aggregation.scopes: `group:x` matches no scope"):
        start_run(make_config("federation.aggregation={scopes: {'group:x': multi_krum}}"), "never")
    with pytest.raises(ConfigError, match=r"methods.pruning: is switched on by a key of its own"):
        start_run(make_config("methods={pruning: {}}"), "never")


class NoOptions(BaseModel):
    pass


class Broken(fedmtl.LocalMethod):
    name = "broken"

    def __init__(self, options):
        self._client = None

    def start(self, client, received, stored):
        self._client = client

    def stepped(self, values):
        if "sentiment" in self._client.shards:
            raise ZeroDivisionError("by a plug-in")


class BrokenAfter(fedmtl.ServerMethod):
    name = "broken_after"

    def after_aggregation(self, before, after):
        raise LookupError("of a plug-in")


def test_a_plugin_that_raises_at_a_client_costs_that_client(make_config):
    register_once(fedmtl.Capability("broken", Broken, options=NoOptions))
    run = start_run(make_config(*ONE_STEP, "methods={broken: {}}"), "broken")
    events = raw_events(run)
    assert events[-1]["status"] == "done"
    failed = {event["client"]: event["reason"] for event in events if event["event"] == "failure"}
    assert failed
    assert all("ZeroDivisionError" in reason for reason in failed.values())
    assert all("sentiment" in client for client in failed)


class BrokenFilter(fedmtl.UpdateFilter):
    name = "broken_filter"

    def __init__(self, options):
        self._where = options["where"]

    def at_client(self, update, client):
        if self._where == "client" and "sentiment" in update.tasks:
            raise ZeroDivisionError("by a filter")
        return update, fedmtl.Extra()

    def at_server(self, update, job):
        if self._where == "server" and "sentiment" in job.tasks:
            raise ZeroDivisionError("by a filter")
        return update


class Where(BaseModel):
    where: str


@pytest.mark.parametrize("where", ["client", "server"])
@pytest.mark.parametrize("compute", ["compute.stack=0", "compute.stack=3"])
def test_a_filter_that_raises_costs_the_client_and_is_named(make_config, where, compute):
    register_once(fedmtl.Capability("broken_filter", update_filter=BrokenFilter, options=Where))
    run = start_run(make_config(*ONE_STEP, compute, f"methods={{broken_filter: {{where: {where}}}}}"), "broken")
    events = raw_events(run)
    assert events[-1]["status"] == "done"
    failed = {event["client"]: event["reason"] for event in events if event["event"] == "failure"}
    assert set(failed) == {"sentiment_client_1", "sentiment_client_2"}
    assert set(failed.values()) == {"broken_filter failed with ZeroDivisionError: by a filter"}


def test_a_filter_that_cannot_be_made_is_one_line_before_round_1(make_config):
    class NeverMade(fedmtl.UpdateFilter):
        def __init__(self, options):
            raise LookupError("of its options")

    register_once(fedmtl.Capability("never_made", update_filter=NeverMade, options=NoOptions))
    with pytest.raises(ConfigError, match=r"^methods.never_made: failed with LookupError: of its options$"):
        start_run(make_config("methods={never_made: {}}"), "never")


def test_a_plugin_that_raises_at_the_server_is_named(make_config):
    register_once(fedmtl.Capability("broken_after", server=lambda setup: BrokenAfter(), options=NoOptions))
    with pytest.raises(fedmtl.CannotContinue, match="round 1: broken_after failed with LookupError: of a plug-in"):
        start_run(make_config(*ONE_STEP, "methods={broken_after: {}}"), "broken")


def register_once(capability):
    from fedmtl.capabilities import names

    if capability.name not in names():
        fedmtl.register(capability)
