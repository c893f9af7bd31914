"""The server loop: sample, cut, send, check, average, step, evaluate. It writes no file and prints nothing."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

import torch

from fedmtl.errors import CannotContinue
from fedmtl.federation.adaptive_sharing import adapt
from fedmtl.federation.agreement import TaskUpdates
from fedmtl.federation.combine import ClippedMean, StreamingMean, client_weight, most_weights, per_example
from fedmtl.federation.dispatch import Dispatch
from fedmtl.federation.early_stop import follow
from fedmtl.federation.messages import (
    ClientId,
    ClientInfo,
    Engine,
    Evaluation,
    Failure,
    Job,
    LayerDecision,
    Refinement,
    Round,
    State,
    Update,
)
from fedmtl.federation.pruning import prune
from fedmtl.federation.server_optimizer import server_step
from fedmtl.federation.strategy import Strategy, sample_clients
from fedmtl.federation.task_weighting import progress_factors, weighted
from fedmtl.federation.validate import Expected, counted_examples, expect, refusal, unwelcome
from fedmtl.sharing.keys import Weights
from fedmtl.training.settings import LocalSettings

Evaluate = Callable[[State], Evaluation]
Refine = Callable[[State], tuple[State, Refinement]]
# In the place of a value that has been averaged and let go.
NO_VALUE = torch.empty(0, device="meta")


class RoundFailed(CannotContinue):
    """A round that did not get enough updates; its failures say why."""

    def __init__(self, message: str, round_number: int, failures: tuple[Failure, ...] = ()) -> None:
        super().__init__(message)
        self.round = round_number
        self.failures = failures


def rounds(
    state: State, strategy: Strategy, engine: Engine, evaluate: Evaluate, refine: Refine | None = None
) -> Iterator[Round]:
    """Yield round 0, the start, then every round after it; a resumed state goes on where it was.

    `refine` goes over what every round came to before it is pruned and evaluated.
    """
    dispatch = Dispatch(strategy)
    if state.round == 0 and not state.progress:
        turn = _evaluated(Round(0, _pruned(state, strategy), (), (), None), strategy, evaluate)
        state = turn.state
        yield turn
    while state.round < strategy.settings.num_rounds and not all_stopped(state, strategy):
        turn = _turn(state, strategy, engine, dispatch)
        if refine is not None:
            refined, refinement = refine(turn.state)
            turn = replace(turn, state=refined, refinement=refinement)
        turn = replace(turn, state=_pruned(turn.state, strategy))
        if strategy.is_evaluated(turn.number):
            turn = _evaluated(turn, strategy, evaluate)
        state = turn.state
        yield turn


def _pruned(state: State, strategy: Strategy) -> State:
    return state if strategy.pruning is None else prune(state, strategy.pruning, strategy.prunable)


def all_stopped(state: State, strategy: Strategy) -> bool:
    """Whether every task has been stopped early, so that no head is left to train."""
    return all(name in state.progress and state.progress[name].stopped_round is not None for name in strategy.tasks)


def _turn(state: State, strategy: Strategy, engine: Engine, dispatch: Dispatch) -> Round:
    started = time.perf_counter()
    number = state.round + 1
    weights, settings = _weights(state, strategy)
    average = strategy.federation.average
    infos = engine.clients()
    asked = sample_clients(strategy, infos, number)
    counted = weights
    if average == "tasks" or settings.logit_adjustment:
        sizes, labels = _held(asked, infos)
        counted = per_example(weights, sizes) if average == "tasks" else weights
        settings = replace(settings, label_counts=labels) if settings.logit_adjustment else settings
    caps = _most_weights(state, strategy, asked, infos, counted)
    mean = StreamingMean(state.weights, state.plan, counted, average, caps)
    clipped = ClippedMean(mean, state.norms) if strategy.federation.aggregation == "clipped_mean" else None
    follows = strategy.federation.task_weighting.kind == "progress"
    told = (weights if strategy.weight_in == "averaging" else settings.loss_weights) if follows else {}
    by_task = TaskUpdates(strategy.movable, list(strategy.tasks), state.weights, state.plan, average)
    wanted = ((client, tasks, infos[client]) for client, tasks in asked.items())
    accepted, failures = _collect(state, strategy, engine, dispatch, settings, wanted, (clipped or mean, by_task))
    needed = strategy.federation.min_clients
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
    scarce = _scarce_task(strategy, accepted, failures, number)
    if scarce is not None:
        raise RoundFailed(scarce, number, failures)
    delta = (clipped or mean).result()
    moved, slots = server_step(strategy.federation.server_optimizer, state.weights, delta, state.server_optimizer)
    for values in (moved, *slots.values()):
        _check_finite({key: values[key] for key in delta if key in values}, number, failures)
    after = replace(
        state,
        round=number,
        weights=moved,
        server_optimizer=slots,
        accepted={**state.accepted, **{update.client: number for update in accepted}},
        norms=state.norms if clipped is None else clipped.medians(),
    )
    decisions: tuple[LayerDecision, ...] = ()
    if strategy.adaptive is not None:
        after, decisions = adapt(after, strategy.adaptive, strategy.movable, list(strategy.tasks), by_task.measure())
    return Round(
        number,
        after,
        accepted,
        failures,
        None,
        train_seconds=time.perf_counter() - started,
        task_weights=told,
        sharing=decisions,
    )


def _weights(state: State, strategy: Strategy) -> tuple[Mapping[str, float], LocalSettings]:
    """How much each task counts in the next round's mean, and the clients' settings, where its loss weight is."""
    factors = progress_factors(strategy.federation.task_weighting, state.progress)
    if strategy.weight_in == "averaging":
        return weighted(strategy.task_weights, factors), strategy.settings
    loss_weights = weighted(strategy.settings.loss_weights, factors)
    return strategy.task_weights, replace(strategy.settings, loss_weights=loss_weights)


def _held(
    asked: Mapping[ClientId, Sequence[str]], infos: Mapping[ClientId, ClientInfo]
) -> tuple[Counter[str], dict[str, list[int]]]:
    """How many examples of each task the clients that are asked for it have together, and how often each label.

    An info is let go once it is counted: there may be many.
    """
    sizes = Counter[str]()
    labels: dict[str, list[int]] = {}
    for client, tasks in asked.items():
        info = infos[client]
        for task in tasks:
            sizes[task] += info.num_examples.get(task, 0)
            counts = zip_longest(labels.get(task, ()), info.label_counts.get(task, ()), fillvalue=0)
            labels[task] = [a + b for a, b in counts]
    return sizes, labels


def _most_weights(
    state: State,
    strategy: Strategy,
    asked: Mapping[ClientId, tuple[str, ...]],
    infos: Mapping[ClientId, ClientInfo],
    task_weights: Mapping[str, float],
) -> dict[str, float]:
    """By scope, the most that one client of the round may count, so that it has no more than `max_share` of it."""
    share = strategy.federation.max_share
    if share is None:
        return {}
    weights: dict[str, list[float]] = {}
    for client, tasks in asked.items():
        counts = {task: infos[client].num_examples.get(task, 0) for task in tasks}
        declared = Update(state.round + 1, client, tasks, {}, None, counts, {})
        views = state.plan.keys(strategy.names, tasks, client).values()
        for scope in {key.scope for view in views for key in view.values()}:
            weight = client_weight(declared, scope, state.plan, task_weights, strategy.federation.average)
            weights.setdefault(scope, []).append(weight)
    return most_weights(weights, share)


def _check_finite(values: Weights, number: int, failures: tuple[Failure, ...]) -> None:
    """A state that is not finite is never kept: every client would fail in it, and a resume would load it again."""
    for key, value in values.items():
        low, high = map(float, torch.aminmax(value)) if value.numel() else (0.0, 0.0)
        if not (math.isfinite(low) and math.isfinite(high)):
            raise RoundFailed(
                f"round {number}: {key.name} of scope {key.scope} would no longer be finite, so that the state of round"
                f" {number - 1} stays; set federation.max_update_norm or federation.aggregation=clipped_mean",
                number,
                failures,
            )


def _scarce_task(
    strategy: Strategy, accepted: Sequence[Update], failures: Sequence[Failure], number: int
) -> str | None:
    """What is to be said of the first task that too few clients returned."""
    needed = strategy.federation.min_clients_per_task
    asked = [*(update.client for update in accepted), *(failure.client for failure in failures)]
    for task in strategy.tasks if needed else ():
        got = sum(task in update.tasks for update in accepted)
        if got < needed and any(task in strategy.active_tasks(client, number) for client in asked):
            return (
                f"round {number} got {got} updates of {task}, federation.min_clients_per_task is {needed};"
                " lower it, or let more of its clients take part"
            )
    return None


def _collect(
    state: State,
    strategy: Strategy,
    engine: Engine,
    dispatch: Dispatch,
    settings: LocalSettings,
    asked: Iterable[tuple[ClientId, tuple[str, ...], ClientInfo]],
    sums: Sequence[StreamingMean | ClippedMean | TaskUpdates],
) -> tuple[tuple[Update, ...], tuple[Failure, ...]]:
    """Send the round's jobs, and sort the answers into those that count, which join the sums, and those that do not."""
    number = state.round + 1
    expected: dict[ClientId, tuple[Expected, Mapping[str, str]]] = {}
    sent: list[ClientId] = []

    def jobs() -> Iterator[Job]:
        told = settings.to_dict()
        for client, tasks, info in asked:
            job = dispatch.job("train", state, client, tasks, info.rows, number, told)
            expected[client] = (expect(job, info), job.fixed)
            sent.append(client)
            yield job

    accepted: dict[ClientId, Update] = {}
    failures: list[Failure] = []
    line = _Line(sums, sent)
    for answer in engine.run(jobs(), strategy.federation.round_timeout):
        reason = _why_not(answer, expected, accepted, strategy.federation.max_update_norm)
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
    """Adds updates to the sums in the order their jobs were sent, each as soon as all before it are settled.

    A client that failed and answers all the same counts too, after all others: what is recorded as accepted is in the
    sums.
    """

    def __init__(self, sums: Sequence[StreamingMean | ClippedMean | TaskUpdates], sent: Sequence[ClientId]) -> None:
        self._sums, self._sent = sums, sent
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
            for total in self._sums:
                total.add(update)
            self._settled[client] = None


def _without_values(update: Update) -> Update:
    """The update as the round's record keeps it: which values there were, not what they were."""
    return replace(update, delta=dict.fromkeys(update.delta, NO_VALUE), rows=None)


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


def _evaluated(turn: Round, strategy: Strategy, evaluate: Evaluate) -> Round:
    started = time.perf_counter()
    evaluation = evaluate(turn.state)
    state, stopped = follow(turn.state, strategy.tasks, evaluation)
    return replace(
        turn,
        state=state,
        evaluation=evaluation,
        stopped=stopped,
        evaluate_seconds=time.perf_counter() - started,
    )
