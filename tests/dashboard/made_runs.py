"""Run folders of any size, made of lines as a run writes them."""

from __future__ import annotations

import json
from pathlib import Path

TASKS = {
    "mood": {"kind": "classification", "labels": ["bad", "good"], "metric": "accuracy"},
    "alike": {"kind": "classification", "labels": ["no", "yes"], "metric": "accuracy"},
    "near": {"kind": "regression", "labels": None, "metric": "pearson", "score_range": [0.0, 5.0]},
}
CONFIG = {"seed": 3, "training": {"num_rounds": 12, "learning_rate": 0.001}, "tasks": {"mood": {"weight": 2.0}}}


def line(event, **fields):
    return json.dumps({"event": event, **fields}).encode() + b"\n"


def opening(num_rounds=5, sites=("a", "b"), tasks=TASKS, config=CONFIG, encoder="tiny"):
    """What a run of these sites writes before its first round."""
    names = list(tasks)
    shares = {site: {names[at % len(names)]: {"examples": 100 + at}} for at, site in enumerate(sites)}
    layers = [
        {"layer": "embeddings", "level": "all", "parameters": 2064896},
        {"layer": "encoder.layer.0", "level": "all", "parameters": 198272},
        {"layer": "encoder.layer.1", "level": "task", "parameters": 198272},
        *({"layer": f"heads.{name}", "level": "task", "parameters": 258} for name in names),
    ]
    scopes = [{"scope": "all", "level": "all", "parameters": 2263168, "tensors": 37}]
    return [
        line("start", version="0.1.0", mode="federated", seed=3, encoder=encoder, tasks=tasks, num_rounds=num_rounds),
        line("config", config=config),
        *(line("data", task=name, source="embedded", train=200, validation=50) for name in names),
        line("clients", clients={site: {"tasks": share} for site, share in shares.items()}),
        line("plan", rules=[["*", "all"]], groups={}, scopes=scopes, layers=layers, heads={}, total=2461440),
    ]


def score(round, at=0):
    """A score that rises from .5 towards 1, the same for the same round and task."""
    return round_to(1 - 0.5 / (1 + 0.1 * round) - 0.02 * at)


def round_to(value):
    return round(value, 6)


def a_round(number, sites=("a", "b"), tasks=TASKS, failing=None):
    """The lines of one round; of a site in `failing` its reason."""
    failing = failing or {}
    lines = []
    names = list(tasks)
    for at, site in enumerate(sites if number else ()):
        if site in failing:
            lines.append(line("failure", round=number, client=site, reason=failing[site], bytes_down=1000))
            continue
        lines.append(
            line(
                "update",
                round=number,
                client=site,
                tasks={names[at % len(names)]: {"examples": 100 + at, "loss": 1 / number, "seen": 100 + at}},
                shares={"all": round_to(1 / len(sites))},
                seconds=0.5,
                bytes_up=2000,
                bytes_down=1000,
            )
        )
    for at, name in enumerate(names):
        metrics = {tasks[name]["metric"]: score(number, at), "f1": score(number, at)}
        lines.append(line("evaluation", round=number, task=name, metrics=metrics, loss=1 / (1 + number)))
    accepted = len(lines) - len(names) - len(failing) if number else 0
    lines.append(
        line(
            "round",
            round=number,
            clients=accepted,
            failures=len(failing) if number else 0,
            losses=dict.fromkeys(names, 1 / (1 + number)),
            overall=score(number),
            classification=None,
            seconds=2.0,
            train_seconds=1.2,
            longest_client_seconds=0.5,
            evaluate_seconds=0.5,
            bytes_up=2000 * accepted,
            bytes_down=1000 * accepted,
        )
    )
    return lines


def end(status="done", rounds=5, reason=None):
    return line("end", status=status, reason=reason, rounds=rounds, seconds=2.0 * rounds, weights_sha256="0f" * 32)


def write_run(path: Path, num_rounds=5, sites=("a", "b"), done=True, **changes):
    """A run folder with all of its rounds."""
    path.mkdir(parents=True)
    lines = opening(num_rounds, sites, **changes)
    for number in range(num_rounds + 1):
        lines += a_round(number, sites, changes.get("tasks", TASKS))
    (path / "config.yaml").write_text("mode: federated\n")
    (path / "events.jsonl").write_bytes(b"".join([*lines, *([end(rounds=num_rounds)] if done else [])]))
    return path


def append(path: Path, *lines):
    """Add lines to a run as the run does, at once."""
    with (path / "events.jsonl").open("ab") as file:
        file.write(b"".join(lines))
