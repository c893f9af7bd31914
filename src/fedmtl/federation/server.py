"""The server loop: sample, cut, send, check, average, step, evaluate. It writes no file and prints nothing."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from fedmtl.capabilities import update_filters
from fedmtl.errors import CannotContinue, FedmtlError
from fedmtl.federation.aggregators.by_scope import aggregation_event
from fedmtl.federation.aggregators.mean import ClientWeights, client_weight, most_weights, per_example, shares_of
from fedmtl.federation.aggregators.protocol import Aggregator
from fedmtl.federation.dispatch import Dispatch, SampledClients, ServerSettings, sample_clients
from fedmtl.federation.filters.protocol import UpdateFilter
from fedmtl.federation.messages import (
    ClientId,
    ClientInfo,
    Engine,
    Evaluation,
    Failure,
    Job,
    Progress,
    Round,
    State,
    Update,
)
from fedmtl.federation.server_method import PHASES, Collected, OpenRound, RoundSettings, ServerMethod, Step
from fedmtl.federation.validate import Expected, counted_examples, expect, refusal, unwelcome
from fedmtl.foreign import excerpt, printable
from fedmtl.runs.event_lines import Event
from fedmtl.sharing.plan import NO_EXTRA, Extra, Weights
from fedmtl.tasks.task import Task
from fedmtl.timing import timed
from fedmtl.training.local_method import LocalSettings

Evaluate = Callable[[State], Evaluation]
# Stands for a value that has been averaged and let go.
NO_VALUE = torch.empty(0, device="meta")


class RoundFailed(CannotContinue):
    """A round that did not get enough updates; its failures say why."""

    def __init__(self, message: str, round_number: int, failures: tuple[Failure, ...] = ()) -> None:
        super().__init__(message)
        self.round = round_number
        self.failures = failures


def rounds(state: State, server: ServerSettings, engine: Engine, evaluate: Evaluate) -> Iterator[Round]:
    """Yield round 0, the start, then every round after it; a resumed state goes on where it was."""
    dispatch = Dispatch(server)
    if state.round == 0 and not state.progress:
        started = _through(server, state, lambda method, at: method.start(at))
        said = started.events
        if server.federation.aggregation.looks_at_updates():
            said = (aggregation_event(server.federation.aggregation, state.plan, server.names, engine.clients()), *said)
        done = _evaluated(Round(0, started.state, (), (), None, events=said), server, evaluate)
        state = done.state
        yield done
    while state.round < server.settings.num_rounds and not all_stopped(state, server):
        done = _round(state, server, engine, dispatch)
        is_due = server.is_evaluated(done.number)
        done = _evaluated(done, server, evaluate) if is_due else _reported(done, server)
        state = done.state
        yield done


@contextmanager
def _blamed(name: str, round_number: int, failures: tuple[Failure, ...] = ()) -> Iterator[None]:
    """Whatever goes wrong in a capability's code ends the run with a line that names it."""
    try:
        yield
    except FedmtlError:
        raise
    except Exception as error:
        raise RoundFailed(
            f"round {round_number}: {name} failed with {type(error).__name__}: {error}", round_number, failures
        ) from error


def _through(
    server: ServerSettings,
    state: State,
    hook: Callable[[ServerMethod, State], Step],
    failures: tuple[Failure, ...] = (),
) -> Step:
    """The state after one hook of all methods, phase by phase, and all that they have to say."""
    events: list[Event] = []
    for method in sorted(server.methods, key=lambda method: PHASES.index(method.phase)):
        with _blamed(method.name, state.round, failures):
            step = hook(method, state)
        state = step.state
        events += step.events
    return Step(state, tuple(events))


def all_stopped(state: State, server: ServerSettings) -> bool:
    """Whether every task has been stopped early, so that no head is left to train."""
    return all(name in state.progress and state.progress[name].stopped_round is not None for name in server.tasks)


def _round(state: State, server: ServerSettings, engine: Engine, dispatch: Dispatch) -> Round:
    started = time.perf_counter()
    number = state.round + 1
    infos = engine.clients()
    sampled = sample_clients(server, infos, number)
    given: dict[str, RoundSettings] = {}
    for method in server.methods:
        with _blamed(method.name, number):
            given[method.name] = method.before_round(state, sampled, infos)
    weights, settings = _weights(server, given.values())
    extra = {name: one.extra for name, one in given.items() if one.extra}
    counting = _client_weights(state, server, sampled, infos, weights)
    rule = server.rule_name
    rules = [one.aggregator for one in given.values() if one.aggregator is not None]
    with _blamed(rule, number):
        aggregator = rules[0] if rules else server.aggregator(state.weights, state.extra.get(rule, NO_EXTRA))
    counted: dict[ClientId, Mapping[str, float]] = {}

    def add(update: Update) -> None:
        counted[update.client] = counting.of(update)
        with _blamed(rule, number):
            aggregator.add(update, counted[update.client])
        for method in server.methods:
            with _blamed(method.name, number):
                method.add(update)

    collected = _collected_by_method(state, server, engine, dispatch, settings, extra, sampled, infos, counting)
    if collected is None:
        wanted = ((client, tasks, infos[client]) for client, tasks in sampled.items())
        accepted, failures = _collect(state, server, engine, dispatch, settings, extra, wanted, add)
    else:
        accepted, failures = collected.updates, collected.failures
        with _blamed(rule, number):
            aggregator.add(collected.combined, collected.weights)
    most = len(sampled) if sampled.by_method else None
    _check_enough(server, accepted, failures, number, 0 if collected is not None and collected.is_skipped else most)
    moved = _moved(state, server, aggregator, number, failures)
    averaged = replace(
        moved, round=number, accepted={**state.accepted, **{update.client: number for update in accepted}}
    )
    after = _through(server, averaged, lambda method, at: method.after_aggregation(state, at), failures)
    said = [event for one in given.values() for event in one.events]
    said += collected.events if collected else ()
    return Round(
        number,
        after.state,
        accepted,
        failures,
        None,
        train_seconds=time.perf_counter() - started,
        events=(*said, *after.events),
        shares=shares_of(counted),
        combined=_without_values(collected.combined) if collected else None,
    )


def _collected_by_method(
    state: State,
    server: ServerSettings,
    engine: Engine,
    dispatch: Dispatch,
    settings: LocalSettings,
    extra: Mapping[str, Extra],
    sampled: SampledClients,
    infos: Mapping[ClientId, ClientInfo],
    counting: ClientWeights,
) -> Collected | None:
    """What the method that collects updates in its own way made of the round; None where there is no such method."""
    number = state.round + 1
    fixed: dict[ClientId, Mapping[str, str]] = {}
    plain = settings.to_dict()

    def job(client: ClientId, more: Mapping[str, Extra]) -> Job:
        made = dispatch.job(
            "train", state, client, sampled[client], infos[client].rows, number, plain, {**extra, **more}
        )
        fixed[client] = made.fixed
        return made

    timeout = server.federation.round_timeout
    open_round = OpenRound(state, number, engine, sampled, infos, job, timeout, counting, sampled.by_method)
    for method in server.methods:
        with _blamed(method.name, number):
            collected = method.collect(open_round)
        if collected is not None:
            for update in collected.updates:
                dispatch.answered(update.client, fixed[update.client])
            for failure in collected.failures:
                dispatch.lost(failure.client)
            return collected
    return None


def _weights(server: ServerSettings, given: Iterable[RoundSettings]) -> tuple[Mapping[str, float], LocalSettings]:
    """How much each task counts in the round's mean, and the clients' settings, where its loss weight is."""
    in_mean, settings = dict(server.task_weights), server.settings
    in_loss = dict(settings.loss_weights)
    changed = in_mean if server.weight_in == "averaging" else in_loss
    for one in given:
        for task, factor in one.task_factors.items():
            if task in changed:
                changed[task] *= factor
    return in_mean, replace(settings, loss_weights=in_loss)


def _client_weights(
    state: State,
    server: ServerSettings,
    sampled: Mapping[ClientId, tuple[str, ...]],
    infos: Mapping[ClientId, ClientInfo],
    task_weights: Mapping[str, float],
) -> ClientWeights:
    """How much each client of the round counts."""
    average = server.federation.aggregation.average
    if average == "tasks":
        sizes = Counter[str]()
        for client, tasks in sampled.items():
            # An info is let go once it is counted: there may be many.
            info = infos[client]
            for task in tasks:
                sizes[task] += info.num_examples.get(task, 0)
        task_weights = per_example(task_weights, sizes)
    caps = _most_weights(state, server, sampled, infos, task_weights)
    return ClientWeights(state.plan, task_weights, average, caps)


def _check_enough(
    server: ServerSettings,
    accepted: Sequence[Update],
    failures: tuple[Failure, ...],
    number: int,
    most: int | None = None,
) -> None:
    """Raise RoundFailed where too few clients answered, in all or of a task.

    `most` is the size of a sample that a method drew: it may be small, or empty, by chance.
    """
    needed = server.federation.min_clients
    needed = needed if most is None else min(needed, most)
    if len(accepted) < needed:
        first = (
            f"; {len(failures)} failed, the first was {failures[0].client}: {failures[0].reason}" if failures else ""
        )
        raise RoundFailed(
            f"round {number} got {len(accepted)} updates, federation.min_clients is {needed}"
            f"{first or '; lower it, or let more clients take part'}",
            number,
            failures,
        )
    scarce = _scarce_task(server, accepted, failures, number)
    if scarce is not None:
        raise RoundFailed(scarce, number, failures)


def _moved(
    state: State, server: ServerSettings, aggregator: Aggregator, number: int, failures: tuple[Failure, ...]
) -> State:
    """The state after the step on the round's delta."""
    rule = server.rule_name
    with _blamed(rule, number, failures):
        delta = aggregator.result()
        after = state.with_extra(rule, aggregator.remember())
    for method in server.methods:
        with _blamed(method.name, number, failures):
            stepped = method.step(state, delta)
        if stepped is not None:
            weights, extra = stepped
            after = after.with_extra(method.name, extra)
            break
    else:
        weights, extra = (
            {**state.weights, **{key: state.weights[key] + value for key, value in delta.items()}},
            NO_EXTRA,
        )
    for values in (weights, *extra.tensors.values()):
        _check_finite({key: values[key] for key in delta if key in values}, number, failures)
    return replace(after, weights=weights)


def _most_weights(
    state: State,
    server: ServerSettings,
    sampled: Mapping[ClientId, tuple[str, ...]],
    infos: Mapping[ClientId, ClientInfo],
    task_weights: Mapping[str, float],
) -> dict[str, float]:
    """By scope, the most that one client of the round may count, so that it has no more than `max_share` of it."""
    share = server.federation.aggregation.max_share
    if share is None:
        return {}
    weights: dict[str, list[float]] = {}
    for client, tasks in sampled.items():
        counts = {task: infos[client].num_examples.get(task, 0) for task in tasks}
        views = state.plan.keys(server.names, tasks, client).values()
        for scope in {key.scope for view in views for key in view.values()}:
            weight = client_weight(counts, scope, state.plan, task_weights, server.federation.aggregation.average)
            weights.setdefault(scope, []).append(weight)
    return most_weights(weights, share)


def _check_finite(values: Weights, number: int, failures: tuple[Failure, ...]) -> None:
    """A state that is not finite is never saved: every client would fail in it, and a resume would load it again."""
    for key, value in values.items():
        low, high = map(float, torch.aminmax(value)) if value.numel() else (0.0, 0.0)
        if not (math.isfinite(low) and math.isfinite(high)):
            raise RoundFailed(
                f"round {number}: {key.name} of scope {key.scope} would no longer be finite, so that the state of round"
                f" {number - 1} stays; set federation.max_update_norm or federation.aggregation=multi_krum",
                number,
                failures,
            )


def _scarce_task(
    server: ServerSettings, accepted: Sequence[Update], failures: Sequence[Failure], number: int
) -> str | None:
    """What is to be said of the first task that too few clients returned."""
    needed = server.federation.min_clients_per_task
    clients = [*(update.client for update in accepted), *(failure.client for failure in failures)]
    for task in server.tasks if needed else ():
        got = sum(task in update.tasks for update in accepted)
        if got < needed and any(task in server.active_tasks(client, number) for client in clients):
            return (
                f"round {number} got {got} updates of {task}, federation.min_clients_per_task is {needed};"
                " lower it, or let more of its clients take part"
            )
    return None


def _collect(
    state: State,
    server: ServerSettings,
    engine: Engine,
    dispatch: Dispatch,
    settings: LocalSettings,
    extra: Mapping[str, Extra],
    wanted: Iterable[tuple[ClientId, tuple[str, ...], ClientInfo]],
    add: Callable[[Update], None],
) -> tuple[tuple[Update, ...], tuple[Failure, ...]]:
    """Send the round's jobs, and sort the answers into those that count, which are added, and those that do not."""
    number = state.round + 1
    expected: dict[ClientId, tuple[Expected, Mapping[str, str]]] = {}
    filters = update_filters(settings.methods)[::-1]
    without_tensors: dict[ClientId, Job] = {}
    sent: list[ClientId] = []

    def jobs() -> Iterator[Job]:
        plain = settings.to_dict()
        for client, tasks, info in wanted:
            job = dispatch.job("train", state, client, tasks, info.rows, number, plain, extra)
            expected[client] = (expect(job, info), job.fixed)
            if filters:
                plain_extra = {name: Extra(one.values) for name, one in job.extra.items()}
                without_tensors[client] = replace(job, weights={}, extra=plain_extra)
            sent.append(client)
            yield job

    accepted: dict[ClientId, Update] = {}
    failures: list[Failure] = []
    line = _Line(add, sent)
    for answer in engine.run(jobs(), server.federation.round_timeout):
        max_norm = server.federation.max_update_norm
        reason = _why_not(answer, expected, accepted, max_norm)
        if reason is None and filters:
            assert isinstance(answer, Update)
            client = answer.client
            answer, reason = _filtered(answer, filters, without_tensors[client], expected[client][0], max_norm)
        if reason is None:
            assert isinstance(answer, Update)
            answer = replace(answer, num_examples=counted_examples(answer, expected[answer.client][0]))
            accepted[answer.client] = _without_values(answer)
            line.settle(answer.client, answer)
            dispatch.answered(answer.client, expected[answer.client][1])
        else:
            failures.append(Failure(number, answer.client, reason, answer.traffic))
            dispatch.lost(answer.client)
            line.settle(answer.client, None)
    line.finish()
    ordered = sorted(failures, key=lambda failure: failure.client)
    return tuple(accepted[client] for client in sorted(accepted)), tuple(ordered)


class _Line:
    """Adds updates in the order their jobs were sent, each as soon as all before it are settled.

    A client that failed and answers all the same counts too, after all others: what is recorded as accepted is added.
    """

    def __init__(self, add: Callable[[Update], None], sent: Sequence[ClientId]) -> None:
        self._add_update, self._sent = add, sent
        self._settled: dict[ClientId, Update | None] = {}
        self._late: dict[ClientId, Update] = {}
        self._done = 0

    def settle(self, client: ClientId, update: Update | None) -> None:
        """What a client came to: an update that counts, of which there is one, or nothing so far."""
        if client in self._settled and update is not None:
            self._late[client] = update
        self._settled.setdefault(client, update)
        while self._done < len(self._sent) and self._sent[self._done] in self._settled:
            self._add(self._sent[self._done])
            self._done += 1

    def finish(self) -> None:
        """Clients that have not answered will not."""
        for client in self._sent[self._done :]:
            self._add(client)
        self._settled = {client: self._late[client] for client in self._sent if client in self._late}
        for client in list(self._settled):
            self._add(client)

    def _add(self, client: ClientId) -> None:
        update = self._settled.get(client)
        if update is not None:
            self._add_update(update)
            self._settled[client] = None


def _without_values(update: Update) -> Update:
    """The update as the round's record keeps it: which values there were, not what they were."""
    extra = {name: Extra(one.values) for name, one in update.extra.items()}
    return replace(update, delta=dict.fromkeys(update.delta, NO_VALUE), rows=None, extra=extra)


def _why_not(
    answer: Update | Failure,
    expected: Mapping[ClientId, tuple[Expected, Mapping[str, str]]],
    accepted: Mapping[ClientId, Update],
    max_norm: float | None,
) -> str | None:
    reason = unwelcome(answer, expected, accepted)
    if reason is not None:
        return reason
    assert isinstance(answer, Update)
    try:
        return refusal(answer, expected[answer.client][0], max_norm)
    except Exception as error:
        # Whatever is wrong with one client's answer costs that client alone.
        return f"its update cannot be checked: {type(error).__name__}"


def _filtered(
    update: Update, filters: Sequence[UpdateFilter], job: Job, expected: Expected, max_norm: float | None
) -> tuple[Update, str | None]:
    """The update after all filters, or the update as it came and why it must not count.

    What a filter makes of an update passes the same checks as the update itself.
    """
    after = update
    for each in filters:
        try:
            before, after = after, each.at_server(after, job)
            reason = None if after is before else refusal(after, expected, max_norm)
        except Exception as error:
            # Whatever a filter finds in one client's update costs that client alone; its words may quote the update.
            return update, f"{each.name} failed with {type(error).__name__}: {printable(excerpt(error))}"
        if reason is not None:
            return update, f"after {each.name} its update cannot count: {reason}"
    return after, None


@timed("evaluating", whole=True)
def _evaluated(done: Round, server: ServerSettings, evaluate: Evaluate) -> Round:
    started = time.perf_counter()
    evaluation = evaluate(done.state)
    state = _follow(done.state, server.tasks, evaluation)
    after = _through(server, state, lambda method, at: method.after_evaluation(at, evaluation), done.failures)
    seconds = time.perf_counter() - started
    evaluated = replace(done, state=after.state, evaluation=evaluation, evaluate_seconds=seconds)
    return _reported(replace(evaluated, events=(*done.events, *after.events)), server)


def _follow(state: State, tasks: Mapping[str, Task], evaluation: Evaluation) -> State:
    """The state with every task's progress after an evaluation."""
    progress = {
        name: _advance(state, task, state.progress.get(name, Progress()), evaluation) for name, task in tasks.items()
    }
    return replace(state, progress=progress, best_overall=_best_overall(state, evaluation))


def _advance(state: State, task: Task, progress: Progress, evaluation: Evaluation) -> Progress:
    score = evaluation.scores[task.name].metrics.get(task.metric) if task.name in evaluation.scores else None
    progress = replace(progress, scores=(*progress.scores, (state.round, score)))
    if progress.stopped_round is not None or score is None:
        return progress
    if progress.best_score is not None and score <= progress.best_score:
        return progress
    return replace(progress, best_round=state.round, best_score=score)


def _best_overall(state: State, evaluation: Evaluation) -> tuple[int, float] | None:
    best = state.best_overall
    if evaluation.overall is None or (best is not None and evaluation.overall <= best[1]):
        return best
    return state.round, evaluation.overall


def _reported(done: Round, server: ServerSettings) -> Round:
    """The round with what methods have to say of the state it ends with."""
    said = [event for method in server.methods for event in method.report(done.state)]
    return replace(done, events=(*done.events, *said))
