"""Several clients of one machine that train at once: Jobs in, Updates out, as from each client by itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial

import torch

from fedmtl.errors import FedmtlError
from fedmtl.federation.client import Opened, Site, close_job, open_job, out_of_memory
from fedmtl.federation.messages import Job, Traffic, Update
from fedmtl.model.keys import is_personal
from fedmtl.training.local import TrainingFailed
from fedmtl.training.stacked.loop import Outcome, Stacks, train_stack
from fedmtl.training.stacked.plan import Member
from fedmtl.training.stacked.shape import stacks_with

Answer = Update | FedmtlError


def stack_label(job: Job, site: Site) -> str | None:
    """What jobs of one stack have in common; None for one that must be run by itself."""
    keeps = bool(job.settings.get("keep_optimizer"))
    if job.kind != "train" or keeps:
        return None
    return stacks_with(site.model, job.tasks, job.plan.keys(site.model.canonical(), job.tasks, job.client))


def run_stack(jobs: Sequence[Job], site: Site, stacks: Stacks, threads: Executor) -> list[Answer]:
    """Train the clients of jobs that have a label in common; an answer or a reason for each."""
    started = time.perf_counter()
    opened = list(threads.map(lambda job: _open(job, site), jobs))
    there = [(job, own) for job, own in zip(jobs, opened, strict=True) if isinstance(own, Opened)]
    outcomes = iter(_train(there, site, stacks)) if there else iter(())
    seconds = (time.perf_counter() - started) / max(1, len(jobs))
    results = [next(outcomes) if isinstance(own, Opened) else own for own in opened]
    return list(threads.map(partial(_answer, site, seconds), jobs, opened, results))


def _open(job: Job, site: Site) -> Opened | FedmtlError:
    try:
        return open_job(job, site)
    except FedmtlError as error:
        return error


def _train(there: Sequence[tuple[Job, Opened]], site: Site, stacks: Stacks) -> list[Outcome | FedmtlError]:
    """All at once, or in halves where there is no memory for that."""
    try:
        return list(train_stack(stacks, *_members(there, site), there[0][1].settings, round_number=there[0][0].round))
    except torch.OutOfMemoryError:
        stacks.made.clear()
        torch.cuda.empty_cache()
    if len(there) == 1:
        return [TrainingFailed(out_of_memory(there[0][0]))]
    half = len(there) // 2
    return [*_train(there[:half], site, stacks), *_train(there[half:], site, stacks)]


def _members(there: Sequence[tuple[Job, Opened]], site: Site) -> tuple[list[Member], list[dict[str, torch.Tensor]]]:
    members, values = [], []
    for job, opened in there:
        [task] = job.tasks
        keys = job.plan.keys(site.model.canonical(), job.tasks, job.client)[task]
        members.append(Member(job.client, site.model.tasks[task], opened.shards[task], job.seed, keys, job.rows))
        values.append({name: opened.values[key] for name, key in keys.items()})
    return members, values


def _answer(
    site: Site, seconds: float, job: Job, opened: Opened | FedmtlError, outcome: Outcome | FedmtlError
) -> Answer:
    if isinstance(opened, FedmtlError):
        return opened
    if isinstance(outcome, FedmtlError):
        return outcome
    if isinstance(outcome.trained, TrainingFailed):
        return outcome.trained
    [task] = job.tasks
    keys = job.plan.keys(site.model.canonical(), job.tasks, job.client)[task]
    personal = {
        key: outcome.after[name] if name in outcome.after else opened.values[key]
        for name, key in keys.items()
        if is_personal(key)
    }
    delta = {
        key: outcome.delta[name] if name in outcome.delta else torch.zeros_like(opened.values[key])
        for name, key in keys.items()
        if key not in personal and key.scope != "fixed"
    }
    update = close_job(job, site, opened, delta, personal, outcome.trained)
    return replace(update, traffic=Traffic(seconds=seconds))
