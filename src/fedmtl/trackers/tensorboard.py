"""TensorBoard (tensorboard.dev): event files that `tensorboard --logdir runs` finds and shows.

The config and the summary are texts; TensorBoard stores no files, so the report and the model stay in the run folder.
Every session writes a file of its own, which is read back with the others before the next one writes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from fedmtl.config.yaml_text import write_yaml
from fedmtl.errors import FedmtlError
from fedmtl.runs.folder import RunFolder
from fedmtl.trackers.points import SentOptions

NAME = "events.out.tfevents.{seconds:010d}.fedmtl.{number}"
CONFIG, SUMMARY = "config", "summary"


class Options(SentOptions):
    folder: str | None = Field(
        None, description="Folder in which the run gets one of its name; empty is `tensorboard` in the run's folder."
    )


class TensorBoard:
    def __init__(self, options: Options, run: RunFolder, id: str) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        # Two runs of one name in one folder are two runs, so a chosen folder has the id too.
        chosen = options.folder and Path(options.folder).expanduser() / f"{run.name}-{id[:6]}"
        self._folder = Path(chosen) if chosen else run.path / "tensorboard"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._texts: dict[str, str] = {}
        self._before = self._read_back()
        number = len(list(self._folder.glob("events.out.tfevents.*")))
        # TensorBoard's writer would put the name of the host into that of the file.
        path = self._folder / NAME.format(seconds=int(time.time()), number=number)
        self._writer = RecordWriter(path.open("xb"))
        self._writer.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())

    def _read_back(self) -> dict[int, set[str]]:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        if not any(self._folder.glob("events.out.tfevents.*")):
            return {}
        found: dict[int, set[str]] = {}
        known = EventAccumulator(str(self._folder), {"scalars": 0, "tensors": 0})
        try:
            known.Reload()
        except Exception as error:
            raise FedmtlError(f"{self._folder}: cannot be read by TensorBoard ({error}); move it away") from error
        for tag in known.Tags()["scalars"]:
            for scalar in known.Scalars(tag):
                found.setdefault(scalar.step, set()).add(tag)
        for tag in known.Tags()["tensors"]:
            texts = [event.tensor_proto.string_val[0].decode() for event in known.Tensors(tag)]
            self._texts[tag] = texts[-1]
        return found

    def logged(self) -> Mapping[int, set[str]]:
        return self._before

    def describe(self, facts: Mapping[str, Any]) -> None:
        self._text(CONFIG, f"```yaml\n{write_yaml(dict(facts))}\n```")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(Summary(value=values), step)

    def store(self, name: str, path: Path) -> None:
        raise AssertionError("TensorBoard stores no files")

    def finish(self, status: str, summary: Mapping[str, float | str], step: int) -> None:
        said = {**summary, "status": status}
        self._text(SUMMARY, f"```json\n{json.dumps(said, indent=1)}\n```", step)

    def _text(self, name: str, text: str, step: int = 0) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        if self._texts.get(name) != text:
            self._texts[name] = text
            self._write(text_pb(name, text), step)

    def _write(self, summary: Any, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        # One record: after a kill it is there as a whole or not at all.
        self._writer.write(Event(wall_time=time.time(), step=step, summary=summary).SerializeToString())
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
