"""Whoever follows a run from outside: a tracker sees every event as it is written down."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from fedmtl.runs.event_lines import Event


class Tracker(Protocol):
    """Takes a run's events somewhere else; it is made of its options and the run's folder."""

    def event(self, event: Event) -> None:
        """Take in an event that is in the run's file now."""
        ...

    def close(self) -> None:
        """The run is over, however it ended."""
        ...


class Trackers:
    """The trackers of a run. One that fails is left out from then on and named once: it never costs the run a round."""

    def __init__(self, trackers: Mapping[str, Tracker], remark: Callable[[str], None]) -> None:
        self._trackers, self._remark = dict(trackers), remark

    def event(self, event: Event) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.event(event)
            except Exception as error:
                del self._trackers[name]
                self._remark(f"the tracker {name} failed and is left out: {type(error).__name__}: {error}")

    def close(self) -> None:
        for name, tracker in self._trackers.items():
            try:
                tracker.close()
            except Exception as error:
                self._remark(f"the tracker {name} did not close: {type(error).__name__}: {error}")
        self._trackers = {}
