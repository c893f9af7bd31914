"""A run's model as it was after its best round, its last one, or one by its number.

Weights of earlier rounds are in the run's checkpoints: the last two, those of the best rounds, and every n-th with
`checkpoint.every`. The best round is the one with the best overall score. A task that was stopped early has a best
round itself, and with `best` it answers as it did then, encoder and all. Where tasks are of different rounds, those of
one round share what they shared then, and no value with the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from fedmtl.config.file import load_config
from fedmtl.errors import FedmtlError
from fedmtl.federation.checkpoint import load_checkpoint, saved_checkpoints
from fedmtl.federation.client import load_values
from fedmtl.federation.messages import State
from fedmtl.model.encoder_files import check_inside
from fedmtl.model.saved import SavedModel, load_model, save_model
from fedmtl.runs.event_lines import last_of
from fedmtl.runs.events import EndEvent
from fedmtl.runs.folder import RunFolder
from fedmtl.runs.log import read_events
from fedmtl.runs.summary import BEST, LAST, Round, parse_round, task_rounds
from fedmtl.sharing.plan import ADAPTERS, HEADS, Key, SharingPlan, Weights, is_personal, owner_task


def load_round(
    run: RunFolder, given: Round | None = None, client: str | None = None, *, values_only: bool = False
) -> SavedModel:
    """The model of a run after one of its rounds, with the values that stay at the client which is named.

    Without a round it is the model that the run ended with (`training.keep`). `values_only` is as in `load_model`.
    """
    check_inside(run.model, run.path)
    saved = load_model(run.model, values_only=values_only)
    if given is None and client is None:
        return saved
    ended_with = kept_round(run)
    wanted = ended_with if given is None else parse_round(given)
    if wanted == ended_with and client is None:
        return saved
    # The folder may be anybody's: what it opens lies in it.
    for part in (run.checkpoints, *([run.clients] if client else ())):
        check_inside(part, run.path)
    if wanted == LAST and wanted == ended_with:
        assert client is not None
        return _with_last_values(saved, run, client)
    rounds = task_rounds(read_events(run), wanted, run.name)
    states = _open_states(run, rounds, wanted)
    if given is None and client is not None and _is_before_clients(states):
        # The run ended with its last round for the same reason.
        return _with_last_values(saved, run, client)
    _check_personal(states, wanted)
    personal = {number: _client_values(run, client, state) if client else {} for number, state in states.items()}
    parts = {
        number: Part(state.plan, {**state.weights, **personal[number]}, client or "")
        for number, state in states.items()
    }
    plan, weights = combine_rounds(parts, {task: rounds[task] for task in saved.tasks}, list(saved.model.canonical()))
    return replace(saved, plan=plan, weights=weights)


def kept_round(run: RunFolder) -> Round:
    """Which round the model that a run ended with is of, `best` or `last`.

    It is `training.keep` of the config, but `last` where the best round could not be opened at the end.
    """
    end = last_of(read_events(run), EndEvent)
    return (end and end.keep) or load_config(run.config).training.keep


def _with_last_values(saved: SavedModel, run: RunFolder, client: str) -> SavedModel:
    values = _client_values(run, client, load_checkpoint(run.checkpoints))
    return replace(saved, weights={**saved.weights, **values})


def round_name(given: Round) -> str:
    """What files of a round are called, such as `best` or `round-3`."""
    given = parse_round(given)
    return given if isinstance(given, str) else f"round-{given}"


def run_at(run: RunFolder, given: Round | None) -> RunFolder:
    """The run with the model of that round as its model, for what starts from a model's folder: `models/<round>/`."""
    if given is None:
        return run
    saved = load_round(run, given)
    models = run.path / "models"
    check_inside(models, run.path)
    folder = models / round_name(given)
    save_model(folder, saved.encoder, saved.tasks, saved.plan, saved.weights, load_config(run.config).model)
    return replace(run, model_folder=folder)


def best_model(run: RunFolder, tasks: Iterable[str], names: Iterable[str]) -> tuple[SharingPlan, Weights]:
    """The plan and the server's values of a run's best round, for the model that it ends with."""
    rounds = task_rounds(read_events(run), BEST, run.name)
    states = _open_states(run, rounds, BEST)
    _check_personal(states, BEST)
    parts = {number: Part(state.plan, state.weights) for number, state in states.items()}
    return combine_rounds(parts, {task: rounds[task] for task in tasks}, list(names))


def _open_states(run: RunFolder, rounds: Mapping[str, int], given: Round) -> dict[int, State]:
    saved = saved_checkpoints(run.checkpoints)
    states: dict[int, State] = {}
    for number in sorted(set(rounds.values())):
        if number not in saved:
            raise FedmtlError(
                f"--round {given}: {run.name} has no checkpoint of round {number}; it has"
                f" {_spell(saved)}; with checkpoint.every=1 a run stores every round"
            )
        state = load_checkpoint(run.checkpoints, number)
        assert state is not None, "a round that is named is there"
        states[number] = state
    return states


def _is_before_clients(states: Mapping[int, State]) -> bool:
    """Whether a state is of round 0 of a plan whose values stay at clients: before they train, clients have none."""
    return 0 in states and states[0].plan.has_personal


def _check_personal(states: Mapping[int, State], given: Round) -> None:
    if _is_before_clients(states):
        raise FedmtlError(
            f"--round {given}: that is round 0, in which no client had values of its own yet; write --round last, or a"
            " number"
        )


def _spell(rounds: list[int]) -> str:
    if not rounds:
        return "none"
    return f"{'that of round' if len(rounds) == 1 else 'those of rounds'} {', '.join(map(str, rounds))}"


def _client_values(run: RunFolder, client: str, state: State | None) -> Weights:
    """What stayed at a client after a round."""
    accepted = state.accepted.get(client, 0) if state else 0
    values: Weights = {}
    if state is not None and accepted:
        values = load_values(run.clients / client, accepted, state.round)
    if not values:
        others = clients_with_values(run)
        remedy = f"it is one of {others}" if others else "in this run no value stays at a client, so leave --client out"
        if state is not None and state.plan.has_personal and not others:
            remedy = "they are at its site, which stores those of its last two rounds alone"
        raise FedmtlError(f"--client {client}: has no values of this run; {remedy}")
    return values


def clients_with_values(run: RunFolder) -> str:
    """Name the clients that have saved values, for a message."""
    return ", ".join(saved_clients(run))


def saved_clients(run: RunFolder) -> list[str]:
    """The clients that have saved values in the run's folder."""
    folders = [path for path in run.clients.glob("*") if any(path.glob("round-*.safetensors"))]
    return sorted(path.name for path in folders)


@dataclass(frozen=True)
class Part:
    """A round's plan, and its values with those of `client`."""

    plan: SharingPlan
    weights: Weights
    client: str = ""


def combine_rounds(
    parts: Mapping[int, Part], rounds: Mapping[str, int], names: list[str]
) -> tuple[SharingPlan, Weights]:
    """One plan and its weights, in which each task has the values of its round."""
    if len(set(rounds.values())) == 1:
        part = parts[next(iter(rounds.values()))]
        return part.plan, part.weights
    levels = {name: _level(name, [parts[number] for number in sorted(set(rounds.values()))]) for name in names}
    rules = [
        *((f"{prefix}*", "task") for prefix in (HEADS, ADAPTERS)),
        *((name, level) for name, level in levels.items() if level != "group" and owner_task(name) is None),
        ("*", "group"),
    ]
    plan = SharingPlan(tuple(rules), ({task: f"round-{number:04d}" for task, number in rounds.items()},))
    weights: Weights = {}
    for task, number in rounds.items():
        part = parts[number]
        for name, key in part.plan.keys(names, [task], part.client)[task].items():
            if key in part.weights:
                weights[plan.key(name, task, "")] = part.weights[key]
    return plan, weights


def _level(name: str, parts: list[Part]) -> str:
    """Who shares a value of the encoder when tasks are of several rounds."""
    levels = {part.plan.level(name) for part in parts}
    key = Key("fixed", name)
    if levels == {"fixed"} and all(torch.equal(part.weights[key], parts[0].weights[key]) for part in parts):
        return "fixed"
    if levels == {"client"} and not any(is_personal(key) for part in parts for key in part.weights):
        return "client"
    return "group" if levels == {"all"} else "task"
