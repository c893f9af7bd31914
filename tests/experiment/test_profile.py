from __future__ import annotations

import pytest

from fedmtl.experiment.run import start_run
from raw_events import raw_events

SERVER = {
    "cutting slices", "encoding", "waiting for clients", "decoding", "checking", "averaging", "server optimizer",
    "evaluating", "writing", "elsewhere",
}  # fmt: skip
CLIENTS = {
    "decoding", "binding", "batches", "forward and backward", "optimizer", "scoring", "encoding", "other work",
}  # fmt: skip


@pytest.mark.parametrize("workers", [0, 1])
def test_a_profiled_run_tells_where_its_seconds_went(make_config, workers):
    overrides = (f"compute.workers={workers}", "federation.server_optimizer.kind=fedavgm", "training.num_rounds=2")
    run = start_run(make_config(*overrides), "timed", profile=True)
    found = [event for event in raw_events(run) if event["event"] == "profile"]
    assert [event["round"] for event in found] == [0, 1, 2]
    last = found[-1]
    assert sum(last["server"].values()) == pytest.approx(last["seconds"])
    assert {*last["clients"], *found[0]["clients"]} == CLIENTS
    assert last["server"].keys() == SERVER | ({"sending", "receiving"} if workers else set())
    assert all(seconds >= 0 for side in ("server", "clients") for seconds in last[side].values())


def test_a_run_without_it_tells_nothing_and_gives_the_same_weights(make_config):
    ends = []
    for profiled in (False, True):
        run = start_run(make_config("training.num_rounds=1"), "same", profile=profiled)
        events = raw_events(run)
        assert any(event["event"] == "profile" for event in events) is profiled
        ends.append(events[-1]["weights_sha256"])
    assert ends[0] == ends[1]
