"""How a run is taken up again: the state it goes on from, and all that has to fit it.

A resumed run ends with the weights of one that was never disturbed, or it is not resumed. So a checkpoint that is
broken is named, the one before it counts only if every client still has its state of that round, and events that are
missing are not passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fedmtl.config import Config
from fedmtl.config.errors import dotted, shown
from fedmtl.config.file import config_from
from fedmtl.errors import ConfigError, DataError, FedmtlError
from fedmtl.experiment.events import kernels_of, opening_events, remark_event
from fedmtl.experiment.prepare import Prepared
from fedmtl.federation.aggregators.by_scope import check_of
from fedmtl.federation.checkpoint import Checkpoint, check_state, last_whole_checkpoint
from fedmtl.federation.client import saved_rounds
from fedmtl.federation.messages import State
from fedmtl.foreign import excerpt
from fedmtl.runs.event_lines import Event, Observer, events_of, first_of, last_of, round_of
from fedmtl.runs.events import (
    ClientsEvent,
    ConfigEvent,
    DataEvent,
    PlanEvent,
    ResumedEvent,
    RoundEvent,
    StartEvent,
    WarningEvent,
)
from fedmtl.runs.folder import RunFolder, remove_temporary
from fedmtl.runs.log import append_event, cut_back, missing_rounds, read_events, read_lines, repair_advice, write_lines
from fedmtl.sharing.plan import Extra, is_personal

# Settings that may be edited between two sessions: where files lie, how many processes work, how long one waits and
# for whom. Every other one decides what is trained.
EDITABLE = frozenset(
    {
        "output",
        "data.cache",
        "checkpoint.every",
        "compute.workers",
        "energy.cpu_watts",
        "energy.grams_per_kwh",
        "federation.join_timeout",
        "federation.round_timeout",
        "federation.min_clients",
        "federation.min_clients_per_task",
        "wire.max_bytes",
    }
)
# So many edited settings are named in an error.
MOST_NAMED = 5


def take_up(run: RunFolder, prepared: Prepared, observe: Observer, *, keeps_clients: bool, repair: bool) -> State:
    """The state after the last round that is whole, with the run's files cut back to it.

    `keeps_clients` says that the clients' states are in the run folder, not at sites. With `repair`, rounds that
    events.jsonl has lost are named and left out.
    """
    remove_temporary(run)
    found = last_whole_checkpoint(run.checkpoints)
    state = found.state or prepared.state
    if found.state is not None:
        parameters = {name: getattr(module, leaf) for name, (module, leaf) in prepared.model.canonical().items()}
        server = prepared.server
        checks: dict[str, Callable[[Extra], None]] = {method.name: method.check for method in server.methods}
        checks[server.rule_name] = check_of(server.aggregator)
        check_state(state, parameters, list(prepared.tasks), run.checkpoints, checks)
    events = read_events(run)
    record = config_event(prepared.config, _edits(run, prepared.config, events))
    _check_first(run, found, events)
    if keeps_clients:
        _check_data(run, prepared, events)
        _check_clients(run, prepared, state)
    last = state.round if state.progress else -1
    missing = missing_rounds(events, last)
    if missing and not repair:
        raise FedmtlError(
            f"{run.events}: has no `round` of {_rounds(missing)}, and the checkpoint is of round {last};"
            f" {repair_advice(run)}"
        )
    observe(ResumedEvent(round=max(last, 0), broken=tuple(found.broken), missing=_rounds(missing)))
    cut_back(run, last)
    if record.changed or last_of(events, ConfigEvent) is None:
        append_event(run, record)
    for words in _other_rounding(prepared, events):
        append_event(run, remark_event(max(last, 0), "", words))
        observe(WarningEvent(words=words))
    return state


def _other_rounding(prepared: Prepared, events: Sequence[Event]) -> list[str]:
    """Say where the rest of the run is computed by something that rounds otherwise than what began it."""
    start = first_of(events, StartEvent)
    if start is None:
        return []
    now = {"kernels": kernels_of(prepared), "torch": torch.__version__, "device": prepared.compute.device}
    then = {"kernels": start.kernels, "torch": start.torch, "device": start.device}
    found = [f"{what} {then[what]} before, {now[what]} now" for what in now if then[what] not in (None, now[what])]
    return [f"weights will not be those of an undisturbed run, bit for bit: {', '.join(found)}"] if found else []


def config_event(config: Config, changed: Mapping[str, list[Any]] | None = None) -> ConfigEvent:
    """The event that a later resume compares `config.yaml` with."""
    return ConfigEvent(config=config.model_dump(mode="json"), changed=dict(changed or {}))


def _edits(run: RunFolder, config: Config, events: Sequence[Event]) -> dict[str, list[Any]]:
    """What of the config was edited since the run was last at work, as before and after by key.

    An edit that changes what is trained is a ConfigError: no weights would be those of either config. A run of an
    earlier version has no record, and nothing to compare with.
    """
    record = last_of(events, ConfigEvent)
    if record is None:
        return {}
    try:
        before = dict(_leaves(config_from(record.config).model_dump(mode="json")))
    except ConfigError as error:
        raise ConfigError(
            f"{run.events}: its `config` does not fit this version ({error}); resume it with the version that began it"
        ) from None
    after = dict(_leaves(config.model_dump(mode="json")))
    keys = [key for key in (before | after) if before.get(key) != after.get(key)]
    edits = {dotted(key): [before.get(key), after.get(key)] for key in keys}
    named = [f"{key} from {shown(a)} to {shown(b)}" for key, (a, b) in edits.items() if not _is_editable(key)]
    if named:
        more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
        # Only a server's run has it.
        command = "server --config" if (run.path / "place.json").exists() else "run"
        raise ConfigError(
            f"{run.config}: was edited since the run began: {', '.join(named[:MOST_NAMED])}{more}; undo that, or start"
            f" a new run with `fedmtl {command} {run.config}`"
        )
    return edits


def _is_editable(key: str) -> bool:
    return key in EDITABLE or key.startswith("track.")


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    elif value is not None:
        yield path, value


def opened_events(run: RunFolder, prepared: Prepared) -> list[Event]:
    """The run's events with a whole opening: one that was cut by a kill or a repair is written anew."""
    known = read_lines(run)
    kinds = [line.event.kind for line in known if _is_opening(line.event)]
    if sorted(kinds) != sorted(["start", *["data"] * len(prepared.tasks), "clients", "plan"]):
        write_lines(run, [*opening_events(prepared), *(line for line in known if not _is_opening(line.event))])
    return read_events(run)


def _is_opening(event: Event) -> bool:
    return isinstance(event, StartEvent | DataEvent | ClientsEvent | PlanEvent) and round_of(event) is None


def _check_first(run: RunFolder, found: Checkpoint, events: Sequence[Event]) -> None:
    """Raise where the events tell of a trained round but no checkpoint is there, so that checkpoints were lost."""
    last = max((event.round for event in events if isinstance(event, RoundEvent)), default=0)
    if found.state is None and last > 0:
        raise FedmtlError(
            f"{run.checkpoints}: has no checkpoint, but {run.events.name} tells of round {last}; put back the folder,"
            f" or start a new run with `fedmtl run {run.config}`"
        )


def _check_data(run: RunFolder, prepared: Prepared, events: Sequence[Event]) -> None:
    """Raise where a task's examples are not those that the run began with; of an earlier version's only in numbers."""
    now = {event.task: event for event in opening_events(prepared) if isinstance(event, DataEvent)}
    for before in events_of(events, DataEvent):
        changes = _data_changes(before, now[before.task]) if before.task in now else []
        if changes:
            raise DataError(
                f"{run.name}: the data of task {before.task} changed since the run began: {', '.join(changes)}; put"
                f" back the files as they were, or start a new run with `fedmtl run {run.config} --name NAME`"
            )


def _data_changes(before: DataEvent, now: DataEvent) -> list[str]:
    """What of a task's examples differs, in words; an event without a fingerprint says only numbers and labels."""
    changes = []
    if (before.train, before.validation) != (now.train, now.validation):
        changes.append(
            f"{before.train} training and {before.validation} validation examples before, {now.train} and"
            f" {now.validation} now"
        )
    names, others = (", ".join(event.labels or ()) for event in (before, now))
    if names != others:
        changes.append(f"labels {excerpt(names)} before, {excerpt(others)} now")
    if changes:
        return changes
    if before.fingerprint is None or now.fingerprint is None:
        return ["other numbers of examples by label"] if before.labels != now.labels else []
    differ = [part for part, digest in before.fingerprint.items() if now.fingerprint.get(part) != digest]
    return [f"other {' and '.join(differ)}, or another order of them"] if differ else []


def _check_clients(run: RunFolder, prepared: Prepared, state: State) -> None:
    """Raise where a client no longer has its saved state of the round that the run goes on from."""
    for client, accepted in state.accepted.items():
        if client not in prepared.clients:
            raise FedmtlError(f"{run.checkpoints}: tells of a client {client}, which is not in {run.config}")
        saved = saved_rounds(run.clients / client)
        if accepted in saved or not (saved or _has_personal_values(prepared, state, client, accepted)):
            continue
        known = f"those of rounds {', '.join(map(str, saved))}" if saved else "none"
        raise FedmtlError(
            f"{run.name}: would go on after round {state.round}, for which client {client} needs its state of round"
            f" {accepted} and has {known}; put back whole copies of {run.checkpoints.name}/ and {run.clients.name}/,"
            f" or start a new run with `fedmtl run {run.config}`"
        )


def _has_personal_values(prepared: Prepared, state: State, client: str, round_number: int) -> bool:
    tasks = prepared.server.active_tasks(client, round_number)
    views = state.plan.keys(prepared.server.names, tasks, client).values()
    return any(is_personal(key) for view in views for key in view.values())


def _rounds(numbers: list[int]) -> str:
    """Rounds in words, such as `rounds 4 to 8`; empty for none."""
    if len(numbers) <= 1:
        return f"round {numbers[0]}" if numbers else ""
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"rounds {numbers[0]} to {numbers[-1]}"
    shown = ", ".join(map(str, numbers[:8]))
    return f"rounds {shown}{' and more' if len(numbers) > 8 else ''}"
