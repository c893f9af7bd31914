"""Several clients of one machine that train at once: Jobs in, Updates out, as from each client by itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial

import torch

from fedmtl.capabilities import is_stackable, stacked_methods
from fedmtl.errors import FedmtlError
from fedmtl.federation.client import Opened, Site, close_job, open_job, optimizer_slots, out_of_memory
from fedmtl.federation.messages import Job, Traffic, Update
from fedmtl.sharing.plan import is_personal
from fedmtl.training.local import TrainingFailed
from fedmtl.training.stacked.loop import Stacks, train_stack
from fedmtl.training.stacked.outcomes import Outcome
from fedmtl.training.stacked.plan import Member, named_state
from fedmtl.training.stacked.shape import reached, stacks_with

Answer = Update | FedmtlError


def stack_label(job: Job, site: Site) -> str | None:
    """What jobs of one stack have in common; None for one that must be run by itself."""
    if job.kind != "train" or not is_stackable(job.settings["methods"], len(job.tasks)):
        return None
    views = job.plan.keys(site.model.canonical(), job.tasks, job.client)
    label = stacks_with(site.model, job.tasks, views, job.plan)
    if label is None or len(job.tasks) == 1:
        return label
    # Of several tasks a step is of one, another one at each client.
    knows_order = job.settings["task_schedule"] not in ("joint", "epoch")
    return f"{job.client}/{label}" if knows_order else None


def run_stack(jobs: Sequence[Job], site: Site, stacks: Stacks, threads: Executor) -> list[Answer | None]:
    """Train the clients of jobs that have a label in common; an answer or a reason for each.

    None is of one that must be run by itself after all: what it saved of its optimizer does not fit a stack.
    """
    started = time.perf_counter()
    entered = list(threads.map(lambda job: _enter(job, site), jobs))
    there = [entry for entry in entered if isinstance(entry, _Entered)]
    outcomes = iter(_train(there, stacks)) if there else iter(())
    seconds = (time.perf_counter() - started) / max(1, len(jobs))
    results = [next(outcomes) if isinstance(entry, _Entered) else entry for entry in entered]
    return list(threads.map(partial(_answer, site, seconds), entered, results))


@dataclass(frozen=True)
class _Entered:
    """A job with what its client has at hand."""

    job: Job
    opened: Opened
    member: Member


def _enter(job: Job, site: Site) -> _Entered | FedmtlError | None:
    try:
        opened = open_job(job, site)
    except FedmtlError as error:
        return error
    views = job.plan.keys(site.model.canonical(), job.tasks, job.client)
    keys = {name: key for view in views.values() for name, key in view.items()}
    fixed = frozenset(name for name, key in keys.items() if not job.plan.trains(key))
    trained = [name for task, view in views.items() for name in reached(site.model, task, view, fixed)]
    saved = named_state(optimizer_slots(opened), keys, trained)
    if saved is None:
        return None
    tasks = tuple(site.model.tasks[task] for task in job.tasks)
    member = Member(job.client, tasks, opened.shards, job.seed, keys, job.rows, saved, job.extra, fixed)
    try:
        for method in stacked_methods(opened.settings.methods):
            member = method.enter(member, site.model, opened.settings, job.round, opened.methods.release)
    except FedmtlError as error:
        return error
    return _Entered(job, opened, member)


def _train(there: Sequence[_Entered], stacks: Stacks) -> list[Outcome | FedmtlError]:
    """All at once, or in halves where there is no memory for that."""
    first = there[0]
    members = [entry.member for entry in there]
    values = [{name: entry.opened.values[key] for name, key in entry.member.keys.items()} for entry in there]
    try:
        return list(train_stack(stacks, members, values, first.opened.settings, round_number=first.job.round))
    except torch.OutOfMemoryError:
        stacks.made.clear()
        torch.cuda.empty_cache()
    if len(there) == 1:
        return [TrainingFailed(out_of_memory(first.job))]
    half = len(there) // 2
    return [*_train(there[:half], stacks), *_train(there[half:], stacks)]


def _answer(
    site: Site, seconds: float, entered: _Entered | FedmtlError | None, outcome: Outcome | FedmtlError | None
) -> Answer | None:
    if not isinstance(entered, _Entered):
        return entered
    if not isinstance(outcome, Outcome):
        return outcome
    if isinstance(outcome.trained, TrainingFailed):
        return outcome.trained
    keys, before = entered.member.keys, entered.opened.values
    personal = {
        key: outcome.after[name] if name in outcome.after else before[key]
        for name, key in keys.items()
        if is_personal(key)
    }
    delta = {
        key: outcome.delta[name] if name in outcome.delta else torch.zeros_like(before[key])
        for name, key in keys.items()
        if key not in personal and name not in entered.member.fixed
    }
    try:
        update = close_job(entered.job, site, entered.opened, delta, personal, outcome.trained)
    except FedmtlError as error:
        return error
    return replace(update, traffic=Traffic(seconds=seconds))
