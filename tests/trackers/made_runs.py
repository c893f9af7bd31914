"""A run folder of made events, and what a tracker is to have of it: every number is here in view."""

from __future__ import annotations

from pathlib import Path

from fedmtl.runs.events import (
    Averages,
    BaselineEvent,
    ConfigEvent,
    EndEvent,
    EvaluationEvent,
    FailureEvent,
    PrivacyEvent,
    RoundEvent,
    StartEvent,
    TaskFacts,
    TaskUpdate,
    UpdateEvent,
)
from fedmtl.runs.folder import RunFolder
from fedmtl.runs.log import append_event

CONFIG = {
    "seed": 3,
    "model": {"server_model": "/home/mustermann/encoders/small"},
    "tasks": {"sst2": {"source": {"train": "/data/patients/train.csv"}}},
    "clients": {"east": {"tasks": ["sst2"]}},
    "track": {"mlflow": {"address": "http://tracker.example"}},
    "output": "/home/mustermann/runs",
}
# What the events of `round_events(number)` come to.
METRICS = {
    "sst2/accuracy": 0.5,
    "sst2/loss": 0.75,
    "sst2/train_loss": 0.5,
    "overall": 0.5,
    "classification": 0.5,
    "clients": 1.0,
    "failures": 1.0,
    "seconds": 1.5,
    "bytes_up": 64.0,
    "bytes_down": 128.0,
    "privacy/client/epsilon": 2.0,
    "clients/east/seconds": 1.25,
    "clients/east/bytes_up": 64.0,
    "clients/east/bytes_down": 128.0,
    "clients/east/sst2/train_loss": 0.5,
    "clients/east/sst2/score": 0.25,
    "clients/west/failed": 1.0,
}


def metrics_of(number: int) -> dict[str, float]:
    """The metrics of a round; the accuracy is its number in eighths more, so that two rounds are never alike."""
    more = {name: METRICS[name] + number / 8 for name in ("sst2/accuracy", "overall", "classification")}
    return {**METRICS, **more}


def opening() -> list:
    return [
        StartEvent(version="1", mode="federated", encoder="tiny", tasks={"sst2": TaskFacts(kind="classification")}),
        ConfigEvent(config=CONFIG),
    ]


def round_events(number: int) -> list:
    score = 0.5 + number / 8
    return [
        UpdateEvent(
            round=number,
            client="east",
            tasks={"sst2": TaskUpdate(examples=10, loss=0.5)},
            seconds=1.25,
            bytes_up=64,
            bytes_down=128,
        ),
        FailureEvent(round=number, client="west", reason="its words"),
        EvaluationEvent(
            round=number, task="sst2", metrics={"accuracy": score, "f1": None}, loss=0.75, clients={"east": 0.25}
        ),
        PrivacyEvent(round=number, unit="client", epsilon=2.0, delta=1e-5, accountant="pld", releases=[], words=""),
        RoundEvent(
            round=number,
            clients=1,
            failures=1,
            losses={"sst2": 0.5},
            averages=Averages(overall=score, classification=score),
            seconds=1.5,
            bytes_up=64,
            bytes_down=128,
        ),
    ]


def ending(status: str = "done") -> list:
    return [
        BaselineEvent(task="sst2", name="tfidf", metrics={"accuracy": 0.375}),
        EndEvent(status=status, reason="ended in /home/mustermann", rounds=2, weights_sha256="ab12"),
    ]


def made_run(folder: Path, events: list, *, config: str = "tasks: {sentiment: }\n") -> RunFolder:
    """A run folder with these events, a report and a model."""
    run = RunFolder(folder)
    run.path.mkdir(parents=True, exist_ok=True)
    run.config.write_text(config)
    add(run, events)
    run.report.write_text("<p>report</p>")
    run.model.mkdir(exist_ok=True)
    (run.model / "weights.safetensors").write_bytes(b"weights")
    return run


def add(run: RunFolder, events: list) -> None:
    for event in events:
        append_event(run, event)


def checkpoint(run: RunFolder, number: int) -> None:
    run.checkpoints.mkdir(exist_ok=True)
    (run.checkpoints / f"round-{number:04d}.json").write_text("{}")
