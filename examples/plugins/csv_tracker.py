"""A tracker of another package: the overall score of every round, as lines of a CSV file.

import csv_tracker                             # registers it
fedmtl.run({"tasks": {...}, "methods": {"csv_tracker": {"file": "scores.csv"}}})
"""

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from fedmtl import Capability, Event, register


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")

    file: str = "scores.csv"


class CsvTracker:
    def __init__(self, options: Options, folder: Path) -> None:
        self._file = (folder / options.file).open("a", encoding="utf-8")

    def event(self, event: Event) -> None:
        if event.kind == "round":
            self._file.write(f"{event.round},{event.overall}\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()


register(Capability("csv_tracker", tracker=CsvTracker, options=Options))
