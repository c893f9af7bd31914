"""A whole task distillation: a finished run in, a smaller finished run out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fedmtl.compress.augment.settings import check_augment
from fedmtl.compress.distill.loop import Passed
from fedmtl.compress.distill.pruning import check_pruning
from fedmtl.compress.distill.record import Position, data_event, load_position, main_metrics, plan_event, start_event
from fedmtl.compress.distill.settings import DistillSettings, check_settings
from fedmtl.compress.distill.student import Student, build_student, follow_general
from fedmtl.compress.distill.teaching import Lessons, evaluate, open_teaching, prepare_lessons
from fedmtl.compress.distill.work import Listener, Work, pass_number, student_encoder_folder
from fedmtl.config import Config
from fedmtl.config.file import dump_config
from fedmtl.errors import ConfigError, FedmtlError
from fedmtl.model.device import pick_device
from fedmtl.runs.energy import Meter
from fedmtl.runs.event_lines import first_of
from fedmtl.runs.events import DistillEvent
from fedmtl.runs.folder import RunFolder, create_run, locked
from fedmtl.runs.log import append_event, cut_back, read_events
from fedmtl.sharing.weights import initial_weights
from fedmtl.tasks.load import TaskData, load_tasks
from fedmtl.tasks.tokens import token_cache


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
    """Distil a finished run into a student's run; with `resume` from the last whole pass of the run of that name."""
    check_settings(settings)
    check_augment(settings.augment)
    check_pruning(config.training.pruning, settings)
    meter = Meter(config.energy.cpu_watts)
    try:
        return _distill(teacher, config, settings, name, listener, meter, resume)
    finally:
        meter.close()


def _distill(
    teacher: RunFolder,
    config: Config,
    settings: DistillSettings,
    name: str,
    listener: Listener,
    meter: Meter,
    resume: bool,
) -> Distilled:
    device = pick_device(config.compute.device, "compute.device")
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    meter.watch(str(device))
    teaching = open_teaching(teacher.model, device)
    strange = next((task for task in config.tasks if task not in teaching.saved.tasks), None)
    if strange is not None:
        raise ConfigError(
            f"tasks.{strange}: the teacher does not answer it; leave it out, its tasks are"
            f" {', '.join(teaching.saved.tasks)}"
        )
    data = load_tasks(config, teaching.saved.tasks)
    absent = [task for task in teaching.saved.tasks if task not in data]
    if absent:
        raise ConfigError(f"tasks.{absent[0]}: the teacher has it and the config has not; leave it in")
    student = build_student(settings, teaching.saved, config.model, config.seed)
    settings = follow_general(settings, student, teaching.saved)
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
    check_pruning(config.training.pruning, settings)
    run = _open_run(config, name, resume)
    with locked(run.path):
        training = config.training.model_dump(mode="json")
        fingerprint = settings.fingerprint(teaching.digest, {**training, "seed": config.seed})
        position = _take_up(run, settings, fingerprint) if resume else Position()
        work = Work(config, settings, teaching, student, lessons, run, fingerprint, listener, meter)
        if not position.stage:
            _open_events(work, data, teacher)
        weights = work.go(position)
        known = first_of(read_events(run), DistillEvent)
        assert known is not None, "the opening of a distillation has it"
        return Distilled(run, known.teacher_metrics, work.finish(weights))


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


def _open_run(config: Config, name: str, resume: bool) -> RunFolder:
    output = Path(config.output)
    if not resume:
        return create_run(output, name, lambda run: {"config.yaml": _student_config(config, run)})
    run = RunFolder(output / name)
    if not run.events.exists():
        raise FedmtlError(f"--resume: there is no distillation {name} in {output}; start without --resume")
    return run


def _student_config(config: Config, run: RunFolder) -> bytes:
    encoder = {"server_model": str(student_encoder_folder(run)), "lora": None, "adapters": None}
    model = config.model.model_copy(update=encoder)
    return dump_config(config.model_copy(update={"model": model})).encode()


def _take_up(run: RunFolder, settings: DistillSettings, fingerprint: str) -> Position:
    """Where the distillation goes on, with the run's files cut back to it."""
    position = load_position(run, fingerprint)
    if position.stage:
        cut_back(run, pass_number(settings, position.stage, position.epoch))
    else:
        run.events.unlink()
        run.results.unlink(missing_ok=True)
    return position


def _open_events(work: Work, data: dict[str, TaskData], teacher: RunFolder) -> None:
    """What is known before the first pass, the teacher's scores and the student's before it learnt anything."""
    weights, pruned = work.pruning.begin(initial_weights(work.student.model, work.student.plan))
    lessons, tasks = work.lessons, work.student.model.tasks
    total = sum(work.settings.epochs.values())
    above = main_metrics(tasks, evaluate(work.teaching.bound, lessons.teacher_validation, work.device))
    append_event(work.run, start_event(work.config, work.student, data, str(work.device), total))
    for task in tasks:
        numbers = lessons.given[task], lessons.added[task], lessons.truncated[task]
        append_event(work.run, data_event(data[task], *numbers))
    append_event(work.run, plan_event(work.student, weights))
    append_event(
        work.run,
        DistillEvent(
            teacher=teacher.name,
            start=work.student.start,
            settings=work.settings.to_json(),
            teacher_metrics=above,
        ),
    )
    sums = evaluate(work.bind(weights), lessons.validation, work.device)
    work.record(0, "start", Passed({}, {}), sums, 0.0, pruned)
