import importlib.metadata
import subprocess
import sys

import pytest
from pydantic import BaseModel

from fedmtl import capabilities
from fedmtl.capabilities import (
    _LOADED,
    _REGISTERED,
    BUILT_IN,
    Capability,
    aggregator,
    check_methods,
    constraints,
    find,
    is_stackable,
    local_methods,
    names,
    plugin_modules,
    register,
    switched_on,
    update_filters,
)
from fedmtl.errors import ConfigError
from fedmtl.experiment.run import start_run
from fedmtl.federation.filters.protocol import UpdateFilter
from fedmtl.training.local_method import LocalMethod
from fedmtl.training.stacked.method import StackedMethod
from raw_events import raw_events


@pytest.fixture
def added():
    """Registers capabilities for one test."""
    done = []

    def add(capability: Capability) -> Capability:
        register(capability)
        done.append(capability.name)
        return capability

    yield add
    for name in done:
        _REGISTERED.pop(name, None)


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_is_found_under_its_own_name(name):
    capability = find(name)
    assert capability.name == name
    assert capability.local is not None or capability.server is not None
    if capability.local is not None:
        assert capability.local.name == name


def test_an_unknown_name_is_an_error_that_lists_the_known_ones(added):
    added(Capability("test_other"))
    with pytest.raises(ConfigError, match="no capability is called nobody; there are") as caught:
        find("nobody")
    assert all(name in str(caught.value) for name in [*BUILT_IN, "test_other"])
    with pytest.raises(ConfigError, match="no capability is called nobody"):
        local_methods({"nobody": {}})


def test_a_registered_capability_is_found_after_the_built_in_ones(added):
    one = added(Capability("test_one"))
    assert find("test_one") is one
    assert names()[: len(BUILT_IN)] == list(BUILT_IN)
    assert names()[-1] == "test_one"


@pytest.mark.parametrize("name", ["fedprox", "test_taken"])
def test_a_taken_name_is_refused(added, name):
    added(Capability("test_taken"))
    with pytest.raises(ConfigError, match=f"the capability {name} is there already"):
        register(Capability(name))
    assert find("fedprox").local is not None


def test_the_same_capability_may_be_registered_again(added):
    one = added(Capability("test_one"))
    register(one)
    assert find("test_one") is one


def test_a_capability_of_an_entry_point_is_loaded_when_it_is_looked_up(added, monkeypatch):
    class Point:
        name, loads = "test_point", 0

        def load(self):
            Point.loads += 1
            return Capability("test_point")

    monkeypatch.setattr("fedmtl.capabilities._entry_points", lambda: {"test_point": Point()})
    try:
        assert "test_point" in names()
        assert Point.loads == 0
        assert find("test_point") is find("test_point")
        assert Point.loads == 1
    finally:
        _REGISTERED.pop("test_point", None)
        _LOADED.discard("test_point")


class NoOptions(BaseModel):
    pass


class Point:
    """An entry point of an installed package."""

    def __init__(self, capability):
        self.name, self._capability = capability.name, capability

    def load(self):
        return self._capability


@pytest.fixture
def searches(monkeypatch):
    """The groups of entry points that fedmtl searched for, where packages with two capabilities are installed."""
    found = []
    halves = {"options": NoOptions, "server": lambda setup: None}
    points = [Point(Capability("test_far", **halves)), Point(Capability("test_rule", aggregator=lambda *given: None))]

    def entry_points(**given):
        if given["group"].startswith("fedmtl"):  # torch searches for its own
            found.append(given["group"])
        return points if given["group"] == capabilities.GROUP else []

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    monkeypatch.setattr(capabilities, "_REGISTERED", {})
    monkeypatch.setattr(capabilities, "_LOADED", set())
    capabilities._entry_points.cache_clear()
    yield found
    capabilities._entry_points.cache_clear()


def test_a_plain_run_searches_no_installed_package(make_config, searches):
    run = start_run(make_config(), "plain")
    assert raw_events(run)[-1]["status"] == "done"
    assert searches == []


def test_what_is_registered_is_found_without_a_search(make_config, searches):
    register(Capability("test_near", options=NoOptions, server=lambda setup: None))
    config = make_config("methods={test_near: {}}")
    check_methods(config)
    assert switched_on(config) == [*(name for name in BUILT_IN if find(name).options is None), "test_near"]
    assert plugin_modules() == [__name__]
    assert searches == []


def test_packages_are_searched_once_for_names_that_are_not_known_otherwise(make_config, searches):
    register(Capability("test_near", options=NoOptions))
    config = make_config("methods={test_far: {}, test_near: {}}", "federation.aggregation=test_rule")
    # What is registered comes first, as in `names`.
    assert switched_on(config)[-2:] == ["test_near", "test_far"]
    check_methods(config)
    assert aggregator(config) is find("test_rule").aggregator
    assert plugin_modules() == []  # workers find entry points themselves
    with pytest.raises(ConfigError, match=r"methods\.test_fra: no capability is called so; did you mean `test_far`"):
        check_methods(make_config("methods={test_fra: {}}"))
    assert searches == ["fedmtl"]


def test_importing_the_table_loads_no_numeric_library_and_no_method():
    lines = (
        "import sys, fedmtl.capabilities as own",
        "heavy = [name for name in ('torch', 'numpy', 'transformers') if name in sys.modules]",
        "own.names()",
        "print(heavy, [name for name in sys.modules if name.startswith('fedmtl.methods')])",
    )
    done = subprocess.run([sys.executable, "-c", "; ".join(lines)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] []"


class Silent(LocalMethod):
    name = "test_silent"

    def __init__(self, options):
        self.options = options


class StackedOne(StackedMethod):
    name = "test_stacked"

    def __init__(self, options):
        self.options = options


class Stacked(Silent):
    name = "test_stacked"
    stacked = StackedOne


def test_a_method_that_does_not_say_stacked_is_not_stackable(added):
    added(Capability(Silent.name, Silent))
    added(Capability(Stacked.name, Stacked))
    assert is_stackable([], 1)
    assert is_stackable(["fedprox", "logit_adjustment", "test_stacked"], 1)
    assert not is_stackable(["test_silent"], 1)
    assert not is_stackable(["fedprox", "test_silent"], 1)
    clients = [name for name in BUILT_IN if find(name).local is not None]
    # What a client of one task has no part in does not keep it from a stack.
    one = {name for name in clients if is_stackable([name], 1)}
    assert one == {"fedprox", "logit_adjustment", "adaptive_sharing", "pcgrad", "example_privacy"}
    assert {name for name in clients if is_stackable([name], 2)} == {
        "fedprox", "logit_adjustment", "example_privacy",
    }  # fmt: skip


def test_client_halves_come_in_the_order_of_the_table_with_their_options(added):
    added(Capability(Silent.name, Silent))
    made = local_methods({"test_silent": {"a": 1}, "pcgrad": {}, "fedprox": {"mu": 0.5}, "pruning": {}})
    assert [method.name for method in made] == ["pruning", "fedprox", "pcgrad", "test_silent"]
    assert made[-1].options == {"a": 1}


def test_what_the_server_must_keep_to_as_well():
    assert constraints({"pruning": {}, "fedprox": {"mu": 1.0}}) == {"pruning": {}}


class Filter(UpdateFilter):
    name = "test_filter"

    def __init__(self, options):
        self.options = options


def test_a_filter_has_no_part_in_training_and_comes_before_those_of_the_wire(added):
    added(Capability(Filter.name, update_filter=Filter))
    added(Capability(Silent.name, Silent, update_filter=Filter))
    added(Capability("test_a_filter", update_filter=Filter))
    assert is_stackable(["test_filter", "fedprox"], 1)
    assert not is_stackable(["test_filter", "test_silent"], 1)
    assert local_methods({"test_filter": {}}) == []
    given = {"test_filter": {"a": 1}, "fedprox": {"mu": 1.0}, "test_a_filter": {"a": 0}}
    made = update_filters(given, ["error_feedback"])
    assert [one.options["a"] for one in made[:-1]] == [0, 1]
    assert made[-1].name == "error_feedback"
    with pytest.raises(ConfigError, match="the capability error_feedback is there already"):
        register(Capability("error_feedback"))
