"""What is sent of a run: its config, one point of metrics for every round, and a summary when it is over.

All of it is made of the run's events, so it can be made again at any time and is the same. Nothing else goes out: no
path but its last part, no environment variable, no host or user name, no command line, no text of an example.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field

from fedmtl.errors import FedmtlError
from fedmtl.foreign import parse_json
from fedmtl.runs.event_lines import Event, NotAnEvent, from_json
from fedmtl.runs.events import (
    BaselineEvent,
    ConfigEvent,
    EndEvent,
    EvaluationEvent,
    ExamplePrivacyEvent,
    FailureEvent,
    PrivacyEvent,
    RoundEvent,
    StartEvent,
    UpdateEvent,
)
from fedmtl.runs.folder import RunFolder

# What describes the machine, where others write to, or where files lie.
NOT_SENT = ("output", "track", "compute", "energy")
OF_ROUND = ("clients", "failures", "samples", "bytes_up", "bytes_down", "seconds", "train_seconds", "evaluate_seconds")
_WINDOWS_PATH = re.compile(r"[A-Za-z]:[\\/]|\\\\")
_ROUND = re.compile(r"round-(\d{4,9})\.json")


class SentOptions(BaseModel):
    """What every tracker lets a user choose of what is sent."""

    model_config = ConfigDict(extra="forbid")

    clients: bool = Field(
        True, description="Also what each client scored, took, sent and failed, and the config's clients, by name."
    )


def without_secret(address: str | None, instead: str) -> str | None:
    """The address of a server as it may stand in a config; one with a password or a token in it is a ValueError."""
    parts = urlsplit(address or "")
    begins_with_user = "@" in parts.netloc and parts.scheme in ("http", "https")
    if parts.password is not None or begins_with_user or re.search(r"(password|token|key)=", parts.query, re.I):
        raise ValueError(f"an address with a password would stand in the run folder; set {instead} in the environment")
    return address


class StoredOptions(SentOptions):
    """As `SentOptions`, for a tracker that stores files."""

    artifacts: list[Literal["report", "model", "onnx"]] = Field(
        default=["model", "onnx"],
        description="Files sent when a run is over: the folder of the model, and the ONNX bundle where `fedmtl export"
        " --to onnx` has written one; also `report`, which has the config with its paths and what failing sites said"
        " (not without clients: it names them).",
    )


@dataclass(frozen=True)
class Point:
    """The metrics of one round."""

    step: int
    metrics: Mapping[str, float]


@dataclass
class Book:
    """What the events so far say of a run; `points` are those of whole rounds, in their order."""

    with_clients: bool = True
    facts: dict[str, Any] = field(default_factory=dict)
    points: dict[int, Point] = field(default_factory=dict)
    summary: dict[str, float | str] = field(default_factory=dict)
    status: str | None = None
    _open: dict[str, float] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Take in the next event; those that say nothing to a tracker are passed over."""
        match event:
            case StartEvent():
                self.facts |= _started(event)
            case ConfigEvent():
                self.facts["config"] = sent_config(event.config, with_clients=self.with_clients)
            case UpdateEvent():
                self._of_client(event.client, seconds=event.seconds, up=event.bytes_up, down=event.bytes_down)
                for task, said in event.tasks.items():
                    self._client_value(event.client, f"{task}/train_loss", said.loss)
            case FailureEvent():
                self._of_client(event.client, up=event.bytes_up, down=event.bytes_down)
                self._client_value(event.client, "failed", 1.0)
            case EvaluationEvent():
                self._scored(event)
            case PrivacyEvent():
                self._value(f"privacy/{event.unit}/epsilon", event.epsilon)
            case ExamplePrivacyEvent():
                for task, spent in event.tasks.items():
                    self._value(f"privacy/{task}/epsilon", spent.epsilon)
            case RoundEvent():
                self._close(event)
            case BaselineEvent():
                for metric, value in event.metrics.items():
                    if value is not None:
                        self.summary[f"baseline/{event.name}/{event.task}/{metric}"] = float(value)
            case EndEvent():
                self._end(event)
            case _:
                pass

    def _scored(self, event: EvaluationEvent) -> None:
        for metric, value in event.metrics.items():
            self._value(f"{event.task}/{metric}", value)
        self._value(f"{event.task}/loss", event.loss)
        for client, value in (event.clients or {}).items():
            self._client_value(client, f"{event.task}/score", value)

    def _close(self, event: RoundEvent) -> None:
        for name in OF_ROUND:
            self._value(name, getattr(event, name))
        self._value("overall", event.overall)
        self._value("classification", event.classification)
        for task, loss in event.losses.items():
            self._value(f"{task}/train_loss", loss)
        self.points[event.round] = Point(event.round, dict(sorted(self._open.items())))
        self._open = {}

    def _end(self, event: EndEvent) -> None:
        self.status = event.status or "done"
        said = {"status": self.status, "rounds": event.rounds, "weights_sha256": event.weights_sha256}
        self.summary |= {name: value for name, value in said.items() if value is not None}
        if event.energy is not None:
            self.summary["cpu_joules"] = event.energy.cpu_joules

    def _of_client(
        self, client: str, *, seconds: float | None = None, up: int | None = None, down: int | None = None
    ) -> None:
        for name, value in (("seconds", seconds), ("bytes_up", up), ("bytes_down", down)):
            self._client_value(client, name, value)

    def _client_value(self, client: str, name: str, value: float | None) -> None:
        if self.with_clients:
            self._value(f"clients/{client}/{name}", value)

    def _value(self, name: str, value: float | None) -> None:
        if value is not None:
            self._open[name] = float(value)


def _started(event: StartEvent) -> dict[str, Any]:
    known = {
        "version": event.version,
        "mode": event.mode,
        "seed": event.seed,
        "encoder": _sent(event.encoder),
        "num_rounds": event.num_rounds,
        "torch": event.torch,
        "transformers": event.transformers,
    }
    return {name: value for name, value in known.items() if value is not None}


def sent_config(config: Mapping[str, Any], *, with_clients: bool = True) -> dict[str, Any]:
    """A run's config without what is about the machine and names of labels; of a path only its last part stays."""
    left_out = {*NOT_SENT} if with_clients else {*NOT_SENT, "clients"}
    sent = {key: _sent(value) for key, value in config.items() if key not in left_out}
    tasks = sent.get("tasks")
    if isinstance(tasks, dict):
        # What texts are about may be as private as they are.
        sent["tasks"] = {name: _without_labels(task) for name, task in tasks.items()}
    return sent


def _without_labels(task: Any) -> Any:
    return {key: value for key, value in task.items() if key != "labels"} if isinstance(task, dict) else task


def _sent(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _sent(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_sent(inner) for inner in value]
    if isinstance(value, str) and (value.startswith(("/", "~", "./", "../", "file:")) or _WINDOWS_PATH.match(value)):
        return value.replace("\\", "/").rstrip("/").rpartition("/")[2]
    return value


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """The values of a nested mapping as text, by dotted key; nothing for what is None or empty."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else str(key))
    elif value is not None and value != []:
        yield path, str(value)


class Tail:
    """Reads events.jsonl as it grows; `book` is what it says so far.

    Only whole lines are read. Where the file was replaced, as a resume does that cuts it back, the book begins anew.
    """

    def __init__(self, run: RunFolder, *, with_clients: bool) -> None:
        self._run, self._with_clients = run, with_clients
        self._file: int | None = None
        self._offset = 0
        self.book = Book(with_clients)

    def read(self) -> None:
        """Take in what was written since the last call."""
        try:
            with self._run.events.open("rb") as file:
                # While it is open its number is nobody else's.
                number = os.fstat(file.fileno()).st_ino
                if number != self._file or file.seek(0, 2) < self._offset:
                    self._file, self._offset, self.book = number, 0, Book(self._with_clients)
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.split(b"\n")[:-1]:
            try:
                self.book.add(from_json(parse_json(line, "", "")))
            except (NotAnEvent, FedmtlError):
                # The run itself says what is wrong with its file, when it reads it.
                continue

    def final_points(self) -> list[Point]:
        """The points of rounds that no resume repeats: of those with a checkpoint, or all of a run that is over."""
        points = list(self.book.points.values())
        if self.book.status is not None or not self._run.checkpoints.is_dir():
            return points
        names = (_ROUND.fullmatch(path.name) for path in self._run.checkpoints.glob("round-*.json"))
        saved = [int(found[1]) for found in names if found]
        return [point for point in points if point.step <= max(saved, default=-1)]


def artifacts_of(run: RunFolder, options: SentOptions) -> dict[str, Path]:
    """The files and folders of a run that is over, by the name that a tracker stores them under."""
    chosen = getattr(options, "artifacts", [])
    found = {"report": run.report, "model": run.model, "onnx": run.path / "export" / "onnx"}
    if not options.clients:
        # It has a row for each client.
        del found["report"]
    found = {name: path for name, path in found.items() if name in chosen and path.exists()}
    for path in found.values():
        _check_links(run, path)
    return found


def _check_links(run: RunFolder, artifact: Path) -> None:
    """Raise where a file that is to be sent lies elsewhere: a run folder may come from others, who choose its links."""
    inside = run.path.resolve()
    for path in (artifact, *artifact.rglob("*")):
        if not path.resolve().is_relative_to(inside):
            raise FedmtlError(
                f"{path}: is a link out of the run folder, and such files are not sent; put a copy there, or leave it"
                " out with artifacts"
            )
