"""The client: a Job in, an Update out. The text never leaves it.

What stays here between rounds are personal values, the optimizer's state, and fixed values by digest. States are stored
per round, the last two of them: a client that is one round ahead of a resumed server steps back to the round the server
names. When the plan has changed since, a state moves as the server's values do. Only the new plan is known here. A key
that this plan gives to nobody is from before: a value that was split leaves its state to each of its copies, and one
that was merged gets the mean of those that went into it.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedmtl.capabilities import find, local_methods, update_filters
from fedmtl.errors import FedmtlError, PolicyError
from fedmtl.federation.filters.protocol import ExchangeClient, FilterClient, Identity, UpdateFilter
from fedmtl.federation.messages import Job, Traffic, Update
from fedmtl.federation.wire.messages import encode_delta
from fedmtl.model.multitask import BoundModel, Buffers, MultiTaskModel
from fedmtl.model.tensor_files import load_tensors, save_tensors
from fedmtl.sharing.plan import (
    FILTER_PREFIX,
    NO_EXTRA,
    PREFIX,
    Extra,
    Key,
    SharingPlan,
    Weights,
    from_slots,
    is_personal,
    mean_value,
    owner_task,
    scope_tasks,
    slot_name,
    to_slots,
    weights_sha256,
)
from fedmtl.tasks.batches import Shard
from fedmtl.tasks.metrics import sum_predictions
from fedmtl.training.local import Trained, TrainingFailed, predict, train
from fedmtl.training.local_method import LocalMethods, LocalSettings, Release
from fedmtl.training.optimizer import Slots

OPTIMIZER = "optimizer."
# The values that stay at the client.
VALUES = "values"
# Which token rows the optimizer's and the methods' values of the table are of.
TABLE_ROWS = "table_rows"

Shards = Callable[[str, str], Shard]


@dataclass(frozen=True)
class Site:
    """Where clients live: a model to bind values into, their examples, and a folder for what they keep.

    In a deployment the one client has an identity, and its owner's demands by capability.
    """

    model: MultiTaskModel
    initial: InitialValues
    train_shard: Shards
    validation_shard: Shards
    folder: Path
    device: torch.device
    buffers: Buffers = field(default_factory=Buffers)
    # What nobody else may know, from which noise is drawn.
    secret: bytes = b""
    # What the site's policy requires of updates, as plain values.
    required: Mapping[str, Any] = field(default_factory=dict)
    identity: Identity | None = None
    # Numbers of examples leave rounded up to a multiple of it.
    counts_to: int = 1
    # Whether the mean losses of training leave, in the clear or in a sum.
    sends_losses: bool = True


def run_job(job: Job, site: Site) -> Update:
    """Do what the job says; everything that can go wrong at a client is a FedmtlError with its reason."""
    started = time.perf_counter()
    try:
        update = {"train": _train, "evaluate": _evaluate, "exchange": _exchange}[job.kind](job, site)
    except torch.OutOfMemoryError as error:
        raise TrainingFailed(out_of_memory(job)).coded("out_of_memory") from error
    except RuntimeError as error:
        if "not enough memory" in str(error) or "can't allocate memory" in str(error):
            raise TrainingFailed(out_of_memory(job)).coded("out_of_memory") from error
        raise
    seconds = time.perf_counter() - started
    return Update(**{**vars(update), "traffic": Traffic(seconds=seconds)})


@dataclass(frozen=True)
class Opened:
    """What a client has at hand for a training job: its saved state, the values it starts from, its examples."""

    settings: LocalSettings
    state: Mapping[str, Weights]
    values: Weights
    shards: dict[str, Shard]
    methods: LocalMethods
    filters: Sequence[UpdateFilter] = ()


def open_job(job: Job, site: Site) -> Opened:
    settings = LocalSettings.from_dict(job.settings)
    saved = follow_plan(load_state(site.folder / job.client, job.state_round), job.plan, job.tasks, job.client)
    loaded = _of_these_rows(saved, job, site.model.table)
    shards = {task: site.train_shard(job.client, task) for task in job.tasks}
    release = partial(_release, job, site, saved, shards)
    methods = LocalMethods(local_methods(settings.methods), job.extra, from_slots(loaded), release)
    state = methods.restore(loaded)
    return Opened(
        settings,
        state,
        _gather(job, site, state.get(VALUES, {})),
        shards,
        methods,
        update_filters(settings.methods, job.codecs.filters),
    )


def _release(job: Job, site: Site, state: Mapping[str, Weights], shards: Mapping[str, Shard]) -> Release:
    folder = site.folder / job.client
    return Release(site.secret, answer_digest(job, state, shards), folder, site.required, site.counts_to)


def answer_digest(job: Job, state: Mapping[str, Weights], shards: Mapping[str, Shard]) -> str:
    """A digest of all that the answer to a job follows from: the job, the client's saved state, and its examples.

    Which fixed values came with the job is not in it: a server that was started again sends them once more. Nor is what
    an exchange agreed on, which says who else takes part and nothing of what is trained.
    """
    said = {
        **{name: getattr(job, name) for name in ("kind", "round", "client", "tasks", "seed", "state_round")},
        "settings": dict(job.settings),
        "fixed": dict(job.fixed),
        "codecs": vars(job.codecs),
        "plan": [list(map(list, job.plan.rules)), list(map(dict, job.plan.groups)), list(job.plan.stopped)],
        "extra": {name: dict(extra.values) for name, extra in job.extra.items() if find(name).exchange is None},
    }
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    slots = {"weights": job.weights, **to_slots(job.extra), **{f"state/{slot}": each for slot, each in state.items()}}
    for slot in sorted(slots):
        for key in sorted(key for key in slots[slot] if key.scope != "fixed"):
            value = slots[slot][key].detach().cpu().contiguous()
            digest.update(f"{slot}\0{key.scope}\0{key.name}\0{value.dtype}\0{tuple(value.shape)}\0".encode())
            digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    digest.update(b"" if job.rows is None else job.rows.tobytes())
    for task, shard in sorted(shards.items()):
        digest.update(f"{task}\0{shard.digest()}".encode())
    return digest.hexdigest()


def _of_these_rows(slots: Mapping[str, Weights], job: Job, table: str) -> dict[str, Weights]:
    """The slots without what the optimizer and methods saved of a token table with other rows; it begins anew there.

    Filters align rows themselves.
    """
    saved_rows, rows = slots.get(TABLE_ROWS, {}), _rows(job)

    def is_usable(slot: str, key: Key) -> bool:
        is_of_table = key.name == table and slot.startswith((OPTIMIZER, PREFIX))
        return not is_of_table or (key in saved_rows and torch.equal(saved_rows[key], rows))

    return {
        slot: {key: value for key, value in tensors.items() if is_usable(slot, key)} for slot, tensors in slots.items()
    }


def _rows(job: Job) -> Tensor:
    """The token rows that a client has; -1 stands for the whole table."""
    return torch.tensor([-1]) if job.rows is None else torch.from_numpy(job.rows)


def optimizer_slots(opened: Opened) -> Slots:
    """The optimizer's slots in the state that the client saved."""
    state = opened.state.items()
    return {slot.removeprefix(OPTIMIZER): tensors for slot, tensors in state if slot.startswith(OPTIMIZER)}


def close_job(job: Job, site: Site, opened: Opened, delta: Weights, personal: Weights, trained: Trained) -> Update:
    """Store what stays at the client, and answer with how far the shared values moved."""
    state = opened.state
    tasks = trained.tasks
    if tasks != job.tasks:
        views = job.plan.keys(site.model.canonical(), tasks, job.client).values()
        reached = {key for view in views for key in view.values()}
        delta = {key: value for key, value in delta.items() if key in reached}
    counts = {task: len(opened.shards[task]) for task in tasks}
    update = Update(
        job.round,
        job.client,
        tasks,
        delta,
        job.rows,
        counts,
        trained.losses if site.sends_losses else {},
        seen=trained.seen,
        extra=trained.sent,
    )
    update, filtered = _filter(update, job, opened, site)
    fresh: dict[str, Mapping[Key, Tensor]] = {
        **{OPTIMIZER + slot: tensors for slot, tensors in trained.optimizer.items()},
        **extra_slots(trained.stored),
    }
    tables = [key for tensors in fresh.values() for key in tensors if key.name == site.model.table]
    fresh |= {VALUES: personal, **({TABLE_ROWS: dict.fromkeys(tables, _rows(job))} if tables else {})}
    # What belongs to tasks that rest this round stays as it was.
    merged = {slot: {**state.get(slot, {}), **fresh.get(slot, {})} for slot in {**state, **fresh}}
    save_state(site.folder / job.client, job.round, {**merged, **filtered}, job.state_round)
    return update


def _filter(update: Update, job: Job, opened: Opened, site: Site) -> tuple[Update, dict[str, Mapping[Key, Tensor]]]:
    """The update as it leaves, and the slots of what filters store, which replace all that they stored before."""
    stored = from_slots(opened.state, prefix=FILTER_PREFIX) if opened.filters else {}
    slots: dict[str, Mapping[Key, Tensor]] = {}
    for each in opened.filters:
        before = stored.get(each.name, NO_EXTRA)
        folder, release, required = site.folder / job.client, opened.methods.release, site.required.get(each.name, {})
        client = FilterClient(job, before, site.model.table, folder, site.model.tasks, release, required)
        with _named(each):
            update, after = each.at_client(update, client)
            if not isinstance(update, Update):
                raise TypeError(f"at_client returns {type(update).__name__} in place of an Update")
            slots |= {slot: {} for slot in extra_slots({each.name: before}, FILTER_PREFIX)}
            slots |= extra_slots({each.name: after}, FILTER_PREFIX)
    return replace(update, delta=encode_delta(update.delta, job.codecs)), slots


@contextmanager
def _named(each: UpdateFilter) -> Iterator[None]:
    """Whatever goes wrong in a filter is an error that names it."""
    try:
        yield
    except FedmtlError:
        raise
    except Exception as error:
        raise FedmtlError(f"{each.name} failed with {type(error).__name__}: {error}").coded("filter_failed") from error


def _train(job: Job, site: Site) -> Update:
    opened = open_job(job, site)
    values = opened.values
    bound = BoundModel(site.model, job.plan, job.tasks, job.client, values, job.rows, site.device, site.buffers)
    trained = train(
        bound,
        opened.shards,
        opened.settings,
        round_number=job.round,
        seed=job.seed,
        device=site.device,
        saved=optimizer_slots(opened),
        methods=opened.methods,
    )
    after = {key: value.cpu() for key, value in bound.weights().items()}
    personal = {key: value.clone() for key, value in after.items() if is_personal(key)}
    # Against what came, however coarse: the server adds it to its weights, which were never rounded.
    delta = {key: after[key] - values[key] for key in after if key not in personal and job.plan.trains(key)}
    return close_job(job, site, opened, delta, personal, trained)


def _evaluate(job: Job, site: Site) -> Update:
    state = load_state(site.folder / job.client, job.state_round)
    values = _gather(job, site, state.get(VALUES, {}))
    bound = BoundModel(site.model, job.plan, job.tasks, job.client, values, job.rows, site.device, read=True)
    sums = {}
    counts = {}
    for task in job.tasks:
        shard = site.validation_shard(job.client, task)
        outputs, loss = predict(bound, task, shard, int(job.settings["batch_size"]), site.device)
        sums[task] = sum_predictions(
            site.model.tasks[task],
            outputs,
            shard.labels[shard.indices],
            loss,
            bool(job.settings["share_pairs"]),
        ).to_dict()
        counts[task] = len(shard)
    update = Update(job.round, job.client, job.tasks, {}, job.rows, counts, {}, sums)
    client = FilterClient(job, NO_EXTRA, site.model.table, site.folder / job.client, site.model.tasks)
    for each in update_filters(job.settings.get("methods", {})):
        with _named(each):
            update = each.scores_at_client(update, client)
    return update


def _exchange(job: Job, site: Site) -> Update:
    """What the client's half of a capability answers its server's half; no example is looked at."""
    ((name, received),) = job.extra.items() if len(job.extra) == 1 else (("", NO_EXTRA),)
    answers = find(name).exchange if name else None
    if answers is None:
        raise FedmtlError("the job is an exchange of no capability that has any").coded("job_settings")
    names, required = list(site.model.canonical()), site.required.get(name, {})
    client = ExchangeClient(job, site.folder / job.client, names, site.identity, required)
    return Update(job.round, job.client, job.tasks, {}, None, {}, {}, extra={name: answers(received, client)})


def _gather(job: Job, site: Site, personal: Weights) -> Weights:
    """What the server sent, fixed values as they are known here, and personal ones, which start as the model did."""
    try:
        values = {**job.weights, **remember_fixed(site.folder / "fixed", job.weights, job.fixed, site.initial)}
    except KeyError as error:
        raise FedmtlError(
            f"the fixed value {error.args[0]} was neither sent nor stored here, and this model starts with another"
        ) from error
    for view in job.plan.keys(site.model.canonical(), job.tasks, job.client).values():
        for name, key in view.items():
            if is_personal(key):
                values[key] = personal[key] if key in personal else site.initial[name]
    return values


def out_of_memory(job: Job) -> str:
    """What to say: the setting of the largest batches."""
    common, by_task = job.settings["batch_size"], job.settings.get("batch_sizes", {})
    largest = max(job.tasks, key=lambda task: by_task.get(task, common))
    section = "evaluation" if job.kind != "train" else f"tasks.{largest}" if largest in by_task else "training"
    return f"out of memory; lower {section}.batch_size ({by_task.get(largest, common)}) or model.max_length"


DIGEST = re.compile(r"[0-9a-f]{16}")
# What slots were called before filters had names.
RENAMED = {slot: slot_name("error_feedback", slot, FILTER_PREFIX) for slot in ("residual", "residual_rows")}


def fixed_digest(key: Key, value: Tensor) -> str:
    return weights_sha256({key: value})[:16]


def load_state(folder: Path, state_round: int) -> dict[str, Weights]:
    """The slots saved for that round; none where the client starts anew (round 0) or never had anything to keep.

    A client that keeps states, but not that one, is an error: with another round's the weights would differ in silence.
    """
    if state_round == 0:
        return {}
    path = _state_path(folder, state_round)
    if path.exists():
        return {RENAMED.get(slot, slot): values for slot, values in load_tensors(path).items()}
    others = saved_rounds(folder)
    if others:
        raise FedmtlError(
            f"this client keeps its state of {_spell(others)}, and the server goes on after round {state_round}; put"
            f" back {path.name}, or start a new run"
        )
    return {}


def saved_rounds(folder: Path) -> list[int]:
    """The rounds whose state a client has."""
    return sorted(_round_of(path) for path in folder.glob("round-*.safetensors"))


def _spell(rounds: list[int]) -> str:
    return f"round{'s' if len(rounds) > 1 else ''} {' and '.join(map(str, rounds))}"


def save_state(folder: Path, round_number: int, slots: Mapping[str, Mapping[Key, Tensor]], before: int) -> None:
    """Save this round's slots; keep those of `before`, the last round the server accepted, and drop older ones."""
    if not any(slots.values()):
        return
    if before and not _state_path(folder, before).exists():
        # It had nothing to keep then: said in a file, or that state would seem to be lost.
        save_tensors(_state_path(folder, before), {})
    save_tensors(_state_path(folder, round_number), slots)
    for path in folder.glob("round-*.safetensors"):
        if _round_of(path) not in (round_number, before):
            path.unlink(missing_ok=True)


def store_best(folder: Path, accepted: int, round_number: int) -> None:
    """Copy a client's values, which it saved in round `accepted`, as those of a best round of the run.

    The optimizer's state is not copied: nobody goes on from there.
    """
    path = _state_path(folder, accepted)
    values = load_tensors(path).get(VALUES, {}) if path.exists() else {}
    if values:
        save_tensors(_best_path(folder, round_number), {VALUES: values})


def drop_best(folder: Path, rounds: Collection[int]) -> None:
    """Remove the copies of a client's values, but for those of these rounds."""
    for path in folder.glob("best-*.safetensors"):
        if path not in [_best_path(folder, number) for number in rounds]:
            path.unlink(missing_ok=True)


def load_values(folder: Path, accepted: int, round_number: int) -> Weights:
    """What stays at a client, as it was after the run's round `round_number`; it was last accepted in `accepted`."""
    saved = saved_rounds(folder)
    for path in (_best_path(folder, round_number), _state_path(folder, accepted)):
        if path.exists():
            return load_tensors(path).get(VALUES, {})
    if saved:
        raise FedmtlError(
            f"--client {folder.name}: its values after round {round_number} are no longer stored, only those of"
            f" {_spell(saved)} and of the best round; write --round last or best"
        )
    return {}


def _best_path(folder: Path, round_number: int) -> Path:
    return folder / f"best-{round_number:04d}.safetensors"


class InitialValues:
    """What a site's model starts with, by canonical name; digests are made when they are first needed."""

    def __init__(self, values: Weights) -> None:
        self._values = values
        self._digests: dict[str, str] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self._values[Key("", name)]

    def fixed(self, name: str, digest: str) -> Tensor | None:
        """The value, if that is its digest as a fixed one."""
        if Key("", name) not in self._values:
            return None
        if name not in self._digests:
            self._digests[name] = fixed_digest(Key("fixed", name), self[name])
        return self[name] if self._digests[name] == digest else None


def remember_fixed(folder: Path, weights: Weights, digests: Mapping[str, str], initial: InitialValues) -> Weights:
    """All fixed values of a job: as the model started, as sent, which are stored by digest, or from that store.

    Raises KeyError with the name of a value that is in none of them. A digest becomes a file's name: whatever is not
    one, or not that of the value that came with it, is a PolicyError.
    """
    values: Weights = {}
    for name, digest in digests.items():
        key = Key("fixed", name)
        if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
            raise PolicyError("the job names a fixed value by what is no digest").coded("job_weights")
        path = folder / f"{digest}.safetensors"
        initial_value = initial.fixed(name, digest)
        if initial_value is not None:
            values[key] = initial_value
        elif key in weights:
            values[key] = weights[key]
            if not path.exists():
                if fixed_digest(key, weights[key]) != digest:
                    raise PolicyError(f"the fixed value {name} is not that of its digest").coded("job_weights")
                save_tensors(path, {"fixed": {key: weights[key]}})
        elif path.exists():
            values[key] = load_tensors(path)["fixed"][key]
        else:
            raise KeyError(name)
    return values


def extra_slots(stored: Mapping[str, Extra], prefix: str = PREFIX) -> dict[str, Mapping[Key, Tensor]]:
    """What methods and filters store at a client as slots of its state; they store tensors, not plain values."""
    for name, extra in stored.items():
        if extra.values:
            raise TypeError(f"{name} stores plain values at a client, whose state is of tensors only")
    return to_slots(stored, prefix)


def _state_path(folder: Path, round_number: int) -> Path:
    return folder / f"round-{round_number:04d}.safetensors"


def _round_of(path: Path) -> int:
    match = re.search(r"round-(\d+)", path.name)
    return int(match[1]) if match else -1


def follow_plan(
    slots: Mapping[str, Weights], plan: SharingPlan, tasks: Sequence[str], client: str
) -> dict[str, Weights]:
    """The slots of client state under this plan's keys. What a task that rests would have got is dropped.

    So is what belongs to a value that does not train any more, other than the value itself.
    """
    followed = {slot: _follow(values, plan, tasks, client) for slot, values in slots.items()}
    return {
        slot: {key: value for key, value in values.items() if slot == VALUES or plan.trains(key)}
        for slot, values in followed.items()
    }


def _follow(values: Weights, plan: SharingPlan, tasks: Sequence[str], client: str) -> Weights:
    current = {key: value for key, value in values.items() if _is_current(key, plan, client)}
    old: dict[str, list[Key]] = {}
    for key in values:
        if key not in current:
            old.setdefault(key.name, []).append(key)
    for name, keys in old.items():
        owners = [task for task in tasks if owner_task(name) in (None, task)]
        for target in dict.fromkeys(plan.key(name, task, client) for task in owners):
            users = [task for task in owners if plan.key(name, task, client) == target]
            origins = [values[key] for key in keys if scope_tasks(plan, key.scope, users)]
            if target in current or target.scope == "fixed" or not origins:
                continue
            if len({origin.shape for origin in origins}) > 1:
                continue
            mean = mean_value(origins)
            # Row numbers of two tables have no mean.
            if mean.dtype == origins[0].dtype:
                current[target] = mean
    return current


def _is_current(key: Key, plan: SharingPlan, client: str) -> bool:
    """Whether the plan still gives this key to some task."""
    kind, _, rest = key.scope.partition(":")
    if kind == "task":
        return plan.key(key.name, rest, client) == key
    if kind == "group":
        members = [task for depth in plan.groups for task, path in depth.items() if path == rest]
        return any(plan.key(key.name, task, client) == key for task in members)
    return plan.key(key.name, "", client) == key
