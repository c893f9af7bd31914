"""What a run says of itself, as the events of docs/run-folder.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import transformers

from fedmtl import __version__
from fedmtl.experiment.census import Census, take_census
from fedmtl.experiment.prepare import Prepared
from fedmtl.federation.messages import Evaluation, Failure, Round, State, Update
from fedmtl.methods.smart import step_passes
from fedmtl.sharing.keys import HEADS, owner_task
from fedmtl.sharing.weights import count_parameters, count_trainable, layer_counts, scope_counts
from fedmtl.tasks.metrics import evaluation_fields
from fedmtl.tasks.task import Task, task_fields

Event = dict[str, Any]


def opening_events(prepared: Prepared, census: Census | None = None) -> list[Event]:
    """start, data, clients and plan: all that is known before round 0; who has what is counted here unless told."""
    census = census or take_census(prepared.population, prepared.tasks)
    config = prepared.config
    start = {
        "event": "start",
        "version": __version__,
        "mode": config.mode,
        "seed": config.seed,
        "synthetic": any(part.synthetic for part in prepared.data.values()),
        "encoder": config.model.server_model,
        "tasks": {name: task_fields(task, prepared.model.pools[name]) for name, task in prepared.tasks.items()},
        "device": prepared.compute.device,
        "workers": prepared.compute.workers,
        "stack": prepared.compute.stack,
        "precision": prepared.compute.precision,
        "num_rounds": config.training.num_rounds,
        "step_passes": step_passes(config.training.smart),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return [start, *_data_events(prepared, census), _clients_event(prepared, census), plan_event(prepared, census)]


def plan_event(prepared: Prepared, census: Census) -> Event:
    return {"event": "plan", **_plan_fields(prepared, prepared.state), "at_clients": _kept_by_clients(prepared, census)}


def changed_plan_event(prepared: Prepared, state: State, before: Event) -> Event:
    """The plan after a round that moved a layer; what stays at clients does not move, and is as it was `before`."""
    fields = _plan_fields(prepared, state)
    return {"event": "plan", "round": state.round, **fields, "at_clients": before["at_clients"]}


def _plan_fields(prepared: Prepared, state: State) -> Event:
    return {
        "rules": [list(rule) for rule in state.plan.rules],
        "groups": prepared.config.sharing.groups,
        "scopes": scope_counts(state.weights),
        "layers": layer_counts(prepared.model, state.plan),
        "heads": _head_counts(prepared),
        "total": count_parameters(state.weights),
        "trainable": count_trainable(state.weights),
    }


def update_event(update: Update) -> Event:
    return {
        "event": "update",
        "round": update.round,
        "client": update.client,
        "tasks": {
            task: {"examples": count, "loss": update.losses.get(task), "seen": update.seen.get(task, 0)}
            for task, count in update.num_examples.items()
        },
        **{
            name: value
            for extra in update.extra.values()
            for name, value in extra.values.items()
            if name == "conflicts"
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


def remark_event(round_number: int, client: str, reason: str) -> Event:
    """Something worth knowing that cost no contribution; the client is "" where it is about the server itself."""
    return {"event": "remark", "round": round_number, "client": client, "reason": reason}


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


def trained_samples(update: Update) -> int:
    """Samples a client trained on, every pass counted; none where it evaluated."""
    return sum(update.seen.values())


def round_event(turn: Round, seconds: float) -> Event:
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
        "seen": _seen(turn),
        "samples": sum(map(trained_samples, turn.updates)),
        "overall": evaluation.overall if evaluation else None,
        "classification": evaluation.classification if evaluation else None,
        "seconds": seconds,
        "train_seconds": turn.train_seconds,
        "longest_client_seconds": max((update.traffic.seconds for update in turn.updates), default=0.0),
        "evaluate_seconds": turn.evaluate_seconds,
        "bytes_up": sum(a.traffic.bytes_up for a in answers) + (extra.bytes_up if extra else 0),
        "bytes_down": sum(a.traffic.bytes_down for a in answers) + (extra.bytes_down if extra else 0),
    }


def _data_events(prepared: Prepared, census: Census) -> list[Event]:
    events = []
    for name, part in prepared.data.items():
        told: Event = {"labels": census.labels(name)} if part.task.kind_of.has_labels else {}
        told |= {"quantiles": census.quantiles[name]} if name in census.quantiles else {}
        events.append(
            {
                "event": "data",
                "task": name,
                "source": part.origin,
                "train": census.examples(name),
                "validation": len(part.validation),
                "truncated": census.truncated[name],
                "validation_cut": part.validation_cut,
                **told,
            }
        )
    return events


def _clients_event(prepared: Prepared, census: Census) -> Event:
    configured = prepared.config.clients
    return {
        "event": "clients",
        "clients": {
            client: {
                "tasks": {
                    name: {"examples": part.examples, "labels": dict(part.labels)} for name, part in held.items()
                },
                "from_round": configured[client].from_round if client in configured else 1,
                "until_round": configured[client].until_round if client in configured else None,
            }
            for client, held in census.clients.items()
        },
    }


def _kept_by_clients(prepared: Prepared, census: Census) -> int:
    """Parameters that stay at clients, all clients together; clients with the same tasks keep as many."""
    places, plan = prepared.model.canonical(), prepared.state.plan
    if not any(plan.level(name) == "client" for name in places):
        return 0
    total = 0
    for tasks, count in Counter(map(tuple, census.clients.values())).items():
        views = plan.keys(places, list(tasks), "").values()
        own = {key for view in views for key in view.values() if key.scope.startswith("client:")}
        total += count * sum(getattr(places[key.name][0], places[key.name][1]).numel() for key in own)
    return total


def _head_counts(prepared: Prepared) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name, (module, leaf) in prepared.model.canonical().items():
        task = owner_task(name)
        if task is not None and name.startswith(HEADS):
            counts[task] = counts.get(task, 0) + getattr(module, leaf).numel()
    return counts


def _clients_per_task(turn: Round) -> dict[str, int]:
    counts: dict[str, int] = {}
    for update in turn.updates:
        for task in update.tasks:
            counts[task] = counts.get(task, 0) + 1
    return counts


def _aggregated(turn: Round) -> list[Event]:
    """For every scope, what tasks own apart: how many tensors were averaged, over how many clients."""
    tensors: dict[tuple[str, str | None], set[str]] = {}
    clients: dict[tuple[str, str | None], set[str]] = {}
    for update in turn.updates:
        for key in update.delta:
            entry = (key.scope, owner_task(key.name))
            tensors.setdefault(entry, set()).add(key.name)
            clients.setdefault(entry, set()).add(update.client)
    return [
        {"scope": scope, "head": head, "tensors": len(names), "clients": len(clients[scope, head])}
        for (scope, head), names in tensors.items()
    ]


def _seen(turn: Round) -> dict[str, int]:
    """Examples trained on per task, every pass at every client counted."""
    seen: dict[str, int] = {}
    for update in turn.updates:
        for task, number in update.seen.items():
            seen[task] = seen.get(task, 0) + number
    return seen


def _mean_losses(turn: Round) -> dict[str, float]:
    """Training loss per task, weighted by examples."""
    sums: dict[str, tuple[float, int]] = {}
    for update in turn.updates:
        for task, loss in update.losses.items():
            total, count = sums.get(task, (0.0, 0))
            sums[task] = (total + loss * update.num_examples[task], count + update.num_examples[task])
    return {task: total / count for task, (total, count) in sums.items()}
