"""The stages of a distillation at work: passes, their records and checkpoints, and what is left at the end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from fedmtl.compress.distill.intermediate import Intermediate
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
from fedmtl.compress.distill.pruning import StudentPruning
from fedmtl.compress.distill.record import (
    Position,
    checkpoint_path,
    evaluation_events,
    main_metrics,
    round_event,
    save_position,
)
from fedmtl.compress.distill.settings import DistillSettings
from fedmtl.compress.distill.student import Student
from fedmtl.compress.distill.teaching import Lessons, Teaching, evaluate
from fedmtl.config import Config
from fedmtl.export.encoder import write_run_encoders
from fedmtl.methods.distillation import NAME, options_of
from fedmtl.model.multitask import BoundModel
from fedmtl.model.saved import save_model
from fedmtl.runs.energy import Meter as EnergyMeter
from fedmtl.runs.energy import total_energy
from fedmtl.runs.event_lines import Event
from fedmtl.runs.events import EndEvent, RoundEvent
from fedmtl.runs.folder import RunFolder, write_atomic
from fedmtl.runs.log import append_event, append_results, read_events
from fedmtl.sharing.plan import Weights, weights_sha256
from fedmtl.sharing.weights import initial_weights
from fedmtl.tasks.metrics import Sums
from fedmtl.training.local_method import LocalSettings, local_settings, with_methods

WARMUP = 0.1


class Listener(Protocol):
    """Whoever shows what happens."""

    def say(self, line: str) -> None: ...
    def update(self, update: Update) -> None: ...


class Work:
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
        energy: EnergyMeter,
    ) -> None:
        self.config, self.settings, self.teaching, self.student = config, settings, teaching, student
        self.lessons, self.run, self.fingerprint, self.listener = lessons, run, fingerprint, listener
        self.energy = energy
        self.device = teaching.device
        student.model.to(self.device)
        self.pruning = StudentPruning(config.training.pruning, student)
        self.last: dict[str, Sums] = {}

    def bind(self, weights: Weights) -> BoundModel:
        student = self.student
        return BoundModel(student.model, student.plan, list(student.model.tasks), "", weights, device=self.device)

    def go(self, position: Position) -> Weights:
        """All stages from there to the end; the student's values."""
        weights = position.weights or self.start()
        self.pruning.restore(position.masks or self.pruning.masks)
        stages = list(self.settings.epochs)
        for stage in stages[stages.index(position.stage) if position.stage else 0 :]:
            resumed = position if position.stage == stage else Position(stage)
            weights = self._stage(replace(resumed, weights=weights))
        return weights

    def start(self) -> Weights:
        """The student's values before the first pass; those that are pruned from the start are zero."""
        return self.pruning.begin(initial_weights(self.student.model, self.student.plan))[0]

    def _stage(self, position: Position) -> Weights:
        stage, epochs = position.stage, self.settings.epochs[position.stage]
        bound = self.bind(position.weights)
        local = stage_settings(self.config, self.settings, stage, list(bound.model.tasks))
        lesson, stepper, close = self._lesson(stage, bound, local)
        self.pruning.bind(bound)
        if position.optimizer:
            stepper.restore(position.optimizer)
        meter = Meter(stage, epochs, self.listener.update)
        try:
            for epoch in range(position.epoch + 1, epochs + 1):
                begun = time.perf_counter()
                bound.model.train(stage == "prediction")
                passed = train_epoch(lesson, stepper, self.lessons.train, local, epoch, self.config.seed, meter)
                bound.model.eval()
                number = pass_number(self.settings, stage, epoch)
                pruned = self.pruning.after_pass(number, bound)
                scored = stage == "prediction" or epoch == epochs
                sums = evaluate(bound, self.lessons.validation, self.device) if scored else {}
                self.record(number, stage, passed, sums, time.perf_counter() - begun, pruned)
                position = Position(stage, epoch, _cpu(bound), stepper.state(), self.pruning.masks)
                save_position(self.run, self.fingerprint, position)
        finally:
            close()
        return _cpu(bound)

    def _lesson(
        self, stage: str, bound: BoundModel, local: LocalSettings
    ) -> tuple[Lesson, Stepper, Callable[[], None]]:
        if stage == "prediction":
            lesson = PredictionLesson(bound, self.lessons.train, local, self.device)
            return lesson, Stepper(bound, local, self.pruning.methods), lambda: None
        # The module of transformers computes the states, so autograd adds up the gradients.
        bound.model.adds_gradients = True
        inner = Intermediate(self.teaching.bound, bound, self.settings, self.config.seed)
        inner.projections.take_over(self.student.projections)
        inner.projections.to(self.device)
        stepper = Stepper(bound, local, self.pruning.methods, inner.projections)
        return IntermediateLesson(inner, self.lessons.train, self.device), stepper, inner.close

    def record(
        self,
        number: int,
        stage: str,
        passed: Passed,
        sums: dict[str, Sums],
        seconds: float,
        pruned: Sequence[Event] = (),
    ) -> None:
        tasks = self.student.model.tasks
        events = [
            *pruned,
            *evaluation_events(number, tasks, sums),
            round_event(number, stage, passed, tasks, sums, seconds),
        ]
        for event in events:
            append_event(self.run, event)
        append_results(self.run, events)
        if self.energy.is_due:
            append_event(self.run, self.energy.take())
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
        bound.model.encoder.save_pretrained(student_encoder_folder(self.run), state_dict=values)
        student.encoder.tokenizer.save_pretrained(student_encoder_folder(self.run))
        sums = self.last or evaluate(bound, self.lessons.validation, self.device)
        append_event(self.run, self.energy.take())
        events = read_events(self.run)
        rounds = [event for event in events if isinstance(event, RoundEvent)]
        append_event(
            self.run,
            EndEvent(
                status="done",
                rounds=rounds[-1].round,
                seconds=sum(event.seconds or 0.0 for event in rounds),
                weights_sha256=weights_sha256(weights),
                energy=total_energy(events, config.energy.grams_per_kwh),
            ),
        )
        known = config.model_copy(update={"model": plain})
        write_run_encoders(self.run, student.model, student.encoder, student.plan, weights, known)
        record = {"settings": self.settings.to_json(), "start": student.start, "teacher": self.teaching.digest}
        write_atomic(self.run.path / "distill.json", json.dumps(record, indent=1).encode())
        checkpoint_path(self.run).unlink(missing_ok=True)
        return main_metrics(student.model.tasks, sums)


def stage_settings(config: Config, settings: DistillSettings, stage: str, tasks: list[str]) -> LocalSettings:
    """The config's training section for one stage, with a pass as a round; rates rise for a tenth, then fall."""
    epochs = settings.epochs[stage]
    rate = settings.rate_intermediate if stage == "intermediate" else settings.rate_prediction
    base = local_settings(config.training, dict.fromkeys(tasks, rate), dict.fromkeys(tasks, 1.0), keep_optimizer=True)
    distilled = {NAME: options_of(1.0 - settings.weights.gold, settings.temperature, tasks)}
    return replace(
        with_methods(base, distilled if stage == "prediction" else {}),
        num_rounds=epochs,
        epochs=1,
        steps=None,
        schedule="linear",
        warmup_rounds=WARMUP * epochs,
    )


def pass_number(settings: DistillSettings, stage: str, epoch: int) -> int:
    """Passes are counted through both stages."""
    before = settings.epochs.get("intermediate", 0) if stage == "prediction" else 0
    return before + epoch


def student_encoder_folder(run: RunFolder) -> Path:
    """The folder with the student's encoder, which plain transformers loads."""
    return run.path.resolve() / "encoder"


def _cpu(bound: BoundModel) -> Weights:
    return {key: value.cpu().clone() for key, value in bound.weights().items()}
