"""Evaluation where the text is: clients return sums, which are merged; never examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from operator import add

from fedmtl.errors import WireError
from fedmtl.federation.dispatch import Dispatch
from fedmtl.federation.messages import ClientId, Engine, Evaluation, Failure, Job, State, Traffic, Update
from fedmtl.federation.strategy import Strategy
from fedmtl.tasks.metrics import Sums, averages, score, sums_from_dict


def client_evaluator(strategy: Strategy, engine: Engine) -> Callable[[State], Evaluation]:
    """An evaluation at the clients that hold a task, at the round a state stands at; fixed values travel once."""
    dispatch = Dispatch(strategy)
    return lambda state: _evaluate(state, strategy, engine, dispatch)


def _evaluate(state: State, strategy: Strategy, engine: Engine, dispatch: Dispatch) -> Evaluation:
    infos = engine.clients()
    fixed: dict[ClientId, Mapping[str, str]] = {}
    settings = {"batch_size": strategy.evaluation.batch_size, "share_pairs": strategy.evaluation.share_pairs}

    def jobs() -> Iterator[Job]:
        for client in sorted(infos):
            tasks = strategy.active_tasks(client, max(1, state.round))
            if tasks:
                rows = infos[client].evaluation_rows
                job = dispatch.job("evaluate", state, client, tasks, rows, state.round, settings)
                fixed[client] = job.fixed
                yield job

    answers = sorted(engine.run(jobs(), strategy.federation.round_timeout), key=lambda answer: answer.client)
    for answer in answers:
        if isinstance(answer, Failure):
            dispatch.lost(answer.client)
        elif answer.client in fixed:
            dispatch.answered(answer.client, fixed[answer.client])
    return _merge(strategy, answers)


def _merge(strategy: Strategy, answers: list[Update | Failure]) -> Evaluation:
    parts: dict[str, dict[str, Sums]] = {}
    failures: list[Failure] = []
    for answer in answers:
        if isinstance(answer, Failure):
            failures.append(answer)
            continue
        try:
            own = {name: sums_from_dict(strategy.tasks[name], data) for name, data in answer.sums.items()}
        except (WireError, KeyError) as error:
            failures.append(Failure(answer.round, answer.client, f"its scores cannot be read: {error}", answer.traffic))
            continue
        for name, part in own.items():
            parts.setdefault(name, {})[answer.client] = part
    sums: dict[str, Sums] = {name: reduce(add, own.values()) for name, own in parts.items()}
    clients = {
        name: {client: score(task, part).metrics[task.metric] for client, part in parts[name].items()}
        for name, task in strategy.tasks.items()
        if name in parts
    }
    scores = {name: score(strategy.tasks[name], total) for name, total in sums.items()}
    overall, classification = averages(list(strategy.tasks.values()), scores)
    traffic = Traffic(
        sum(answer.traffic.bytes_down for answer in answers),
        sum(answer.traffic.bytes_up for answer in answers),
    )
    return Evaluation(scores, sums, overall, classification, clients, tuple(failures), traffic)
