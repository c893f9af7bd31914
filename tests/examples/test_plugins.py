"""The plug-ins of examples/plugins, as somebody else would write them: outside the package, on its public names."""

from __future__ import annotations

import csv
import sys
from importlib import import_module
from pathlib import Path

import pytest
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


def weights_of(make_config, *overrides: str) -> str:
    run = start_run(make_config(*ONE_STEP, *overrides), "plugged")
    end = raw_events(run)[-1]
    assert end["status"] == "done", end["reason"]
    return str(end["weights_sha256"])


def test_a_median_aggregates_other_weights_than_a_mean(make_config):
    assert weights_of(make_config, "federation.aggregation=median") != weights_of(make_config)


@pytest.mark.parametrize("compute", ["compute.workers=1", "compute.stack=3"])
def test_a_loss_term_works_in_workers_and_where_clients_are_stacked(make_config, compute):
    term = "methods={rdrop: {weight: 2.0}}"
    alone = weights_of(make_config, term)
    assert alone != weights_of(make_config)
    # Workers import the plug-in; in a stack its clients train one at a time, as it does not say that it can be stacked.
    assert weights_of(make_config, term, compute) == alone


def test_a_server_method_changes_weights_and_writes_its_event(make_config):
    run = start_run(make_config(*ONE_STEP, "methods={averaged_rounds: {momentum: 0.9}}"), "averaged")
    found = [event for event in raw_events(run) if event["event"] == "averaged_rounds"]
    assert [event["round"] for event in found] == [1, 2]
    assert raw_events(run)[-1]["weights_sha256"] != weights_of(make_config)


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


def test_a_plugin_that_raises_at_the_server_is_named(make_config):
    register_once(fedmtl.Capability("broken_after", server=lambda setup: BrokenAfter(), options=NoOptions))
    with pytest.raises(fedmtl.CannotContinue, match="round 1: broken_after failed with LookupError: of a plug-in"):
        start_run(make_config(*ONE_STEP, "methods={broken_after: {}}"), "broken")


def register_once(capability):
    from fedmtl.capabilities import names

    if capability.name not in names():
        fedmtl.register(capability)
