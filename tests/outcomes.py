"""What a run came to: the hash of its weights, and its scores by round and task."""

from __future__ import annotations

from typing import Any

from fedmtl.runs.event_lines import events_of, first_of
from fedmtl.runs.events import EndEvent, EvaluationEvent
from fedmtl.runs.folder import RunFolder
from fedmtl.runs.log import read_events


def digest(run: RunFolder) -> str | None:
    end = first_of(read_events(run), EndEvent)
    assert end is not None
    return end.weights_sha256


def scores(run: RunFolder) -> dict[tuple[int, str], dict[str, Any]]:
    evaluations = events_of(read_events(run), EvaluationEvent)
    return {(event.round, event.task): {**event.metrics, "loss": event.loss} for event in evaluations}
