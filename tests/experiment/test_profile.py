from __future__ import annotations

import pytest

from fedmtl.engines import local
from fedmtl.experiment import profile
from fedmtl.experiment.profile import Stopwatch
from fedmtl.experiment.run import start_run
from raw_events import raw_events


def test_every_moment_is_counted_once():
    times = iter([0.0, 1.0, 4.0, 10.0])
    watch = Stopwatch(lambda: next(times))
    inner = watch.around("inner", lambda: None)
    watch.around("outer", inner)()
    # outer from 0 to 10, inner from 1 to 4.
    assert watch.take() == {"inner": 3.0, "outer": 7.0}
    assert watch.take() == {}


def test_a_whole_one_keeps_what_is_inside():
    times = iter([0.0, 10.0])
    watch = Stopwatch(lambda: next(times))
    watch.around("outer", watch.around("inner", lambda: None), whole=True)()
    assert watch.take() == {"outer": 10.0}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_profiled_run_tells_where_its_seconds_went(make_config, workers):
    before = local.start_worker, local.encode_job
    run = start_run(make_config(f"compute.workers={workers}", "training.num_rounds=2"), "timed", profile=True)
    assert (local.start_worker, local.encode_job) == before
    found = [event for event in raw_events(run) if event["event"] == "profile"]
    assert [event["round"] for event in found] == [0, 1, 2]
    last = found[-1]
    assert sum(last["server"].values()) == pytest.approx(last["seconds"])
    # A label is missing here when the function it stood for was renamed.
    assert {probe.label for probe in profile.CLIENT} - {"other work"} <= {*last["clients"], *found[0]["clients"]}
    pool = {"training at once", "teaching", *(("sending", "receiving") if workers == 0 else ())}
    assert {probe.label for probe in profile.SERVER} - pool <= last["server"].keys()
    assert all(seconds >= 0 for side in ("server", "clients") for seconds in last[side].values())


def test_a_run_without_it_tells_nothing_and_gives_the_same_weights(make_config):
    ends = []
    for profiled in (False, True):
        run = start_run(make_config("training.num_rounds=1"), "same", profile=profiled)
        events = raw_events(run)
        assert any(event["event"] == "profile" for event in events) is profiled
        ends.append(events[-1]["weights_sha256"])
    assert ends[0] == ends[1]
