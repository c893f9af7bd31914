"""What a run says of itself, as the events of docs/run-folder.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import transformers

from fedmtl import __version__
from fedmtl.experiment.prepare import Prepared
from fedmtl.federation.messages import Evaluation, Failure, Round, Update
from fedmtl.model.keys import head_task
from fedmtl.model.values import count_parameters, layer_counts, scope_counts
from fedmtl.tasks.batches import Shard
from fedmtl.tasks.metrics import evaluation_fields
from fedmtl.tasks.task import Task
from fedmtl.training.settings import LocalSettings

Event = dict[str, Any]
SCORE_RANGES = 5


def opening_events(prepared: Prepared) -> list[Event]:
    """start, data, clients and plan: all that is known before round 0."""
    config = prepared.config
    start = {
        "event": "start",
        "version": __version__,
        "mode": config.mode,
        "seed": config.seed,
        "synthetic": any(part.synthetic for part in prepared.data.values()),
        "encoder": config.model.server_model,
        "tasks": {
            name: {
                "kind": task.kind,
                "labels": list(task.labels),
                "metric": task.metric,
                "auxiliary": task.auxiliary,
                "pair": task.pair if task.is_pair else None,
                "pool": prepared.model.pools[name],
                "score_range": list(task.score_range) if task.is_regression else None,
            }
            for name, task in prepared.tasks.items()
        },
        "device": prepared.compute.device,
        "workers": prepared.compute.workers,
        "stack": prepared.compute.stack,
        "precision": prepared.compute.precision,
        "num_rounds": config.training.num_rounds,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return [start, *_data_events(prepared), _clients_event(prepared), plan_event(prepared)]


def plan_event(prepared: Prepared) -> Event:
    state = prepared.state
    return {
        "event": "plan",
        "rules": [list(rule) for rule in state.plan.rules],
        "groups": prepared.config.sharing.groups,
        "scopes": scope_counts(state.weights),
        "layers": layer_counts(prepared.model, state.plan),
        "heads": _head_counts(prepared),
        "total": count_parameters(state.weights),
        "at_clients": _kept_by_clients(prepared),
    }


def update_event(update: Update) -> Event:
    return {
        "event": "update",
        "round": update.round,
        "client": update.client,
        "tasks": {
            task: {"examples": count, "loss": update.losses.get(task)} for task, count in update.num_examples.items()
        },
        "seconds": update.traffic.seconds,
        "bytes_up": update.traffic.bytes_up,
        "bytes_down": update.traffic.bytes_down,
    }


def failure_event(failure: Failure) -> Event:
    return {
        "event": "failure",
        "round": failure.round,
        "client": failure.client,
        "reason": failure.reason,
        "bytes_up": failure.traffic.bytes_up,
        "bytes_down": failure.traffic.bytes_down,
    }


def evaluation_events(round_number: int, evaluation: Evaluation, tasks: Mapping[str, Task]) -> list[Event]:
    return [
        {
            "event": "evaluation",
            "round": round_number,
            "task": name,
            **evaluation_fields(tasks[name], sums),
            **({"clients": dict(evaluation.clients[name])} if name in evaluation.clients else {}),
        }
        for name, sums in evaluation.sums.items()
    ]


def trained_samples(update: Update, settings: LocalSettings) -> int:
    """Samples a client trained, every pass counted; none where it evaluated. Of `local_steps`, full batches."""
    if update.sums:
        return 0
    if settings.steps:
        return settings.steps * settings.batch_size
    return settings.epochs * sum(update.num_examples.values())


def round_event(turn: Round, seconds: float, settings: LocalSettings) -> Event:
    evaluation = turn.evaluation
    answers: list[Update | Failure] = [*turn.updates, *turn.failures]
    extra = evaluation.traffic if evaluation else None
    return {
        "event": "round",
        "round": turn.number,
        "clients": len(turn.updates),
        "failures": len(turn.failures),
        "tasks": _clients_per_task(turn),
        "aggregated": _aggregated(turn),
        "losses": _mean_losses(turn),
        "samples": sum(trained_samples(update, settings) for update in turn.updates),
        "overall": evaluation.overall if evaluation else None,
        "classification": evaluation.classification if evaluation else None,
        "seconds": seconds,
        "train_seconds": turn.train_seconds,
        "evaluate_seconds": turn.evaluate_seconds,
        "bytes_up": sum(a.traffic.bytes_up for a in answers) + (extra.bytes_up if extra else 0),
        "bytes_down": sum(a.traffic.bytes_down for a in answers) + (extra.bytes_down if extra else 0),
    }


def early_stop_events(turn: Round) -> list[Event]:
    return [
        {
            "event": "early_stop",
            "round": turn.number,
            "task": task,
            "best_round": turn.state.progress[task].best_round,
            "score": turn.state.progress[task].best_score,
        }
        for task in turn.stopped
    ]


def _data_events(prepared: Prepared) -> list[Event]:
    events = []
    for name, part in prepared.data.items():
        train = prepared.population.train
        shards = [train[client][name] for client in train if name in train.tasks_of(client)]
        labels = np.concatenate([shard.labels[shard.indices] for shard in shards])
        low, high = part.task.score_range
        counts: Event = (
            {
                "quantiles": [
                    round(low + (high - low) * float(q), 4) for q in np.quantile(labels, [0, 0.25, 0.5, 0.75, 1])
                ]
            }
            if part.task.is_regression
            else {"labels": _label_counts(part.task, labels)}
        )
        events.append(
            {
                "event": "data",
                "task": name,
                "source": part.origin,
                "train": len(labels),
                "validation": len(part.validation),
                "truncated": prepared.population.truncated[name],
                "validation_cut": part.validation_cut,
                **counts,
            }
        )
    return events


def _clients_event(prepared: Prepared) -> Event:
    configured = prepared.config.clients

    def tasks_of(shards: Mapping[str, Shard]) -> Event:
        return {
            name: {
                "examples": len(shard),
                "labels": _label_counts(prepared.tasks[name], shard.labels[shard.indices]),
            }
            for name, shard in shards.items()
        }

    return {
        "event": "clients",
        "clients": {
            client: {
                "tasks": tasks_of(shards),
                "from_round": configured[client].from_round if client in configured else 1,
                "until_round": configured[client].until_round if client in configured else None,
            }
            for client, shards in prepared.population.train.items()
        },
    }


def _label_counts(task: Task, labels: np.ndarray) -> dict[str, int]:
    if not task.is_regression:
        counts = np.bincount(labels, minlength=len(task.labels))
        return {label: int(count) for label, count in zip(task.labels, counts, strict=True)}
    low, high = task.score_range
    edges = np.linspace(0.0, 1.0, SCORE_RANGES + 1)
    counts, _ = np.histogram(labels, bins=edges)
    names = [f"{low + (high - low) * a:.1f}-{low + (high - low) * b:.1f}" for a, b in pairwise(edges)]
    return {name: int(count) for name, count in zip(names, counts, strict=True)}


def _kept_by_clients(prepared: Prepared) -> int:
    """Parameters that stay at clients, all clients together; clients with the same tasks keep as many."""
    places, plan, train = prepared.model.canonical(), prepared.state.plan, prepared.population.train
    if not any(plan.level(name) == "client" for name in places):
        return 0
    total = 0
    for tasks, count in Counter(map(train.tasks_of, train)).items():
        views = plan.keys(places, list(tasks), "").values()
        own = {key for view in views for key in view.values() if key.scope.startswith("client:")}
        total += count * sum(getattr(places[key.name][0], places[key.name][1]).numel() for key in own)
    return total


def _head_counts(prepared: Prepared) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name, (module, leaf) in prepared.model.canonical().items():
        task = head_task(name)
        if task is not None:
            counts[task] = counts.get(task, 0) + getattr(module, leaf).numel()
    return counts


def _clients_per_task(turn: Round) -> dict[str, int]:
    counts: dict[str, int] = {}
    for update in turn.updates:
        for task in update.tasks:
            counts[task] = counts.get(task, 0) + 1
    return counts


def _aggregated(turn: Round) -> list[Event]:
    """For every scope, heads apart: how many tensors were averaged, over how many clients."""
    tensors: dict[tuple[str, str | None], set[str]] = {}
    clients: dict[tuple[str, str | None], set[str]] = {}
    for update in turn.updates:
        for key in update.delta:
            entry = (key.scope, head_task(key.name))
            tensors.setdefault(entry, set()).add(key.name)
            clients.setdefault(entry, set()).add(update.client)
    return [
        {"scope": scope, "head": head, "tensors": len(names), "clients": len(clients[scope, head])}
        for (scope, head), names in tensors.items()
    ]


def _mean_losses(turn: Round) -> dict[str, float]:
    """Training loss per task, weighted by examples."""
    sums: dict[str, tuple[float, int]] = {}
    for update in turn.updates:
        for task, loss in update.losses.items():
            total, count = sums.get(task, (0.0, 0))
            sums[task] = (total + loss * update.num_examples[task], count + update.num_examples[task])
    return {task: total / count for task, (total, count) in sums.items()}
