"""What tests of masked runs share: their events, their weights, and a run that is killed while its sums are opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedmtl.config import Config
from fedmtl.experiment.run import resume_run, start_run
from fedmtl.methods.secure_session import Session
from fedmtl.runs.folder import RunFolder
from raw_events import raw_events


def of_kind(run: RunFolder, kind: str) -> list[dict[str, Any]]:
    return [event for event in raw_events(run) if event["event"] == kind]


def digest(run: RunFolder) -> str:
    return str(of_kind(run, "end")[-1]["weights_sha256"])


class Killed(BaseException):
    pass


def killed_and_resumed(config: Config, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run that was cut off in round 2, when its sums were open and nothing was written, and went on."""
    unmask = Session._unmask

    def dying(self: Session, *given: Any) -> None:
        unmask(self, *given)
        if self.number == 2:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Session, "_unmask", dying)
        with pytest.raises(Killed):
            start_run(config, "killed")
    return resume_run(RunFolder(Path(config.output) / "killed"))
