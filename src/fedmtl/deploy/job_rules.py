"""A job is checked against the site's policy and the config of the welcome, before anything is computed.

What a server may choose from job to job is little: the weights, the seed, task weights that follow progress, and layers
that move between levels. All else a site finds in the config, and takes from there.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from fedmtl.capabilities import find
from fedmtl.config import Config, DataConfig
from fedmtl.deploy.site_worker import SiteSettings
from fedmtl.errors import FedmtlError, PolicyError
from fedmtl.experiment.population import client_settings, mode_codecs
from fedmtl.federation.client import DIGEST, Site
from fedmtl.federation.client_evaluation import scoring_settings
from fedmtl.federation.handshake import Welcome
from fedmtl.federation.messages import Job, JobKind, Update
from fedmtl.federation.policy import Policy, round_up
from fedmtl.model.lora import extended_plan
from fedmtl.runs.folder import make_private_folder, write_atomic
from fedmtl.sharing.plan import Rows, SharingPlan, is_personal, mode_plan, owner_task, used_rows
from fedmtl.tasks.batches import Shard
from fedmtl.tasks.builtin import BUILTIN
from fedmtl.tasks.tokens import open_tokens
from fedmtl.training.local import planned_steps
from fedmtl.training.local_method import LocalSettings, Step
from fedmtl.training.optimizer import batches_per_step, rate_factor

COUNTS = "counts.json"
MOST_RULES = 10_000
MOST_LETTERS = 300
# Of settings, what a server may change from round to round.
VARYING = ("loss_weights",)
# The share of a job's largest learning rate from which on a step counts; the default `step_factor` is a tenth.
LEAST_RATE = 0.0999
LEVELS = ("all", "group", "task", "client", "fixed")


class Counts(BaseModel):
    """What a site has done so far, over all runs: jobs, rounds of training, and the last round of every run.

    `configs` are digests of the welcomes that it answered.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    jobs: int = 0
    rounds: int = 0
    runs: dict[str, int] = {}
    configs: list[str] = []


class JobCounts:
    """Keeps `Counts` in the site's folder, so that a restart does not begin anew."""

    def __init__(self, folder: Path, policy: Policy) -> None:
        make_private_folder(folder)
        self._path, self._policy = folder / COUNTS, policy
        try:
            self._counts = Counts.model_validate_json(self._path.read_bytes()) if self._path.exists() else Counts()
        except (ValidationError, OSError) as error:
            raise FedmtlError(
                f"{self._path}: cannot be read, so this site does not know how many jobs it has done; restore it, or"
                " remove it to begin anew"
            ) from error

    def take_config(self, welcome: Welcome) -> None:
        """Count a welcome before its data are read; one with the same config, of whatever run, counts once."""
        said = [welcome.config, welcome.terms.labels, welcome.evaluated]
        digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
        known = self._counts.configs
        if digest in known:
            return
        if len(known) + 1 > self._policy.max_configs:
            raise PolicyError(
                f"this site has answered {len(known)} different configs; its policy allows {self._policy.max_configs}"
                " (max_configs)"
            ).coded("policy_limit")
        self._write(self._counts.model_copy(update={"configs": [*known, digest]}))

    def _write(self, counts: Counts) -> None:
        self._counts = counts
        write_atomic(self._path, counts.model_dump_json().encode())

    def take(self, run: str, job: Job) -> None:
        """Count a job before it is done; a PolicyError where there have been enough."""
        counts, policy = self._counts, self._policy
        last = counts.runs.get(run, 0)
        is_new_round = job.kind == "train" and job.round > last
        if job.kind == "train" and job.round < last - policy.repeat_rounds:
            raise PolicyError(
                f"the job is for round {job.round}, and this site has trained round {last}; a server that goes back"
                " further needs a larger repeat_rounds in the policy"
            ).coded("job_round")
        if counts.jobs + 1 > policy.max_jobs or counts.rounds + is_new_round > policy.max_rounds:
            raise PolicyError(
                f"this site has done {counts.jobs} jobs and {counts.rounds} rounds; its policy allows"
                f" {policy.max_jobs} and {policy.max_rounds}"
            ).coded("policy_limit")
        runs = {**counts.runs, run: max(last, job.round)} if job.kind == "train" else counts.runs
        changes = {"jobs": counts.jobs + 1, "rounds": counts.rounds + is_new_round, "runs": runs}
        self._write(counts.model_copy(update=changes))


@dataclass(frozen=True)
class Welcomed:
    """What a welcome made a site ready for: its run, whether sites score, both configs and the model with its data.

    `config` is the server's, of all tasks; `taken` is what this site made of it. `rows` are the token rows that the
    site uses, by kind of job.
    """

    run: str
    evaluated: bool
    config: Config
    taken: Config
    site: Site
    rows: Mapping[str, Rows | None]


class JobRules:
    """Checks the jobs of one welcome; `check` returns a job with the settings that this site computed."""

    def __init__(self, welcomed: Welcomed, settings: SiteSettings, counts: JobCounts) -> None:
        self._welcomed, self._site_settings, self._policy = welcomed, settings, settings.policy
        model, config = welcomed.site.model, welcomed.config
        self._names = list(model.canonical())
        self._plan = extended_plan(mode_plan(config), self._names, config.model)
        self._settings = client_settings(config, model.tasks, self._plan, self._names)
        self._counts = counts
        self._least = {task: _least(welcomed, settings, task) for task in settings.tasks}

    def check_hello(self) -> None:
        """Raise a PolicyError where a hello is about too few examples for a job: it lists their tokens and labels."""
        site, client = self._welcomed.site, self._site_settings.client
        for task, least in self._least.items():
            _check_count(task, num_distinct(_fingerprints(site.train_shard(client, task)), least.trained),
                         least.trained, "config")  # fmt: skip
            if self._welcomed.evaluated:
                _check_count(task, num_distinct(_fingerprints(site.validation_shard(client, task)), least.scored),
                             least.scored, "config")  # fmt: skip

    def check(self, job: Job) -> Job:
        """Return the job as this site runs it; raise a PolicyError where it breaks a rule."""
        self._check_who(job)
        self._check_plan(job.plan)
        if job.kind == "exchange":
            return replace(job, settings=self._exchanging(job))
        self._check_values(job)
        chosen = self._training(job) if job.kind == "train" else self._scoring(job)
        self._counts.take(self._welcomed.run, job)
        return replace(job, settings=chosen)

    def leaving(self, update: Update) -> Update:
        """Return the update with its counts as the policy rounds them."""
        step = self._policy.send.example_counts.round_to
        return replace(
            update,
            num_examples={task: round_up(count, step) for task, count in update.num_examples.items()},
            seen={task: round_up(count, step) for task, count in update.seen.items()},
        )

    def _check_who(self, job: Job) -> None:
        if job.kind not in get_args(JobKind):
            raise PolicyError("the job is neither for training nor for scoring").coded("message_unreadable")
        if job.client != self._site_settings.client:
            raise PolicyError(f"the job is for another client; this site is {self._site_settings.client}").coded(
                "job_client"
            )
        if (
            not job.tasks
            or len(set(job.tasks)) < len(job.tasks)
            or not set(job.tasks) <= set(self._site_settings.tasks)
        ):
            raise PolicyError("the job is for tasks that this site does not have, or no longer").coded("job_tasks")
        first, last = int(job.kind == "train"), self._welcomed.config.training.num_rounds
        if not first <= job.round <= last or not 0 <= job.state_round <= job.round:
            raise PolicyError(f"the job is for round {job.round}; rounds are {first} to {last}").coded("job_round")

    def _training(self, job: Job) -> dict[str, Any]:
        config = self._welcomed.config
        expected = self._settings.to_dict()
        if job.codecs != mode_codecs(config):
            raise PolicyError("the job wants another wire than the server's config").coded("job_settings")
        sent = job.settings
        if not isinstance(sent, dict) or set(sent) != set(expected):
            raise PolicyError("the job's settings are not those of this version").coded("job_settings")
        for key, value in expected.items():
            if key not in VARYING and _plain(value) != sent[key]:
                raise PolicyError(f"the job's {key} is not that of the server's config").coded("job_settings")
        expected["loss_weights"] = self._loss_weights(sent["loss_weights"])
        self._check_extra(job)
        self._check_examples(job, LocalSettings.from_dict(expected))
        return expected

    def _exchanging(self, job: Job) -> dict[str, Any]:
        """An exchange is of one capability of the config, and brings nothing else; examples have no part in it."""
        names = [name for name in job.extra if name in self._settings.methods]
        expected = {"methods": {name: _plain(self._settings.methods[name]) for name in names}}
        if job.weights or job.fixed or job.rows is not None or len(job.extra) != 1 or job.settings != expected:
            raise PolicyError("the job is no exchange of a capability of the server's config").coded("job_settings")
        self._check_extra(job)
        return expected

    def _loss_weights(self, sent: Any) -> dict[str, float]:
        ours = self._settings.loss_weights
        follows = self._welcomed.config.federation.task_weighting.kind == "progress"
        if not isinstance(sent, dict) or set(sent) != set(ours) or (not follows and sent != ours):
            raise PolicyError("the job's loss_weights are not those of the server's config").coded("job_settings")
        if not all(type(value) in (int, float) and 0 < value <= 1e6 for value in sent.values()):
            raise PolicyError("the job's loss_weights are no weights").coded("job_settings")
        return {task: float(value) for task, value in sent.items()}

    def _check_extra(self, job: Job) -> None:
        """Have each capability check what the server sent for it; one that the config does not switch on is refused."""
        for name, extra in job.extra.items():
            if name not in self._settings.methods:
                raise PolicyError(f"the job brings something of {name}, which is not in the server's config").coded(
                    "job_settings"
                )
            try:
                reason = find(name).check_received(extra, self._welcomed.site.model.tasks, self._settings.methods[name])
            except Exception as error:
                reason = f"the job's part of {name} cannot be read: {type(error).__name__}"
            if reason is not None:
                raise PolicyError(reason).coded("job_settings")

    def _scoring(self, job: Job) -> dict[str, Any]:
        evaluation = self._welcomed.config.evaluation
        expected = _plain(scoring_settings(evaluation, self._settings.methods))
        if not self._welcomed.evaluated or set(job.extra) - set(expected.get("methods", ())):
            raise PolicyError("the server's config scores nothing at sites").coded("job_settings")
        self._check_extra(job)
        if not self._policy.send.scores:
            raise PolicyError("the policy lets no scores leave (send.scores)").coded("policy_scores")
        if job.settings != expected:
            is_about_pairs = job.settings == {**expected, "share_pairs": True}
            raise PolicyError("the job's settings for scoring are not those of the server's config").coded(
                "policy_pairs" if is_about_pairs else "job_settings"
            )
        if evaluation.share_pairs and not self._policy.send.prediction_pairs:
            raise PolicyError("the policy lets no predictions leave next to labels (send.prediction_pairs)").coded(
                "policy_pairs"
            )
        for task in job.tasks:
            fingerprints = _fingerprints(self._welcomed.site.validation_shard(job.client, task))
            _check_count(task, num_distinct(fingerprints, self._least[task].scored), self._least[task].scored)
        return dict(expected)

    def _check_examples(self, job: Job, settings: LocalSettings) -> None:
        """Walk through the steps that the job would take, until every task has shown enough distinct examples.

        A step whose rate is far below the largest that its task has in the job leaves no trace beside that one, so its
        examples do not count.
        """
        shards = {task: self._welcomed.site.train_shard(job.client, task) for task in job.tasks}
        seen: dict[str, set[int]] = {}
        short = set(job.tasks)
        plan = list(planned_steps(shards, settings, job.seed, job.round))
        factors = _factors(plan, shards, settings, job.round)
        largest: dict[str, float] = {}
        for (task, _), factor in zip(plan, factors, strict=False):
            largest[task] = max(factor, largest.get(task, 0.0))
        for (task, batch), factor in zip(plan, factors, strict=False):
            fingerprints = seen.setdefault(task, set())
            if task not in short or factor <= 0.0 or factor < LEAST_RATE * largest[task]:
                continue
            fingerprints.update(_fingerprints(replace(shards[task], indices=batch)))
            if len(fingerprints) >= self._least[task].trained:
                short.discard(task)
            if not short:
                return
        for task, fingerprints in seen.items():
            _check_count(task, len(fingerprints), self._least[task].trained)
        if not seen:
            raise PolicyError("the job trains on nothing").coded("policy_min_examples")

    def _check_plan(self, plan: SharingPlan) -> None:
        """Let a layer move between levels of sharing, except one that stays at its client or never moves."""
        rules = plan.rules
        is_whole = len(rules) <= MOST_RULES and all(
            isinstance(word, str) and len(word) <= MOST_LETTERS for rule in rules for word in rule
        )
        if not is_whole or not all(isinstance(depth, dict) for depth in plan.groups):
            raise PolicyError("the job's sharing plan is not one").coded("job_plan")
        tasks = self._welcomed.config.tasks
        if not isinstance(plan.stopped, tuple) or not all(task in tasks for task in plan.stopped):
            raise PolicyError("the job's plan stops a task that the config does not have").coded("job_plan")
        if plan.groups != self._plan.groups:
            raise PolicyError("the job's groups of tasks are not those of the server's config").coded("job_plan")
        for name in self._names:
            ours = self._plan.level(name)
            try:
                theirs = plan.level(name)
                plan.key(name, next(iter(self._welcomed.config.tasks)), self._site_settings.client)
            except (FedmtlError, IndexError, ValueError) as error:
                raise PolicyError("the job's sharing plan does not fit the model").coded("job_plan") from error
            is_shared_head = owner_task(name) is not None and theirs not in ("task", "client", "fixed")
            if (
                theirs.partition(".")[0] not in LEVELS
                or is_shared_head
                or (ours in ("client", "fixed") and theirs != ours)
                or (theirs == "client" and ours != "client")
            ):
                raise PolicyError(f"the job has {name} at level {theirs}, the config at {ours}").coded("job_plan")

    def _check_values(self, job: Job) -> None:
        """Every value that the model needs for the job's tasks, of its shape, and no other."""
        site = self._welcomed.site
        keys = {
            key
            for view in job.plan.keys(self._names, job.tasks, job.client).values()
            for key in view.values()
            if not is_personal(key)
        }
        fixed = {key.name for key in keys if key.scope == "fixed"}
        if not isinstance(job.fixed, dict) or set(job.fixed) != fixed:
            raise PolicyError("the job's fixed values are not those of its plan").coded("job_weights")
        if not all(isinstance(digest, str) and DIGEST.fullmatch(digest) for digest in job.fixed.values()):
            raise PolicyError("the job names a fixed value by what is no digest").coded("job_weights")
        if not set(job.weights) <= keys or {key for key in keys if key.scope != "fixed"} - set(job.weights):
            raise PolicyError("the job's values are not those of its plan").coded("job_weights")
        self._check_rows(job)
        for key, value in job.weights.items():
            ours = site.initial[key.name]
            shape = list(ours.shape)
            if job.rows is not None and key.name == site.model.table and key.scope != "fixed":
                shape[0] = len(job.rows)
            if list(value.shape) != shape or value.dtype != ours.dtype:
                raise PolicyError(f"the job's {key.name} has not the shape of this model's").coded("job_weights")
        for extra in job.extra.values():
            for values in extra.tensors.values():
                if any(key not in job.weights or values[key].shape != job.weights[key].shape for key in values):
                    raise PolicyError("the job brings tensors of values that it did not bring").coded("job_weights")

    def _check_rows(self, job: Job) -> None:
        if job.rows is None:
            return
        site, rows = self._welcomed.site, np.asarray(job.rows)
        is_sliced = job.plan.level(site.model.table) not in ("client", "fixed")
        if not self._policy.send.token_rows or not is_sliced:
            raise PolicyError("the job has token rows, which this site did not tell").coded("job_weights")
        ours = self._welcomed.rows[job.kind]
        if ours is not None and np.array_equal(rows, ours):
            return
        # A site that came back with fewer tasks may get a job that was cut before.
        of = site.train_shard if job.kind == "train" else site.validation_shard
        ids = (ids for task in job.tasks for ids in of(job.client, task).used_ids())
        is_rising = bool(rows.ndim == 1 and len(rows) and rows[0] >= 0 and (np.diff(rows) > 0).all())
        is_inside = is_rising and rows[-1] < site.initial[site.model.table].shape[0]
        if not is_inside or not np.isin(used_rows(ids, site.model.pad_id), rows).all():
            raise PolicyError("the job's token rows do not hold this site's").coded("job_weights")


def _factors(plan: list[Step], shards: Mapping[str, Shard], settings: LocalSettings, number: int) -> list[float]:
    """What the learning rate is multiplied by at each batch that becomes part of a step, as in training itself."""
    width = batches_per_step(sum(len(shard) > 0 for shard in shards.values()), settings)
    steps = len(plan) // width
    return [rate_factor(settings, number - 1 + batch // width / steps) for batch in range(steps * width)]


def _plain(value: Any) -> Any:
    """A setting as JSON brings it back."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Least:
    """The fewest distinct examples of a task that a job may train on, and score."""

    trained: int
    scored: int


def _least(welcomed: Welcomed, settings: SiteSettings, task: str) -> Least:
    """Return how many examples a job must be of: `min_examples`, or all that the site has.

    What the server's config leaves of a site's file by drawing, dealing, or cutting off validation is not all of it.
    """
    site, config, wanted = welcomed.site, welcomed.taken, settings.policy.min_examples
    train, validation = site.train_shard(settings.client, task), site.validation_shard(settings.client, task)
    trained, scored = (num_distinct(_fingerprints(shard), wanted) for shard in (train, validation))
    has_file = task in settings.files
    if not has_file and (settings.root is None or BUILTIN[task].is_package_only):
        return Least(trained, scored)
    given = config.tasks[task]
    is_dealt = not has_file and (given.train_samples is not None or len(config.clients) > 1)
    if is_dealt or (not has_file and given.val_samples is not None):
        return Least(wanted if is_dealt else trained, wanted if given.val_samples is not None else scored)
    usual, found = DataConfig().validation_fraction, config.data.validation_fraction
    # Far enough for either share of them to reach what is wanted.
    every = num_distinct(chain(_fingerprints(train), _fingerprints(validation)), 20 * wanted)
    if found > usual:
        trained = min(wanted, math.floor((1 - usual) * every))
    if found < usual:
        scored = min(wanted, math.floor(usual * every))
    return Least(trained, scored)


def _check_count(task: str, found: int, least: int, what: str = "job") -> None:
    if found < least:
        raise PolicyError(
            f"the {what} would use {found} distinct examples of {task}; the policy's min_examples asks for {least}"
        ).coded("policy_min_examples", task)


def num_distinct(fingerprints: Iterable[int], most: int) -> int:
    """How many different ones there are; counted no further than `most`."""
    seen: set[int] = set()
    for each in fingerprints:
        seen.add(each)
        if len(seen) >= most:
            break
    return len(seen)


def _fingerprints(shard: Shard) -> Iterator[int]:
    """One number for the tokens of each example: two that look alike to the model count once."""
    parts = open_tokens(shard.tokens).parts
    for index in shard.indices:
        yield hash(tuple(part.ids[part.offsets[index] : part.offsets[index + 1]].tobytes() for part in parts))
