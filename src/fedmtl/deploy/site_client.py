"""A site that takes part: its examples, its model, and its answers to the server's welcome and jobs."""

from __future__ import annotations

import os
import secrets
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedmtl import __version__
from fedmtl.config import Config
from fedmtl.deploy.final_model import FinalSite, save_final_model
from fedmtl.deploy.job_rules import JobCounts, JobRules, Welcomed
from fedmtl.deploy.site_check import CheckCall, check_site
from fedmtl.deploy.site_config import all_tasks, site_config, welcomed_config
from fedmtl.deploy.site_worker import SiteSettings
from fedmtl.deploy.terms import site_terms
from fedmtl.engines.flower.calls import Done, ModelCall, Refused, SiteJob, WelcomeCall
from fedmtl.engines.flower.certificates import read_private_key
from fedmtl.engines.flower.peers import PEERS, SiteIdentity
from fedmtl.engines.local import map_message, write_message
from fedmtl.engines.site import SiteSetup, open_site
from fedmtl.errors import DataError, FedmtlError, HubUnreachable, PolicyError, WireError
from fedmtl.experiment.population import ClientInfos, Population, build_population
from fedmtl.federation.client import Site, run_job
from fedmtl.federation.faults import fault_of
from fedmtl.federation.handshake import Hello, TaskCounts, Welcome, labels_digest, version_only
from fedmtl.federation.messages import ClientInfo, Job, Update
from fedmtl.federation.policy import round_up
from fedmtl.federation.wire import MAX_BYTES, decode_job, encode_update
from fedmtl.methods.distillation import open_teacher
from fedmtl.model.device import pick_device
from fedmtl.model.encoder import Encoder
from fedmtl.model.multitask import open_model
from fedmtl.runs.folder import make_private_folder
from fedmtl.sharing.plan import Rows
from fedmtl.tasks.batches import Shard
from fedmtl.tasks.load import TaskData, load_tasks
from fedmtl.tasks.task import Task


@dataclass(frozen=True)
class _Opened:
    """What a welcome led to."""

    words: str
    site: Site
    rules: JobRules
    max_bytes: int
    hello: str
    encoder: Encoder
    config: Config
    settings: SiteSettings

    def final(self) -> FinalSite:
        """What the finished model is checked against, and saved with."""
        return FinalSite(self.site, self.encoder, self.config, self.settings, self.max_bytes)


class JoinedSite:
    """Answers calls; what a welcome needs is loaded once, for as long as the server says the same.

    Whatever goes wrong is an answer too: its words are for this site's terminal, its fault is for the server.
    """

    def __init__(self, settings: SiteSettings) -> None:
        self._settings = settings
        self._opened: _Opened | None = None

    def __call__(self, call: Any) -> Any:
        try:
            if isinstance(call, CheckCall):
                return check_site(self._settings)
            if isinstance(call, ModelCall):
                return save_final_model(self._open(call.words, None).final(), call)
            return self._welcomed(call.words) if isinstance(call, WelcomeCall) else self._done(call)
        except FedmtlError as error:
            return Refused(fault_of(error), str(error))
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(last.filename).name}, line {last.lineno}"
            return Refused(fault_of(error), f"{type(error).__name__}: {error} ({where})")

    def _welcomed(self, words: str) -> str:
        welcome = _read(words)
        if welcome.terms.version != __version__:
            return version_only(self._settings.client).model_dump_json()
        return self._open(words, welcome).hello

    def _done(self, call: SiteJob) -> Done:
        began = time.perf_counter()
        opened = self._open(call.words, None)
        job = opened.rules.check(decode_job(map_message(call.frame), opened.max_bytes))
        path = call.frame.with_suffix(".update")
        update = run_job(job, opened.site)
        write_message(path, encode_update(opened.rules.leaving(update)))
        return Done(path, _job_line(job, update, time.perf_counter() - began))

    def _open(self, words: str, welcome: Welcome | None) -> _Opened:
        if self._opened is None or self._opened.words != words:
            self._opened = None
            self._opened = _open(words, welcome or _read(words), self._settings)
        return self._opened


def _job_line(job: Job, update: Update, seconds: float) -> str:
    """What this site did in a round, for its terminal."""
    if job.kind == "exchange":
        return f"round {job.round}: answered an exchange of {', '.join(job.extra)} ({seconds:.1f} s)"
    if job.kind == "evaluate":
        return f"round {job.round}: scored {', '.join(job.tasks)} ({seconds:.1f} s)"
    losses = [f"{task} loss {update.losses[task]:.3f}" if task in update.losses else task for task in update.tasks]
    return f"round {job.round}: trained {', '.join(losses)} ({seconds:.1f} s)"


def _read(words: str) -> Welcome:
    try:
        return Welcome.model_validate_json(words)
    except ValidationError as error:
        raise WireError("the server's welcome cannot be read; it may be of another version") from error


def _open(words: str, welcome: Welcome, settings: SiteSettings) -> _Opened:
    server_side = welcomed_config(welcome)
    config = site_config(server_side, settings)
    counts = JobCounts(settings.folder, settings.policy)
    counts.take_config(welcome)
    data = _load(config)
    site_tasks = {name: part.task for name, part in data.items()}
    tasks = all_tasks(server_side, site_tasks)
    plain = config.compute.encoder == "plain"
    weighed = config.training.loss_weighting == "uncertainty"
    encoder, model = open_model(config.model, tasks, config.seed, plain=plain, log_variances=weighed)
    device = str(pick_device(settings.device, "--device"))
    population = build_population(config, data, encoder.tokenizer, open_teacher(config, "clients", site_tasks, device))
    terms = site_terms(model, encoder.tokenizer)
    info = ClientInfos(population, model.pad_id, evaluated=welcome.evaluated)[settings.client]
    max_bytes = min(welcome.max_bytes, MAX_BYTES)
    setup = SiteSetup(
        model=config.model,
        seed=config.seed,
        tasks=tasks,
        train=population.train,
        validation=population.validation,
        shared_validation=population.shared_validation,
        folder=run_folder(settings.folder, welcome.run),
        spool=settings.spool,
        device=device,
        plain_encoder=plain,
        max_bytes=max_bytes,
        log_variances=weighed,
        secret=site_secret(settings.folder),
        required=settings.policy.require.model_dump(exclude_none=True),
        counts_to=settings.policy.send.example_counts.round_to,
        sends_losses=settings.policy.sends_losses,
    )
    site = replace(open_site(setup, model), identity=_identity(settings))
    rows = {"train": info.rows, "evaluate": info.evaluation_rows}
    rules = JobRules(Welcomed(welcome.run, welcome.evaluated, server_side, config, site, rows), settings, counts)
    rules.check_hello()
    # Where no slices are cut, nobody needs to know the site's words.
    tells_rows = settings.policy.send.token_rows and server_side.federation.vocabulary_slices
    hello = Hello(
        client=settings.client,
        terms=terms,
        tasks=_task_summaries(population, info, site_tasks, settings),
        rows=_listed(info.rows) if tells_rows else None,
        evaluation_rows=_listed(info.evaluation_rows) if tells_rows else None,
        wants_model=settings.save_model is not None,
    )
    return _Opened(words, site, rules, max_bytes, hello.model_dump_json(), encoder, config, settings)


def _identity(settings: SiteSettings) -> SiteIdentity | None:
    """Who this site is to the others; without a key, on loopback, it is nobody."""
    required = settings.policy.require.secure_aggregation
    peers = {} if required is None else required.peers
    if settings.key is None:
        if peers:
            raise PolicyError(
                "require.secure_aggregation.peers: without keys there are none to compare; give --ca and --key"
            ).coded("policy_protection")
        return None
    return SiteIdentity(read_private_key(settings.key), settings.folder / PEERS, peers)


def _load(config: Config) -> dict[str, TaskData]:
    """Load the site's examples; where the hub has to be reached and is not, the remedy is an option of this command."""
    try:
        return load_tasks(config)
    except HubUnreachable as error:
        raise DataError(f"{error.found}; write `--data {error.task}=FILE`").coded(error.code, error.task) from error


SECRET = "secret"
SECRET_BYTES = 32


def site_secret(folder: Path) -> bytes:
    """What this site draws noise from: made once, readable for its owner alone, and never sent.

    A site that lost it draws other noise, and counts jobs that it has answered before once more.
    """
    make_private_folder(folder)
    path = folder / SECRET
    if not path.exists():
        fresh = path.with_name(f"{SECRET}.{os.getpid()}")
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
        fresh.replace(path)
    found = path.read_bytes()
    if len(found) != SECRET_BYTES:
        raise FedmtlError(f"{path}: is not the {SECRET_BYTES} bytes that this site wrote; restore it, or remove it")
    return found


def run_folder(folder: Path, run: str) -> Path:
    """Where the site keeps what belongs to a run; a name that leads elsewhere is refused, whoever let it through."""
    path = folder / run
    if path.resolve().parent != folder.resolve():
        raise PolicyError("the server's name for its run is no name of a folder").coded("message_unreadable")
    return path


def _listed(rows: Rows | None) -> list[int] | None:
    return None if rows is None else rows.tolist()


def _task_summaries(
    population: Population, info: ClientInfo, tasks: Mapping[str, Task], settings: SiteSettings
) -> dict[str, TaskCounts]:
    """Count the site's examples, rounded up as the policy says, so that what is counted later is never more."""
    send = settings.policy.send
    step, counts = send.example_counts.round_to, send.label_counts
    windows = {name: shard.num_windows() for name, shard in population.train[settings.client].items()}
    return {
        name: TaskCounts(
            examples=round_up(len(shard), step),
            validation=round_up(info.num_validation[name], step),
            tokens=round_up(info.num_tokens[name], step),
            truncated=round_up(population.truncated[name], step),
            windowed=round_up(windows[name][0], step),
            windows=round_up(windows[name][1], step),
            labels=[round_up(count, counts.round_to) for count in (_counts(tasks[name], shard) if counts.send else ())],
            label_list=labels_digest(tasks[name].labels),
        )
        for name, shard in population.train[settings.client].items()
    }


def _counts(task: Task, shard: Shard) -> list[int]:
    return task.kind_of.counts(task, shard.labels[shard.indices])
