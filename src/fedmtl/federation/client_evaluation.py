"""Evaluation where the text is: clients return sums, which are checked and merged; never examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any

from fedmtl.capabilities import scoring_methods
from fedmtl.config import EvaluationConfig
from fedmtl.errors import FedmtlError
from fedmtl.federation.dispatch import Dispatch, ServerSettings
from fedmtl.federation.messages import ClientId, Engine, Evaluation, Failure, Job, State, Traffic, Update
from fedmtl.federation.server_method import OpenRound
from fedmtl.federation.validate import Expected, expect, read_scores, unwelcome
from fedmtl.sharing.plan import Extra
from fedmtl.tasks.metrics import Sums, averages, score
from fedmtl.tasks.task import Task


def client_evaluator(server: ServerSettings, engine: Engine) -> Callable[[State], Evaluation]:
    """An evaluation at the clients that hold a task, at the round a state stands at; fixed values travel once."""
    dispatch = Dispatch(server)
    return lambda state: _evaluate(state, server, engine, dispatch)


def _evaluate(state: State, server: ServerSettings, engine: Engine, dispatch: Dispatch) -> Evaluation:
    infos = engine.clients()
    expected: dict[ClientId, tuple[Expected, Mapping[str, str]]] = {}
    settings = scoring_settings(server.evaluation, server.settings.methods)
    active = {client: server.active_tasks(client, max(1, state.round)) for client in sorted(infos)}
    active = {client: tasks for client, tasks in active.items() if tasks}

    def job(client: ClientId, extra: Mapping[str, Extra] | None = None) -> Job:
        info, tasks = infos[client], active[client]
        made = dispatch.job("evaluate", state, client, tasks, info.evaluation_rows, state.round, settings, extra)
        expected[client] = (expect(made, info), made.fixed)
        return made

    open_round = OpenRound(state, state.round, engine, active, infos, job, server.federation.round_timeout)
    for method in server.methods:
        found = method.collect_scores(open_round)
        if found is not None:
            for client in found.clients:
                dispatch.answered(client, expected[client][1])
            for failure in found.failures:
                dispatch.lost(failure.client)
            return _evaluation(server.tasks, found.sums, {}, found.failures, found.traffic)

    scored: dict[ClientId, Mapping[str, Sums]] = {}
    failures: list[Failure] = []
    down = up = 0
    for answer in engine.run(map(job, active), server.federation.round_timeout):
        down, up = down + answer.traffic.bytes_down, up + answer.traffic.bytes_up
        sums = _scores(answer, expected, scored, server.tasks)
        if isinstance(sums, str):
            failures.append(Failure(state.round, answer.client, sums, answer.traffic))
            dispatch.lost(answer.client)
        else:
            scored[answer.client] = sums
            dispatch.answered(answer.client, expected[answer.client][1])
    failures.sort(key=lambda failure: failure.client)
    return _merge(state.round, server.tasks, scored, failures, Traffic(down, up))


def _scores(
    answer: Update | Failure,
    expected: Mapping[ClientId, tuple[Expected, Mapping[str, str]]],
    scored: Mapping[ClientId, Mapping[str, Sums]],
    tasks: Mapping[str, Task],
) -> Mapping[str, Sums] | str:
    """What a client scored, or why it does not count; whatever is wrong with an answer costs its client alone."""
    reason = unwelcome(answer, expected, scored)
    if reason is not None:
        return reason
    assert isinstance(answer, Update)
    try:
        return read_scores(answer, expected[answer.client][0], tasks)
    except FedmtlError as error:
        return f"its scores cannot be read: {error}"
    except Exception as error:
        return f"its scores cannot be read: {type(error).__name__}"


def _merge(
    round_number: int,
    tasks: Mapping[str, Task],
    scored: Mapping[ClientId, Mapping[str, Sums]],
    failures: list[Failure],
    traffic: Traffic,
) -> Evaluation:
    parts: dict[str, dict[ClientId, Sums]] = {}
    # By name, so that sums are rounded alike whoever answered first.
    for client in sorted(scored):
        for name, part in scored[client].items():
            parts.setdefault(name, {})[client] = part
    for name, by_client in parts.items():
        finite = {client: part for client, part in by_client.items() if not part.broken and math.isfinite(part.loss)}
        # Where nobody's are, it is the model.
        if finite and len(finite) < len(by_client):
            parts[name] = finite
            failures += [
                Failure(round_number, client, f"its predictions of {name} are not finite, those of others are")
                for client in by_client
                if client not in finite
            ]
    sums: dict[str, Sums] = {name: reduce(add, by_client.values()) for name, by_client in parts.items()}
    clients = {
        name: {client: score(task, part).metrics[task.metric] for client, part in parts[name].items()}
        for name, task in tasks.items()
        if name in parts
    }
    return _evaluation(tasks, sums, clients, failures, traffic)


def _evaluation(
    tasks: Mapping[str, Task],
    sums: Mapping[str, Sums],
    clients: Mapping[str, Mapping[ClientId, float | None]],
    failures: Sequence[Failure],
    traffic: Traffic,
) -> Evaluation:
    scores = {name: score(tasks[name], total) for name, total in sums.items()}
    overall, classification = averages(list(tasks.values()), scores)
    return Evaluation(scores, sums, overall, classification, clients, tuple(failures), traffic)


def scoring_settings(evaluation: EvaluationConfig, methods: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What clients are given for evaluation, of a config and its clients' methods."""
    settings: dict[str, Any] = {"batch_size": evaluation.batch_size, "share_pairs": evaluation.share_pairs}
    scoring = scoring_methods(methods)
    return {**settings, "methods": scoring} if scoring else settings
