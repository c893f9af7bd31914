"""Trackio (github.com/gradio-app/trackio): a local SQLite store that `trackio show` draws, of Hugging Face's making.

Runs go to the store of this machine alone; `trackio sync` publishes a project of it to a Space.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from fedmtl.errors import FedmtlError
from fedmtl.runs.folder import RunFolder
from fedmtl.trackers.points import StoredOptions

# How Trackio is pointed to something else than the store of this machine.
ELSEWHERE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


class Options(StoredOptions):
    project: str = Field("fedmtl", description="The project, which is made where it is missing.")
    folder: str | None = Field(
        None, description="The folder of the store; empty is TRACKIO_DIR, and without that Trackio's own default."
    )


class Trackio:
    def __init__(self, options: Options, run: RunFolder, id: str) -> None:
        for name in ELSEWHERE:
            if os.environ.get(name):
                raise FedmtlError(f"{name} is set, but fedmtl writes to Trackio's local store alone; unset it")
        if options.folder:
            # Read when the library is imported.
            os.environ["TRACKIO_DIR"] = str(Path(options.folder).expanduser().absolute())
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        # A run is found by its name, and a deleted run folder may have had the same.
        self._project, self._name = options.project, f"{run.name}-{id[:6]}"
        self._storage: Any = SQLiteStorage
        self._run = trackio.init(
            options.project, self._name, resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False
        )
        # It is the name of the Hugging Face account.
        self._run.config["_Username"] = None
        self._rows: dict[int, set[str]] = {}
        if SQLiteStorage.get_project_db_path(self._project).exists():
            for row in SQLiteStorage.get_logs(self._project, self._name):
                names = set(row) - {"step", "timestamp"}
                self._rows.setdefault(int(row["step"]), set()).update(names)

    def logged(self) -> Mapping[int, set[str]]:
        return self._rows

    def describe(self, facts: Mapping[str, Any]) -> None:
        # It goes into the store with the next metrics of this session.
        self._run.config.update(facts)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def store(self, name: str, path: Path) -> None:
        self._run.log_artifact(path, name=f"{self._name}-{name}", type=name)

    def finish(self, status: str, summary: Mapping[str, float | str], step: int) -> None:
        # It has no summary of a run; docs/trackers.md says so.
        pass

    def close(self) -> None:
        self._run.finish()
        if self._storage.has_pending_data(self._project):
            raise FedmtlError("Trackio could not write all of the run in 30 seconds")
