"""A site that takes part: its examples, its model, and its answers to the server's welcome and jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedmtl import __version__
from fedmtl.config import ClientConfig, Config
from fedmtl.config.checks import check_config
from fedmtl.config.errors import to_config_error
from fedmtl.engines.flower.site_service import SiteJob, WelcomeCall
from fedmtl.engines.site import SiteSetup, open_site
from fedmtl.engines.spool import map_message, write_message
from fedmtl.errors import ConfigError, FedmtlError
from fedmtl.experiment.agreement import own_terms
from fedmtl.experiment.census import label_counts
from fedmtl.experiment.deployed_tasks import configured_tasks, known_task
from fedmtl.experiment.population import ClientInfos, Population, build_population
from fedmtl.experiment.site_worker import SiteSettings
from fedmtl.experiment.teacher import open_teacher
from fedmtl.federation.client import Site, run_job
from fedmtl.federation.handshake import Held, Hello, Welcome, version_only
from fedmtl.federation.messages import ClientInfo, Job
from fedmtl.federation.wire import decode_job, encode_update
from fedmtl.model.device import pick_device
from fedmtl.model.multitask import open_model
from fedmtl.tasks.load import load_tasks
from fedmtl.tasks.membership import own_sources
from fedmtl.tasks.task import Task


@dataclass(frozen=True)
class _Opened:
    """What a welcome led to."""

    words: str
    site: Site
    max_bytes: int
    hello: str


class JoinedSite:
    """Answers calls; what a welcome needs is loaded once, for as long as the server says the same."""

    def __init__(self, settings: SiteSettings) -> None:
        self._settings = settings
        self._opened: _Opened | None = None

    def __call__(self, call: Any) -> Any:
        if isinstance(call, WelcomeCall):
            return self._welcomed(call.words)
        assert isinstance(call, SiteJob)
        return self._done(call)

    def _welcomed(self, words: str) -> str:
        try:
            welcome = Welcome.model_validate_json(words)
        except ValidationError as error:
            raise FedmtlError("the server's welcome cannot be read; it may be of another version") from error
        if welcome.terms.version != __version__:
            return version_only(self._settings.client).model_dump_json()
        return self._open(words, welcome).hello

    def _done(self, call: SiteJob) -> Path:
        opened = self._open(call.words, None)
        job = decode_job(map_message(call.frame), opened.max_bytes)
        self._check(job)
        path = call.frame.with_suffix(".update")
        write_message(path, encode_update(run_job(job, opened.site)))
        return path

    def _check(self, job: Job) -> None:
        if job.client != self._settings.client:
            raise FedmtlError(f"the job is for {job.client}; this site is {self._settings.client}")
        strange = set(job.tasks) - set(self._settings.tasks)
        if strange:
            raise FedmtlError(f"the job is for {', '.join(sorted(strange))}, which this site no longer has")

    def _open(self, words: str, welcome: Welcome | None) -> _Opened:
        if self._opened is None or self._opened.words != words:
            self._opened = None
            self._opened = _open(words, welcome or Welcome.model_validate_json(words), self._settings)
        return self._opened


def _open(words: str, welcome: Welcome, settings: SiteSettings) -> _Opened:
    config = site_config(_checked(welcome.config), settings)
    data = load_tasks(config)
    own = {name: part.task for name, part in data.items()}
    tasks = _all_tasks(_checked(welcome.config), own, welcome.terms.labels)
    plain = config.compute.encoder == "plain"
    weighed = config.training.loss_weighting == "uncertainty"
    encoder, model = open_model(config.model, tasks, config.seed, plain=plain, log_variances=weighed)
    device = str(pick_device(settings.device, "--device"))
    population = build_population(config, data, encoder.tokenizer, open_teacher(config, "clients", own, device))
    terms = own_terms(model, encoder.tokenizer, own)
    info = ClientInfos(population, model.pad_id, evaluated=welcome.evaluated)[settings.client]
    setup = SiteSetup(
        model=config.model,
        seed=config.seed,
        tasks=tasks,
        train=population.train,
        validation=population.validation,
        shared_validation=population.shared_validation,
        folder=settings.folder / welcome.run,
        spool=settings.spool,
        device=device,
        plain_encoder=plain,
        max_bytes=welcome.max_bytes,
        log_variances=weighed,
    )
    hello = Hello(
        client=settings.client,
        terms=terms,
        tasks=_held(population, info, own, settings),
        rows=None if info.rows is None else info.rows.tolist(),
        evaluation_rows=None if info.evaluation_rows is None else info.evaluation_rows.tolist(),
    )
    return _Opened(words, open_site(setup, model), welcome.max_bytes, hello.model_dump_json())


def site_config(config: Config, settings: SiteSettings) -> Config:
    """The server's config as far as it concerns this site, with the site's own files, encoder and cache."""
    for name in settings.tasks:
        if name not in config.tasks:
            raise ConfigError(f"--tasks: found {name}, the server's tasks are {', '.join(config.tasks)}")
    tasks = {name: config.tasks[name] for name in config.tasks if name in settings.tasks}
    changes: dict[str, Any] = {"tasks": tasks, "clients": _clients(config, settings)}
    if settings.model is not None:
        model = {"server_model": settings.model, "client_model": None}
        changes["model"] = config.model.model_copy(update=model)
    if settings.root is not None:
        changes["data"] = config.data.model_copy(update={"root": settings.root, "source": "files"})
    for name in settings.files:
        # Its own files are all it has: what the task's source names is somewhere else.
        tasks[name] = tasks[name].model_copy(update={"source": None})
    return config.model_copy(update=changes)


def _clients(config: Config, settings: SiteSettings) -> dict[str, ClientConfig]:
    """This client with its files, and the others among whom the rest of the examples are dealt."""
    dealt = [task for task in settings.tasks if task not in settings.files]
    configured = configured_tasks(config)
    mine = configured.get(settings.client, ())
    for task in dealt:
        if settings.root is None and (task not in mine or settings.client in own_sources(config, task)):
            raise ConfigError(
                f"--data: found nothing for {task}, and the server's config deals {settings.client} none of it;"
                f" write `--data {task}=FILE`"
            )
    sharing: dict[str, list[str]] = {}
    for client, held in configured.items() if set(dealt) <= set(mine) else ():
        others = [task for task in held if task in dealt and client not in own_sources(config, task)]
        if client != settings.client and others:
            sharing[client] = others
    sharing[settings.client] = [task for task in config.tasks if task in settings.tasks]
    # In the config's order: examples are dealt by it.
    order = dict.fromkeys([*(name for name in config.clients or configured if name in sharing), *sharing])
    return {
        name: ClientConfig.model_validate(
            {"tasks": sharing[name], "source": dict(settings.files) if name == settings.client else {}}
        )
        for name in order
    }


def _all_tasks(config: Config, own: Mapping[str, Task], labels: Mapping[str, list[str]]) -> dict[str, Task]:
    """Every task of the run: the model's shape depends on all, also on those that this site has no examples of."""
    return {name: own[name] if name in own else known_task(config, name, labels.get(name, ())) for name in config.tasks}


def _held(
    population: Population, info: ClientInfo, tasks: Mapping[str, Task], settings: SiteSettings
) -> dict[str, Held]:
    return {
        name: Held(
            examples=len(shard),
            validation=info.num_validation[name],
            tokens=info.num_tokens[name],
            truncated=population.truncated[name],
            labels=label_counts(tasks[name], shard.labels[shard.indices]),
        )
        for name, shard in population.train[settings.client].items()
    }


def _checked(told: Mapping[str, Any]) -> Config:
    try:
        config = Config.model_validate(told)
    except ValidationError as error:
        raise to_config_error(error, dict(told)) from error
    check_config(config)
    return config
