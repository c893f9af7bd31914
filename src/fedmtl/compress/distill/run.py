"""A whole task distillation: a finished run in, a smaller finished run out."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from fedmtl.compress.augment.settings import check_augment
from fedmtl.compress.distill.checkpoint import Position, checkpoint_path, load_position, save_position
from fedmtl.compress.distill.intermediate import Intermediate
from fedmtl.compress.distill.lessons import Lessons, prepare_lessons
from fedmtl.compress.distill.loop import (
    IntermediateLesson,
    Lesson,
    Meter,
    Passed,
    PredictionLesson,
    Stepper,
    Update,
    train_epoch,
)
from fedmtl.compress.distill.record import (
    data_event,
    evaluation_events,
    main_metrics,
    plan_event,
    round_event,
    start_event,
)
from fedmtl.compress.distill.settings import DistillSettings, check_settings
from fedmtl.compress.distill.student import Student, build_student
from fedmtl.compress.distill.teaching import Teaching, evaluate, open_teaching
from fedmtl.config import Config
from fedmtl.config.file import dump_config
from fedmtl.errors import ConfigError, FedmtlError
from fedmtl.model.binding import BoundModel
from fedmtl.model.device import pick_device
from fedmtl.model.keys import Weights, weights_sha256
from fedmtl.model.saved import save_model
from fedmtl.model.values import initial_weights
from fedmtl.runs import RunFolder, append_event, append_results, create_run, cut_back, read_events, write_atomic
from fedmtl.tasks.load import TaskData, load_tasks
from fedmtl.tasks.metrics import Sums
from fedmtl.tasks.tokens import token_cache
from fedmtl.training.settings import LocalSettings, local_settings

WARMUP = 0.1


class Listener(Protocol):
    """Whoever shows what happens."""

    def say(self, line: str) -> None: ...
    def update(self, update: Update) -> None: ...


@dataclass(frozen=True)
class Distilled:
    """The student's run, and every task's main metric of teacher and student on the validation examples."""

    run: RunFolder
    teacher: dict[str, float | None]
    student: dict[str, float | None]


def distill(
    teacher: RunFolder,
    config: Config,
    settings: DistillSettings,
    name: str,
    listener: Listener,
    *,
    resume: bool = False,
) -> Distilled:
    """Do all of it; with `resume` from the last whole pass of the run of that name."""
    check_settings(settings)
    check_augment(settings.augment)
    device = pick_device(config.compute.device, "compute.device")
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    teaching = open_teaching(teacher.model, device)
    data = load_tasks(config)
    absent = [task for task in teaching.saved.tasks if task not in data]
    if absent:
        raise ConfigError(f"tasks.{absent[0]}: the teacher has it and the config has not; leave it in")
    student = build_student(settings, teaching.saved, config.model, config.seed)
    lessons = prepare_lessons(
        teaching,
        student,
        data,
        settings.augment,
        config.model.server_model,
        token_cache(config.data),
        config.seed,
        listener.say,
    )
    settings = _possible_stages(settings, lessons, student, listener)
    run, position, fingerprint = _open_run(config, settings, teaching, name, resume)
    work = _Work(config, settings, teaching, student, lessons, run, fingerprint, listener)
    if not position.stage:
        _open_events(work, data, teacher)
    weights = work.go(position)
    known = next(event for event in read_events(run) if event["event"] == "distill")
    return Distilled(run, known["teacher_metrics"], work.finish(weights))


def _possible_stages(
    settings: DistillSettings, lessons: Lessons, student: Student, listener: Listener
) -> DistillSettings:
    if lessons.same_tokens or "intermediate" not in settings.epochs:
        return settings
    reason = f"{student.encoder.name} cuts texts into other tokens than its teacher, whose states it cannot follow"
    if settings.stages == "intermediate":
        raise ConfigError(f"--stages intermediate: {reason}; write --stages prediction")
    listener.say(f"{reason}: only the prediction stage is done")
    return replace(settings, stages="prediction")


def _open_run(
    config: Config, settings: DistillSettings, teaching: Teaching, name: str, resume: bool
) -> tuple[RunFolder, Position, str]:
    training = config.training.model_dump(mode="json")
    fingerprint = settings.fingerprint(teaching.digest, {**training, "seed": config.seed})
    output = Path(config.output)
    if not resume:
        run = create_run(output, name)
        own = config.model.model_copy(update={"server_model": str(_encoder(run)), "lora": None, "adapters": None})
        write_atomic(run.config, dump_config(config.model_copy(update={"model": own})).encode())
        return run, Position(), fingerprint
    run = RunFolder(output / name)
    if not run.events.exists():
        raise FedmtlError(f"--resume: there is no distillation {name} in {output}; start without --resume")
    position = load_position(run, fingerprint)
    if position.stage:
        cut_back(run, _number(settings, position.stage, position.epoch))
    else:
        run.events.unlink()
        run.results.unlink(missing_ok=True)
    return run, position, fingerprint


def _open_events(work: _Work, data: dict[str, TaskData], teacher: RunFolder) -> None:
    """What is known before the first pass, the teacher's scores and the student's before it learnt anything."""
    weights = initial_weights(work.student.model, work.student.plan)
    lessons, tasks = work.lessons, work.student.model.tasks
    total = sum(work.settings.epochs.values())
    above = main_metrics(tasks, evaluate(work.teaching.bound, lessons.taught_validation, work.device))
    append_event(work.run, start_event(work.config, work.student, data, str(work.device), total))
    for task in tasks:
        numbers = lessons.given[task], lessons.added[task], lessons.truncated[task]
        append_event(work.run, data_event(data[task], *numbers))
    append_event(work.run, plan_event(work.student, weights))
    told = {"teacher": teacher.name, "start": work.student.start, "settings": work.settings.to_json()}
    append_event(work.run, {"event": "distill", **told, "teacher_metrics": above})
    sums = evaluate(work.bind(weights), lessons.validation, work.device)
    work.record(0, "start", Passed({}, {}), sums, 0.0)


class _Work:
    """One distillation at work."""

    def __init__(
        self,
        config: Config,
        settings: DistillSettings,
        teaching: Teaching,
        student: Student,
        lessons: Lessons,
        run: RunFolder,
        fingerprint: str,
        listener: Listener,
    ) -> None:
        self.config, self.settings, self.teaching, self.student = config, settings, teaching, student
        self.lessons, self.run, self.fingerprint, self.listener = lessons, run, fingerprint, listener
        self.device = teaching.device
        student.model.to(self.device)
        self.last: dict[str, Sums] = {}

    def bind(self, weights: Weights) -> BoundModel:
        student = self.student
        return BoundModel(student.model, student.plan, list(student.model.tasks), "", weights, device=self.device)

    def go(self, position: Position) -> Weights:
        """All stages from there to the end; the student's values."""
        weights = position.weights or initial_weights(self.student.model, self.student.plan)
        stages = list(self.settings.epochs)
        for stage in stages[stages.index(position.stage) if position.stage else 0 :]:
            resumed = position if position.stage == stage else Position(stage)
            weights = self._stage(replace(resumed, weights=weights))
        return weights

    def _stage(self, position: Position) -> Weights:
        stage, epochs = position.stage, self.settings.epochs[position.stage]
        bound = self.bind(position.weights)
        local = stage_settings(self.config, self.settings, stage, list(bound.model.tasks))
        lesson, stepper, close = self._lesson(stage, bound, local)
        if position.optimizer:
            stepper.restore(position.optimizer)
        meter = Meter(stage, epochs, self.listener.update)
        try:
            for epoch in range(position.epoch + 1, epochs + 1):
                begun = time.perf_counter()
                bound.model.train(stage == "prediction")
                passed = train_epoch(lesson, stepper, self.lessons.train, local, epoch, self.config.seed, meter)
                bound.model.eval()
                scored = stage == "prediction" or epoch == epochs
                sums = evaluate(bound, self.lessons.validation, self.device) if scored else {}
                number = _number(self.settings, stage, epoch)
                self.record(number, stage, passed, sums, time.perf_counter() - begun)
                save_position(self.run, self.fingerprint, Position(stage, epoch, _cpu(bound), stepper.state()))
        finally:
            close()
        return _cpu(bound)

    def _lesson(
        self, stage: str, bound: BoundModel, local: LocalSettings
    ) -> tuple[Lesson, Stepper, Callable[[], None]]:
        if stage == "prediction":
            lesson = PredictionLesson(bound, self.lessons.train, local, self.device)
            return lesson, Stepper(bound, local), lambda: None
        # The encoder's own module computes the states, so autograd adds up the gradients.
        bound.model.adds_gradients = True
        inner = Intermediate(self.teaching.bound, bound, self.settings, self.config.seed)
        inner.projections.to(self.device)
        stepper = Stepper(bound, local, inner.projections)
        return IntermediateLesson(inner, self.lessons.train, self.device), stepper, inner.close

    def record(self, number: int, stage: str, passed: Passed, sums: dict[str, Sums], seconds: float) -> None:
        tasks = self.student.model.tasks
        own = [
            *evaluation_events(number, tasks, sums),
            round_event(number, stage, passed, tasks, sums, seconds),
        ]
        for event in own:
            append_event(self.run, event)
        append_results(self.run, own)
        self.last = sums or self.last

    def finish(self, weights: Weights) -> dict[str, float | None]:
        """Write the model as a run's, and its encoder as a folder that `model.server_model` takes."""
        student, config = self.student, self.config
        plain = config.model.model_copy(
            update={"lora": None, "adapters": None, "max_length": self.teaching.saved.max_length}
        )
        save_model(self.run.model, student.encoder, student.model.tasks, student.plan, weights, plain)
        bound = self.bind(weights)
        # Views of one buffer would be taken for one tensor.
        values = {name: value.detach().cpu().clone() for name, value in bound.model.encoder.state_dict().items()}
        bound.model.encoder.save_pretrained(_encoder(self.run), state_dict=values)
        student.encoder.tokenizer.save_pretrained(_encoder(self.run))
        sums = self.last or evaluate(bound, self.lessons.validation, self.device)
        rounds = [event for event in read_events(self.run) if event["event"] == "round"]
        append_event(
            self.run,
            {
                "event": "end",
                "status": "done",
                "reason": None,
                "rounds": rounds[-1]["round"],
                "seconds": sum(event["seconds"] for event in rounds),
                "weights_sha256": weights_sha256(weights),
            },
        )
        record = {"settings": self.settings.to_json(), "start": student.start, "teacher": self.teaching.digest}
        write_atomic(self.run.path / "distill.json", json.dumps(record, indent=1).encode())
        checkpoint_path(self.run).unlink(missing_ok=True)
        return main_metrics(student.model.tasks, sums)


def stage_settings(config: Config, settings: DistillSettings, stage: str, tasks: list[str]) -> LocalSettings:
    """The config's training section for one stage, a pass in a round's place; rates rise for a tenth, then fall."""
    epochs = settings.epochs[stage]
    rate = settings.rate_intermediate if stage == "intermediate" else settings.rate_prediction
    base = local_settings(config.training, dict.fromkeys(tasks, rate), dict.fromkeys(tasks, 1.0), keep_optimizer=True)
    told: dict[str, Any] = {
        "weight": 1.0 - settings.weights.gold, "temperature": settings.temperature, "tasks": tasks
    }  # fmt: skip
    return replace(
        base,
        num_rounds=epochs,
        epochs=1,
        steps=None,
        schedule="linear",
        warmup_rounds=WARMUP * epochs,
        proximal=0.0,
        # A step is one task's batch here.
        task_schedule="even" if base.task_schedule == "joint" else base.task_schedule,
        gradients="sum",
        loss_weighting="fixed",
        smart=None,
        distillation=told if stage == "prediction" else None,
    )


def _number(settings: DistillSettings, stage: str, epoch: int) -> int:
    """Passes are counted through both stages."""
    before = settings.epochs.get("intermediate", 0) if stage == "prediction" else 0
    return before + epoch


def _encoder(run: RunFolder) -> Path:
    """Where the student's encoder is as plain transformers has it."""
    return run.path.resolve() / "encoder"


def _cpu(bound: BoundModel) -> Weights:
    return {key: value.cpu().clone() for key, value in bound.values().items()}
