"""What a run says of itself, as the events of docs/run-folder.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import torch
import transformers

from fedmtl import __version__
from fedmtl.experiment.census import Census, take_census
from fedmtl.experiment.prepare import Prepared
from fedmtl.federation.messages import Evaluation, Failure, Round, State, Update
from fedmtl.methods import pcgrad
from fedmtl.methods.smart import step_passes
from fedmtl.model.bert.cpu.encoder_pass import kernels_here
from fedmtl.runs.event_lines import Event
from fedmtl.runs.events import (
    Aggregated,
    Averages,
    ClientFacts,
    ClientsEvent,
    ClientShare,
    DataEvent,
    EvaluationEvent,
    FailureEvent,
    PlanEvent,
    RemarkEvent,
    RoundEvent,
    StartEvent,
    TaskUpdate,
    UpdateEvent,
)
from fedmtl.sharing.plan import HEADS, NO_EXTRA, owner_task
from fedmtl.sharing.weights import count_parameters, count_trainable, layer_counts, scope_counts
from fedmtl.tasks.metrics import evaluation_event
from fedmtl.tasks.task import Task, owner_of_set, task_facts
from fedmtl.training.stacked.stack import fused_ops


def opening_events(prepared: Prepared, census: Census | None = None) -> list[Event]:
    """Return start, data, clients and plan: all that is known before round 0; a census is taken where none is given."""
    census = census or take_census(prepared.population, prepared.tasks)
    config = prepared.config
    start = StartEvent(
        version=__version__,
        mode=config.mode,
        seed=config.seed,
        synthetic=any(part.synthetic for part in prepared.data.values()),
        encoder=config.model.server_model,
        tasks={
            name: replace(task_facts(part.task, prepared.model.pools[name]), further=[*part.further] or None)
            for name, part in prepared.data.items()
        },
        device=prepared.compute.device,
        workers=prepared.compute.workers,
        stack=prepared.compute.stack,
        precision=prepared.compute.precision,
        kernels=kernels_of(prepared),
        num_rounds=config.training.num_rounds,
        step_passes=step_passes(config.training.smart),
        torch=torch.__version__,
        transformers=transformers.__version__,
    )
    return [start, *_data_events(prepared, census), _clients_event(prepared, census), plan_event(prepared, census)]


def kernels_of(prepared: Prepared) -> str:
    """Whose operations train the encoder: the bits of the weights depend on it, as on torch's version.

    `compiled` are those of kernels.c, which need gcc at installation; `triton` is for clients at once on a GPU.
    """
    compute = prepared.compute
    if compute.device == "cpu":
        return "torch" if prepared.model.layout is None else kernels_here()
    return "triton" if compute.stack and compute.precision == "bf16" and fused_ops() else "torch"


def plan_event(prepared: Prepared, census: Census) -> PlanEvent:
    return _plan_event(prepared, prepared.state, None, _personal_parameters(prepared, census))


def changed_plan_event(prepared: Prepared, state: State, before: PlanEvent) -> PlanEvent:
    """The plan after a round that moved a layer; what stays at clients does not move, and is as it was `before`."""
    return _plan_event(prepared, state, state.round, before.at_clients)


def _plan_event(prepared: Prepared, state: State, round_number: int | None, at_clients: int) -> PlanEvent:
    return PlanEvent(
        round=round_number,
        rules=[list(rule) for rule in state.plan.rules],
        groups=dict(prepared.config.sharing.groups),
        scopes=scope_counts(state.weights),
        layers=layer_counts(prepared.model, state.plan),
        heads=_head_counts(prepared),
        total=count_parameters(state.weights),
        trainable=count_trainable(state.weights),
        at_clients=at_clients,
    )


def update_event(update: Update, shares: Mapping[str, float] | None = None) -> UpdateEvent:
    return UpdateEvent(
        round=update.round,
        client=update.client,
        tasks={
            task: TaskUpdate(examples=count, loss=update.losses.get(task), seen=update.seen.get(task, 0))
            for task, count in update.num_examples.items()
        },
        shares=dict(shares) if shares else None,
        conflicts=update.extra.get(pcgrad.NAME, NO_EXTRA).values.get(pcgrad.CONFLICTS),
        seconds=update.traffic.seconds,
        bytes_up=update.traffic.bytes_up,
        bytes_down=update.traffic.bytes_down,
    )


def failure_event(failure: Failure) -> FailureEvent:
    return FailureEvent(
        round=failure.round,
        client=failure.client,
        reason=failure.reason,
        bytes_up=failure.traffic.bytes_up,
        bytes_down=failure.traffic.bytes_down,
    )


def remark_event(round_number: int, client: str, reason: str) -> RemarkEvent:
    """Something worth knowing that cost no contribution; the client is "" where it is about the server itself."""
    return RemarkEvent(round=round_number, client=client, reason=reason)


def evaluation_events(round_number: int, evaluation: Evaluation, tasks: Mapping[str, Task]) -> list[EvaluationEvent]:
    """The events of all tasks, then those of further validation sets, whose `task` is TASK:NAME."""
    return [
        *(
            evaluation_event(round_number, tasks[name], sums, evaluation.clients.get(name))
            for name, sums in evaluation.sums.items()
        ),
        *(
            replace(evaluation_event(round_number, tasks[owner_of_set(name)], sums), task=name)
            for name, sums in evaluation.further.items()
        ),
    ]


def trained_samples(update: Update) -> int:
    """Samples a client trained on, every pass counted; none where it evaluated."""
    return sum(update.seen.values())


def round_event(round_: Round, seconds: float) -> RoundEvent:
    evaluation = round_.evaluation
    results: list[Update | Failure] = [*round_.updates, *round_.failures]
    extra = evaluation.traffic if evaluation else None
    averages = Averages()
    if evaluation:
        averages = Averages(overall=evaluation.overall, classification=evaluation.classification)
    return RoundEvent(
        round=round_.number,
        clients=len(round_.updates),
        failures=len(round_.failures),
        tasks=_clients_per_task(round_),
        aggregated=_aggregated(round_),
        losses=dict(_mean_losses(round_)),
        seen=_seen(round_),
        samples=sum(map(trained_samples, round_.readable)),
        averages=averages,
        seconds=seconds,
        train_seconds=round_.train_seconds,
        longest_client_seconds=max((update.traffic.seconds for update in round_.updates), default=0.0),
        evaluate_seconds=round_.evaluate_seconds,
        bytes_up=sum(a.traffic.bytes_up for a in results) + (extra.bytes_up if extra else 0),
        bytes_down=sum(a.traffic.bytes_down for a in results) + (extra.bytes_down if extra else 0),
    )


def _data_events(prepared: Prepared, census: Census) -> list[DataEvent]:
    return [
        DataEvent(
            task=name,
            source=part.origin,
            train=census.examples(name),
            validation=len(part.validation),
            truncated=census.truncated[name],
            tokens=census.tokens[name],
            windowed=census.windows[name][0] if part.task.windows else None,
            windows=census.windows[name][1] if part.task.windows else None,
            most_windows=part.task.windows.most if part.task.windows else None,
            max_length=prepared.config.model.max_length,
            validation_cut=part.validation_cut,
            repeated=part.repeated or None,
            labels=dict(census.labels(name)) if part.task.kind_of.has_labels else None,
            quantiles=[*census.quantiles[name]] if name in census.quantiles else None,
            fingerprint=prepared.fingerprints.get(name),
        )
        for name, part in prepared.data.items()
    ]


def _clients_event(prepared: Prepared, census: Census) -> ClientsEvent:
    configured = prepared.config.clients
    clients = {
        client: ClientFacts(
            tasks={
                name: ClientShare(examples=part.examples, labels=dict(part.labels)) for name, part in shares.items()
            },
            from_round=configured[client].from_round if client in configured else 1,
            until_round=configured[client].until_round if client in configured else None,
        )
        for client, shares in census.clients.items()
    }
    return ClientsEvent(clients=clients)


def _personal_parameters(prepared: Prepared, census: Census) -> int:
    """Count the parameters that stay at clients, summed over all clients; clients with the same tasks have as many."""
    parameters, plan = prepared.model.canonical(), prepared.state.plan
    if not any(plan.level(name) == "client" for name in parameters):
        return 0
    total = 0
    for tasks, count in Counter(map(tuple, census.clients.values())).items():
        views = plan.keys(parameters, list(tasks), "").values()
        personal = {key for view in views for key in view.values() if key.scope.startswith("client:")}
        total += count * sum(getattr(parameters[key.name][0], parameters[key.name][1]).numel() for key in personal)
    return total


def _head_counts(prepared: Prepared) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name, (module, leaf) in prepared.model.canonical().items():
        task = owner_task(name)
        if task is not None and name.startswith(HEADS):
            counts[task] = counts.get(task, 0) + getattr(module, leaf).numel()
    return counts


def _clients_per_task(round_: Round) -> dict[str, int]:
    counts: dict[str, int] = {}
    for update in round_.updates:
        for task in update.tasks:
            counts[task] = counts.get(task, 0) + 1
    return counts


def _aggregated(round_: Round) -> list[Aggregated]:
    """Tell for every scope, and in it for every task's head, how many tensors were averaged over how many clients."""
    tensors: dict[tuple[str, str | None], set[str]] = {}
    clients: dict[tuple[str, str | None], set[str]] = {}
    for update in round_.updates:
        for key in update.delta:
            entry = (key.scope, owner_task(key.name))
            tensors.setdefault(entry, set()).add(key.name)
            clients.setdefault(entry, set()).add(update.client)
    return [
        Aggregated(scope=scope, head=head, tensors=len(names), clients=len(clients[scope, head]))
        for (scope, head), names in tensors.items()
    ]


def _seen(round_: Round) -> dict[str, int]:
    """Examples trained on per task, every pass at every client counted."""
    seen: dict[str, int] = {}
    for update in round_.readable:
        for task, number in update.seen.items():
            seen[task] = seen.get(task, 0) + number
    return seen


def _mean_losses(round_: Round) -> dict[str, float]:
    """Training loss per task, weighted by examples."""
    sums: dict[str, tuple[float, int]] = {}
    for update in round_.readable:
        for task, loss in update.losses.items():
            total, count = sums.get(task, (0.0, 0))
            sums[task] = (total + loss * update.num_examples[task], count + update.num_examples[task])
    return {task: total / count for task, (total, count) in sums.items()}
