"""A run folder, empty or with three rounds."""

import pytest

from fedmtl.runs.events import EndEvent, PlanEvent
from fedmtl.runs.folder import create_run
from fedmtl.runs.log import append_event, append_results
from runs.two_tasks import START, round_events


@pytest.fixture
def run(tmp_path):
    return create_run(tmp_path / "runs", "demo")


@pytest.fixture
def three_rounds(run):
    append_event(run, START)
    append_event(run, PlanEvent(total=5))
    for number in range(4):
        events = round_events(number, accuracy=number / 4)
        for event in events:
            append_event(run, event)
        append_results(run, events)
    append_event(run, EndEvent(rounds=3))
    return run
