"""One config becomes everything a run needs before its first round.

That includes where it computes: the device, the worker processes, and how many clients train at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from fedmtl.capabilities import aggregator, check_methods, plugin_modules, server_methods
from fedmtl.config import Config
from fedmtl.config.file import Explained
from fedmtl.engines.local import LocalEngine
from fedmtl.engines.processes import warm_up
from fedmtl.engines.site import SiteSetup
from fedmtl.engines.stacked import StackedEngine
from fedmtl.engines.start_up import num_workers, worker_imports
from fedmtl.errors import ConfigError
from fedmtl.experiment.baselines import Sample, draw_samples
from fedmtl.experiment.population import (
    ClientInfos,
    Population,
    build_population,
    client_settings,
    mode_active_tasks,
    mode_codecs,
    mode_data,
    mode_federation,
)
from fedmtl.federation.aggregators.by_scope import check_patterns, combined_scopes
from fedmtl.federation.client import fixed_digest
from fedmtl.federation.dispatch import ServerSettings
from fedmtl.federation.messages import ClientId, ClientInfo, State
from fedmtl.federation.server_method import ServerSetup
from fedmtl.methods.distillation import open_teacher
from fedmtl.model.device import pick_device
from fedmtl.model.encoder import Encoder
from fedmtl.model.lora import extended_plan
from fedmtl.model.multitask import MultiTaskModel, open_model
from fedmtl.model.saved import start_weights
from fedmtl.runs.event_lines import Observer
from fedmtl.runs.events import WarningEvent
from fedmtl.runs.folder import RunFolder
from fedmtl.sharing.plan import check_plan, mode_plan
from fedmtl.sharing.weights import initial_weights
from fedmtl.tasks.check import run_warnings
from fedmtl.tasks.load import TaskData, count_examples, fingerprint, load_tasks
from fedmtl.tasks.task import Task
from fedmtl.training.stacked.shape import clients_at_once

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Compute:
    """`stack` clients train as one computation in `precision`; 0 where each trains by itself."""

    device: str
    workers: int
    stack: int = 0
    precision: str = "fp32"


def choose_device(config: Config) -> str:
    return str(pick_device(config.compute.device, "compute.device"))


def choose_compute(config: Config, device: str, model: MultiTaskModel, num_clients: int) -> Compute:
    """Choose where and how to compute: what the config says, and what suits the machine where it says nothing."""
    workers = num_workers(config.compute, device, num_clients)
    requested = config.compute.stack
    if requested and workers:
        raise ConfigError(f"compute.stack: {requested} clients at once train in one process; write `workers: 0`")
    if requested and model.layout is None:
        raise ConfigError("compute.stack: only plain encoders laid out as BERT can be stacked; write `stack: 0`")
    precision = config.compute.precision
    if precision == "auto":
        precision = "bf16" if device != "cpu" and torch.cuda.is_bf16_supported() else "fp32"
    stack = 0 if requested is None and (workers or device == "cpu") else requested
    if stack is None:
        free, _ = torch.cuda.mem_get_info(device)
        largest = max(map(config.batch_size_of, config.tasks))
        windows = 1 if config.model.windows is None else config.model.windows.most
        stack = clients_at_once(model, largest * windows, config.model.max_length, free, DTYPES[precision])
    if stack == 0:
        if config.compute.precision == "bf16":
            raise ConfigError("compute.precision: bf16 is for clients that train at once; write `stack: 1` or more")
        precision = "fp32"
    return Compute(device, workers, min(stack, num_clients), precision)


@dataclass(frozen=True)
class Prepared:
    """A run that can start: its data (counts and labels; the texts are tokens now), model, settings and state.

    `samples` are the texts that baselines are fitted to in the end. `fingerprints` are of each task's examples where
    this process read them; those of sites are not here.
    """

    config: Config
    data: dict[str, TaskData]
    population: Population
    clients: Mapping[str, ClientInfo]
    encoder: Encoder
    model: MultiTaskModel
    server: ServerSettings
    state: State
    compute: Compute
    evaluates_at_clients: bool
    profile: bool = False
    samples: Mapping[str, Sample] = field(default_factory=dict)
    fingerprints: Mapping[str, dict[str, str]] = field(default_factory=dict)

    @property
    def tasks(self) -> dict[str, Task]:
        return {name: part.task for name, part in self.data.items()}


def settled(explained: Explained) -> tuple[Explained, dict[str, TaskData]]:
    """A config of a run on this machine with the settings that follow its examples, and these examples."""
    data = load_tasks(explained.config)
    return explained.with_examples(count_examples(data)), data


def prepare(
    config: Config, observe: Observer = lambda event: None, data: Mapping[str, TaskData] | None = None
) -> Prepared:
    """Load, check and build everything; no folder is made, so a mistake leaves nothing behind.

    `data` are the config's examples where they are loaded already.
    """
    device = start_device(config)
    loaded = dict(data) if data is not None else load_tasks(config)
    fingerprints = {name: fingerprint(part) for name, part in loaded.items()}
    data = mode_data(config, loaded)
    for words in run_warnings(data):
        observe(WarningEvent(words=words))
    teacher = open_teacher(config, "clients", {name: part.task for name, part in data.items()}, device, observe)
    prepared = assemble(
        config,
        data,
        device,
        lambda tokenizer: build_population(config, data, tokenizer, teacher),
        partial(mode_active_tasks, config),
        observe,
    )
    return replace(prepared, samples=draw_samples(config, data), fingerprints=fingerprints)


def start_device(config: Config) -> str:
    """The device that trains and scores; its workers begin to load."""
    device = choose_device(config)
    if num_workers(config.compute, device, num_clients=2):
        warm_up(worker_imports(config))
    return device


def assemble(
    config: Config,
    data: dict[str, TaskData],
    device: str,
    populate: Callable[[Any], Population],
    active: Callable[[ClientId, int], tuple[str, ...]],
    observe: Observer = lambda event: None,
    secret: bytes | None = None,
) -> Prepared:
    """The model, the server's settings and the first state of a config whose tasks are loaded.

    `secret` is a deployed server's; a simulation has none.
    """
    check_methods(config)
    tasks = {name: part.task for name, part in data.items()}
    plain = config.compute.encoder == "plain"
    weighed = config.training.loss_weighting == "uncertainty"
    encoder, model = open_model(config.model, tasks, config.seed, plain=plain, log_variances=weighed)
    plan = extended_plan(mode_plan(config), list(model.canonical()), config.model)
    check_plan(plan, list(model.canonical()))
    at_clients = _evaluates_at_clients(config, [plan.level(name) for name in model.canonical()])
    population = populate(encoder.tokenizer)
    if at_clients and any(part.further for part in data.values()):
        data, population = _without_further(config, data, population)
    weights = initial_weights(model, plan)
    in_averaging = config.training.task_weight_in == "averaging"
    settings, federation = client_settings(config, tasks, plan, list(model.canonical())), mode_federation(config)
    adaptive = config.sharing.adaptive is not None
    check_patterns(federation.aggregation, combined_scopes(plan, list(model.canonical()), list(tasks), adaptive))
    holders = {task: [each for each in population.train if task in population.train.tasks_of(each)] for task in tasks}
    known = holders if len(population.train) else None

    def most_examples(task: str) -> int:
        return max((len(population.train[each][task]) for each in holders[task]), default=0)

    largest = None if known is None else most_examples
    setup = ServerSetup(config, tasks, encoder, model, plan, settings, device, observe, secret, known, largest)
    server = ServerSettings(
        tasks=tasks,
        names=tuple(model.canonical()),
        table=model.table,
        active_tasks=active,
        federation=federation,
        evaluation=config.evaluation,
        settings=settings,
        task_weights={name: task.weight if in_averaging else 1.0 for name, task in tasks.items()},
        seed=config.seed,
        codecs=mode_codecs(config),
        known=frozenset(fixed_digest(key, value) for key, value in weights.items() if key.scope == "fixed"),
        weight_in=config.training.task_weight_in,
        methods=server_methods(setup),
        aggregator=aggregator(config, federation.aggregation),
    )
    return Prepared(
        config=config,
        data={name: _without_texts(part) for name, part in data.items()},
        population=population,
        clients=ClientInfos(population, model.pad_id, evaluated=at_clients),
        encoder=encoder,
        model=model,
        server=server,
        state=State(0, start_weights(config.model, weights, plan, model), plan),
        compute=choose_compute(config, device, model, len(population.train)),
        evaluates_at_clients=at_clients,
    )


def open_engine(prepared: Prepared, run: RunFolder) -> LocalEngine | StackedEngine:
    """The engine of a prepared run, with its workers started."""
    setup, compute = site_setup(prepared, run), prepared.compute
    if compute.stack:
        return StackedEngine(setup, prepared.clients, compute.stack, DTYPES[compute.precision])
    return LocalEngine(setup, prepared.clients, compute.workers)


def site_setup(prepared: Prepared, run: RunFolder) -> SiteSetup:
    """What a process needs to be any client of the run."""
    return SiteSetup(
        model=prepared.config.model,
        seed=prepared.config.seed,
        tasks=prepared.tasks,
        train=prepared.population.train.stored(run.spool / "shards"),
        validation=prepared.population.validation,
        shared_validation=prepared.population.shared_validation,
        folder=run.clients,
        spool=run.spool,
        device=prepared.compute.device,
        plain_encoder=prepared.config.compute.encoder == "plain",
        max_bytes=prepared.config.wire.max_bytes,
        log_variances=prepared.config.training.loss_weighting == "uncertainty",
        plugins=_importable(prepared),
        profile=prepared.profile,
    )


def _importable(prepared: Prepared) -> tuple[str, ...]:
    """The modules of other packages' capabilities, which workers import before their first job."""
    modules = plugin_modules()
    if "__main__" in modules and prepared.compute.workers:
        raise ConfigError(
            "compute.workers: a capability is registered in the script itself, which workers cannot import; put it into"
            " a module, or write `workers: 0`"
        )
    return tuple(module for module in modules if module != "__main__")


def _without_texts(part: TaskData) -> TaskData:
    """Drop the texts: once tokenized they are not needed again, and would cost memory as long as the run lasts."""
    return replace(
        part,
        train=replace(part.train, texts=(), column=None),
        validation=replace(part.validation, texts=()),
        further={name: replace(examples, texts=()) for name, examples in part.further.items()},
        client_train={},
        client_validation={},
    )


def _without_further(
    config: Config, data: dict[str, TaskData], population: Population
) -> tuple[dict[str, TaskData], Population]:
    """Leave out further validation sets where clients evaluate; one that was named is a ConfigError."""
    for name, task in config.tasks.items():
        if task.source is not None and (task.source.more_validation or task.source.more_validation_splits):
            raise ConfigError(
                f"tasks.{name}.source.more_validation: is scored at a server, and here clients evaluate; remove it, or"
                " write `evaluation.where: server`"
            )
    left = {
        name: replace(part, further={}, origin=f"{part.origin}; {', '.join(part.further)} is for a server to score")
        if part.further
        else part
        for name, part in data.items()
    }
    shared = {name: shard for name, shard in population.shared_validation.items() if name in data}
    return left, replace(population, shared_validation=shared)


def _evaluates_at_clients(config: Config, levels: list[str]) -> bool:
    personal = "client" in levels
    if config.evaluation.where == "server" and personal:
        raise ConfigError(
            "evaluation.where: found server, but the sharing plan keeps values at the clients; write `clients`"
        )
    return personal or config.evaluation.where == "clients"
