"""The server's half of a filter: after an update was decoded and checked, before it counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedmtl.capabilities import _REGISTERED, Capability, register
from fedmtl.federation.filters.protocol import UpdateFilter
from fedmtl.federation.messages import Update
from fedmtl.federation.server import rounds

from ..fake_engine import ENCODER, FakeEngine, make_server, scores, start, trained


class Changing(UpdateFilter):
    """Makes of an update what a test says, and notes whom it was called for."""

    def __init__(self, options):
        self._change, self._calls = options["change"], options["calls"]

    def at_server(self, update, job):
        self._calls.append((self.name, job))
        return self._change(update)


class First(Changing):
    name = "test_a_first"


class Second(Changing):
    name = "test_b_second"


@pytest.fixture(autouse=True)
def _registered():
    for made in (First, Second):
        register(Capability(made.name, update_filter=made))
    yield
    for made in (First, Second):
        _REGISTERED.pop(made.name)


def times(factor):
    return lambda update: replace(update, delta={key: value * factor for key, value in update.delta.items()})


def plus(number):
    return lambda update: replace(update, delta={key: value + number for key, value in update.delta.items()})


def round_1(calls, engine=None, *, max_update_norm=None, **changes):
    server = make_server(max_update_norm=max_update_norm)
    methods = {name: {"change": change, "calls": calls} for name, change in changes.items()}
    server = replace(server, settings=replace(server.settings, methods=methods))
    return list(rounds(start(), server, engine or FakeEngine(), lambda state: scores(sst2=0.5, stsb=0.5)))[1]


def test_filters_go_in_the_opposite_order_of_that_at_clients():
    calls = []
    done = round_1(calls, test_a_first=times(10), test_b_second=plus(1))
    # (1 + 1) * 10, where 1 * 10 + 1 is the order at clients.
    assert done.state.weights[ENCODER].tolist() == [20.0]
    assert [name for name, _ in calls[:2]] == ["test_b_second", "test_a_first"]


def test_a_filter_knows_the_job_without_its_tensors():
    calls = []
    round_1(calls, test_a_first=lambda update: update)
    jobs = {job.client: job for _, job in calls if job.round == 1}
    assert {client: job.tasks for client, job in jobs.items()} == {"a": ("sst2",), "b": ("sst2",), "c": ("stsb",)}
    assert all(job.weights == {} and job.settings["methods"] for job in jobs.values())


def test_an_update_that_is_refused_reaches_no_filter():
    def answer(job):
        update = trained(job)
        return replace(update, delta={ENCODER: torch.ones(7)}) if job.client == "a" else update

    calls = []
    done = round_1(calls, FakeEngine(answer), test_a_first=lambda update: update)
    assert [failure.client for failure in done.failures] == ["a"]
    assert {job.client for _, job in calls} == {"b", "c"}


def only(client, change):
    return lambda update: change(update) if update.client == client else update


def fails(update):
    raise LookupError("of a filter")


def quotes(update):
    raise LookupError("a client's \x1b[2Jwords\nround 9: done")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (fails, "test_a_first failed with LookupError: of a filter"),
        (quotes, "test_a_first failed with LookupError: a client's \\x1b[2Jwords"),
        (times(float("nan")), "after test_a_first its update cannot count: layer holds values that are not numbers"),
        (times(100), "after test_a_first its update cannot count: its norm 141 is over federation.max_update_norm 50"),
        (lambda update: None, "test_a_first failed with AttributeError: 'NoneType' object has no attribute 'client'"),
        (
            lambda update: replace(update, client="b"),
            "after test_a_first its update cannot count: answered as b",
        ),
        (
            lambda update: replace(update, delta={}),
            "after test_a_first its update cannot count: did not return layer of scope all",
        ),
    ],
)
def test_a_filter_that_fails_costs_the_client_and_is_named(change, reason):
    done = round_1([], max_update_norm=50, test_a_first=only("a", change))
    assert [(failure.client, failure.reason) for failure in done.failures] == [("a", reason)]
    assert [update.client for update in done.updates] == ["b", "c"]
    assert done.state.weights[ENCODER].tolist() == [1.0]
    assert "a" not in done.state.accepted


def test_no_filter_lets_a_client_count_for_more_than_it_has():
    def more(update: Update) -> Update:
        return replace(update, num_examples=dict.fromkeys(update.tasks, 1000))

    done = round_1([], test_a_first=more)
    assert {update.client: sum(update.num_examples.values()) for update in done.updates} == {"a": 1, "b": 3, "c": 1}
