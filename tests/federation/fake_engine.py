"""A federation small enough to work out by hand: one number for the encoder, one for each head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from fedmtl.capabilities import aggregator
from fedmtl.config import Config, EvaluationConfig, FederationConfig, TaskConfig, TrainingConfig
from fedmtl.federation.dispatch import ServerSettings
from fedmtl.federation.messages import ClientInfo, Evaluation, Failure, Job, State, Update
from fedmtl.federation.server_method import ServerMethod
from fedmtl.methods.early_stopping import EarlyStopping
from fedmtl.methods.server_optimizers import ServerOptimizer
from fedmtl.methods.task_weighting import TaskWeighting
from fedmtl.sharing.plan import Key, SharingPlan
from fedmtl.tasks.metrics import Scores
from fedmtl.tasks.task import Task
from fedmtl.training.local_method import local_settings

PLAN = SharingPlan((("heads.*", "task"), ("*", "all")))
ENCODER = Key("all", "layer")
NAMES = ("layer", "heads.sst2.w", "heads.stsb.w")
SETTINGS = local_settings(TrainingConfig(num_rounds=3, batch_size=1, optimizer="sgd"), {}, {}, keep_optimizer=False)
Answers = Callable[[Job], "Update | Failure | None"]


def head(task: str) -> Key:
    return Key(f"task:{task}", f"heads.{task}.w")


def start() -> State:
    return State(0, {key: torch.zeros(1) for key in (ENCODER, head("sst2"), head("stsb"))}, PLAN)


def make_server(
    patience: int | None = None, methods: Sequence[ServerMethod] = (), **federation: object
) -> ServerSettings:
    """With the methods that a config with this federation section switches on, and some more."""
    tasks = {
        "sst2": Task("sst2", "classification", ("sentence",), "label", "accuracy", ("no", "yes"), patience=patience),
        "stsb": Task("stsb", "regression", ("a", "b"), "label", "pearson"),
    }
    owned = {"a": ("sst2",), "b": ("sst2",), "c": ("stsb",)}
    config = FederationConfig.model_validate({"vocabulary_slices": False, **federation})
    weights = {"sst2": 1.0, "stsb": 1.0}
    weighting = [TaskWeighting(config.task_weighting, weights)] if config.task_weighting.kind == "progress" else []
    return ServerSettings(
        tasks=tasks,
        names=NAMES,
        table="layer",
        active_tasks=lambda client, number: owned[client],
        federation=config,
        evaluation=EvaluationConfig(),
        settings=SETTINGS,
        task_weights=weights,
        seed=0,
        methods=[
            *weighting,
            ServerOptimizer(config.server_optimizer),
            EarlyStopping(tasks, dict.fromkeys(tasks, 1)),
            *methods,
        ],
        aggregator=aggregator(Config(tasks={"sst2": TaskConfig()}, federation=config)),
    )


def trained(job: Job, step: float = 1.0) -> Update:
    """Every value of the job moved by one step; client b has three examples, the others one."""
    delta = {key: torch.full_like(value, step) for key, value in job.weights.items() if job.plan.trains(key)}
    count = 3 if job.client == "b" else 1
    return Update(job.round, job.client, job.tasks, delta, job.rows, dict.fromkeys(job.tasks, count), {})


class FakeEngine:
    """Answers as told; keeps the jobs it was given."""

    def __init__(self, answer: Answers = trained) -> None:
        self.answer = answer
        self.jobs: list[Job] = []

    def clients(self) -> dict[str, ClientInfo]:
        return {
            "a": ClientInfo({"sst2": 1}),
            "b": ClientInfo({"sst2": 3}),
            "c": ClientInfo({"stsb": 1}),
        }

    def run(self, jobs: Iterable[Job], deadline: float) -> Iterator[Update | Failure]:
        for job in jobs:
            self.jobs.append(job)
            answer = self.answer(job)
            if answer is not None:
                yield answer


def scores(**values: float | None) -> Evaluation:
    """An evaluation with these main metrics."""
    metric = {"sst2": "accuracy", "stsb": "pearson"}
    by_task = {task: Scores({metric[task]: value}, {}, None, 0.0, 1) for task, value in values.items()}
    known = [value for value in values.values() if value is not None]
    overall = sum(known) / len(known) if len(known) == len(values) else None
    return Evaluation(by_task, {}, overall, values.get("sst2"))
