"""A run like a real one: 3 tasks, 6 clients, 8 rounds, a failure, an early stop, undefined metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedmtl.report.page import render
from fedmtl.runs.event_lines import from_json

Event = dict[str, Any]

NUM_ROUNDS = 8
DIGEST = "3f9a1c5e7b2d4086a1c3e5f7092b4d6f8a0c1e3b5d7f9a2c4e6b8d0f1a3c5e7b"
ACCURACY = {
    "sst2": (0.513, 0.641, 0.705, 0.748, 0.781, 0.796, 0.814, 0.809, 0.815),
    "qqp": (0.631, 0.631, 0.688, 0.712, 0.741, 0.739, 0.734, 0.735, 0.731),
}
PEARSON = (None, 0.105, 0.280, 0.402, 0.511, 0.563, 0.601, 0.633, 0.658)
TASKS = {
    "sst2": {"kind": "classification", "labels": ["negative", "positive"], "metric": "accuracy"},
    "qqp": {"kind": "classification", "labels": ["different", "duplicate"], "metric": "accuracy"},
    "stsb": {"kind": "regression", "labels": None, "metric": "pearson", "score_range": [0.0, 5.0]},
}
RANGES = ("0.0-1.0", "1.0-2.0", "2.0-3.0", "3.0-4.0", "4.0-5.0")
CLIENTS: dict[str, Event] = {
    "clinic_a": {"sst2": {"negative": 900, "positive": 300}},
    "clinic_b": {"sst2": {"negative": 250, "positive": 950}},
    "bank": {"qqp": {"different": 700, "duplicate": 120}},
    "forum": {"qqp": {"different": 310, "duplicate": 470}, "sst2": {"negative": 80, "positive": 90}},
    "press": {"stsb": dict(zip(RANGES, (120, 140, 200, 260, 180), strict=True))},
    "library": {"stsb": dict(zip(RANGES, (20, 60, 90, 30, 10), strict=True))},
}
CONFIG = "mode: federated\nseed: 7\ntasks:\n  sst2: {}\n  qqp: {}\n  stsb: {}\n"


def start(**changes: object) -> Event:
    common = {"auxiliary": False, "pair": "cross", "pool": "pooler", "score_range": None}
    event = {
        "event": "start",
        "version": "0.1.0",
        "mode": "federated",
        "seed": 7,
        "synthetic": True,
        "encoder": "random-2x128",
        "tasks": {task: {**common, **about} for task, about in TASKS.items()},
        "device": "cpu",
        "workers": 2,
        "num_rounds": NUM_ROUNDS,
        "torch": "2.11.0",
        "transformers": "5.17.0",
    }
    return {**event, **changes}


def data() -> list[Event]:
    common = {"event": "data", "source": "embedded", "truncated": 12, "validation_cut": False}
    return [
        {
            **common,
            "task": "sst2",
            "train": 2570,
            "validation": 872,
            "labels": {"negative": 1230, "positive": 1340},
        },
        {
            **common,
            "task": "qqp",
            "train": 1600,
            "validation": 800,
            "labels": {"different": 1010, "duplicate": 590},
        },
        {
            **common,
            "task": "stsb",
            "source": "data/stsb/train.tsv.gz",
            "train": 1110,
            "validation": 123,
            "validation_cut": True,
            "quantiles": [0.0, 1.6, 2.8, 3.7, 5.0],
        },
    ]


def clients() -> Event:
    described = {
        name: {
            "tasks": {task: {"examples": sum(labels.values()), "labels": labels} for task, labels in tasks.items()},
            "from_round": 3 if name == "library" else 1,
            "until_round": 6 if name == "bank" else None,
        }
        for name, tasks in CLIENTS.items()
    }
    return {"event": "clients", "clients": described}


def plan() -> Event:
    layers: list[tuple[str, str, int]] = [
        ("embeddings", "all", 3_972_864),
        ("encoder.layer.0", "all", 198_272),
        ("encoder.layer.1", "group", 198_272),
        ("pooler", "fixed", 16_512),
        ("heads.sst2", "task", 258),
        ("heads.qqp", "task", 258),
        ("heads.stsb", "client", 129),
    ]
    scopes: list[tuple[str, str, int, int]] = [
        ("all", "all", 4_171_136, 21),
        ("group:pair", "group", 198_272, 16),
        ("task:sst2", "task", 258, 2),
        ("task:qqp", "task", 258, 2),
        ("client:press", "client", 129, 2),
        ("fixed", "fixed", 16_512, 2),
    ]
    return {
        "event": "plan",
        "rules": [
            ["heads.stsb*", "client"],
            ["heads.*", "task"],
            ["encoder.layer.1.*", "group"],
            ["*", "all"],
        ],
        "groups": {"pair": ["qqp", "stsb"]},
        "scopes": [dict(zip(("scope", "level", "parameters", "tensors"), scope, strict=True)) for scope in scopes],
        "layers": [dict(zip(("layer", "level", "parameters"), layer, strict=True)) for layer in layers],
        "total": 4_386_565,
    }


def classification(task: str, at: int, examples: int) -> Event:
    accuracy = ACCURACY[task][at]
    right = round(accuracy * examples)
    first = round(right * 0.55)
    wrong = examples - right
    majority = task == "qqp" and at < 2
    return {
        "event": "evaluation",
        "round": at,
        "task": task,
        "metrics": {
            "accuracy": accuracy,
            "f1": round(accuracy - 0.03, 3),
            "matthews": None if majority else round(2 * accuracy - 1.05, 3),
        },
        "undefined": {"matthews": "only one label was predicted"} if majority else {},
        "loss": round(0.75 - 0.04 * at, 3),
        "examples": examples,
        "marked": "equals the majority class" if majority else None,
        "confusion": [[first, wrong // 3], [wrong - wrong // 3, right - first]],
    }


def regression(at: int) -> Event:
    pearson = PEARSON[at]
    counts = [2, 5, 11, 22, 34, 26, 14, 6, 3]
    return {
        "event": "evaluation",
        "round": at,
        "task": "stsb",
        "metrics": {
            "pearson": pearson,
            "spearman": None if pearson is None else round(pearson - 0.02, 3),
            "mse": round(2.4 - 0.15 * at, 3),
            "rmse": round((2.4 - 0.15 * at) ** 0.5, 3),
            "mae": round(1.3 - 0.06 * at, 3),
            "r2": round(-0.2 + 0.07 * at, 3),
        },
        "undefined": {"pearson": "predictions are constant", "spearman": "predictions are constant"}
        if pearson is None
        else {},
        "loss": round(0.11 - 0.006 * at, 3),
        "examples": sum(counts),
        "marked": None,
        "moments": {"n": sum(counts)},
        "residuals": {"edges": [-2.25 + 0.5 * i for i in range(len(counts) + 1)], "counts": counts},
    }


def evaluations(at: int) -> list[Event]:
    return [classification("sst2", at, 872), classification("qqp", at, 800), regression(at)]


def training(at: int) -> list[Event]:
    """The updates of one round; `forum` fails in round 4."""
    events: list[Event] = []
    for i, (client, tasks) in enumerate(CLIENTS.items()):
        if (client == "library" and at < 3) or (client == "bank" and at > 6):
            continue
        if client == "forum" and at == 4:
            reason = "encoder.layer.1.output.dense.weight: has a value that is not finite"
            events.append({"event": "failure", "round": at, "client": client, "reason": reason, "bytes_down": 900_000})
            continue
        trained = {task: {"examples": sum(held.values()), "loss": 0.7 - 0.05 * at} for task, held in tasks.items()}
        cost = {"seconds": 2.0 + 0.5 * i, "bytes_up": 800_000 + 50_000 * i, "bytes_down": 900_000}
        events.append({"event": "update", "round": at, "client": client, "tasks": trained, **cost})
    return events


def closing(at: int, events: list[Event]) -> Event:
    """The round event that follows from the round's updates and failures."""
    updates = [event for event in events if event["event"] == "update"]
    pearson = PEARSON[at]
    mains = [ACCURACY["sst2"][at], ACCURACY["qqp"][at]]
    return {
        "event": "round",
        "round": at,
        "clients": len(updates),
        "failures": len(events) - len(updates),
        "tasks": {task: sum(task in event["tasks"] for event in updates) for task in TASKS},
        "losses": {"sst2": 0.69 - 0.05 * at, "qqp": 0.66 - 0.035 * at, "stsb": 0.10 - 0.008 * at} if at else {},
        "seen": {task: sum(e["tasks"].get(task, {}).get("examples", 0) for e in updates) for task in TASKS},
        "overall": None if pearson is None else (sum(mains) + pearson) / 3,
        "classification": sum(mains) / 2,
        "seconds": 14.5 + 0.3 * (at % 3) if at else 1.9,
        "train_seconds": 11.8 + 0.3 * (at % 3) if at else 0.0,
        "evaluate_seconds": 1.9,
        "bytes_up": sum(event["bytes_up"] for event in updates),
        "bytes_down": sum(event["bytes_down"] for event in events),
    }


def build_events(finished: int = NUM_ROUNDS, *, ended: bool = True, **start_changes: object) -> list[Event]:
    """The events after `finished` rounds; `qqp` stops in round 7 with its best score from round 4."""
    events = [start(**start_changes), *data(), clients(), plan()]
    for at in range(finished + 1):
        trained = training(at) if at else []
        events += [*trained, *evaluations(at)]
        if at == 7:
            stop = {"event": "early_stop", "round": 7, "task": "qqp", "best_round": 4, "score": 0.741}
            events.append({**stop, "stop_score": 0.725})
        events.append(closing(at, trained))
    if ended:
        seconds = 121.4
        end = {"event": "end", "status": "done", "reason": None, "rounds": finished, "seconds": seconds}
        events.append({**end, "weights_sha256": DIGEST})
    return events


def write_folder(folder: Path, events: list[Event] | None = None, config: str = CONFIG) -> Path:
    """A run folder with the files that a report reads."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(event) + "\n" for event in (build_events() if events is None else events))
    (folder / "events.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "config.yaml").write_text(config, encoding="utf-8")
    return folder


def page_of(events: list[Event], config: str = CONFIG, name: str = "first") -> str:
    return render([from_json(event) for event in events], config, name)
