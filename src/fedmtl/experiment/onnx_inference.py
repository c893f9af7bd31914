"""An ONNX file on new texts, and on labelled files: as `inference` with a finished run, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedmtl.compress.onnx_file import OnnxModel, Row, compute
from fedmtl.config.file import load_config
from fedmtl.errors import FedmtlError
from fedmtl.experiment.answers import Prediction, check_texts, labelled_examples, tasks_on, to_prediction
from fedmtl.runs import RunFolder
from fedmtl.tasks.examples import Examples
from fedmtl.tasks.load import load_tasks
from fedmtl.tasks.metrics import Scores, score, sum_predictions
from fedmtl.tasks.task import Task


def answerable(model: OnnxModel, num_texts: int, task: str | None = None) -> list[str]:
    """The tasks that take this many texts, in the file's order."""
    if task is None:
        return tasks_on(model.path.name, model.tasks, num_texts)
    check_texts(_task(model, task), num_texts)
    return [task]


def predict_texts(model: OnnxModel, rows: Sequence[Row], tasks: Sequence[str]) -> list[list[Prediction]]:
    """For every row of one or two texts, each task's answer; tasks that share the encoder share its pass."""
    answers = compute(model, tasks, rows)
    return [[to_prediction(model.tasks[task], answers[task][row]) for task in tasks] for row in range(len(rows))]


def evaluate_file(model: OnnxModel, task: str, path: Path) -> Scores:
    """Score one task on a labelled file that has the task's columns."""
    known = _task(model, task)
    return score_examples(model, known, labelled_examples(known, path))


def evaluate_validation(model: OnnxModel, task: str | None = None) -> dict[str, Scores]:
    """Score on the validation examples of the run in whose folder the file lies."""
    wanted = [_task(model, task).name] if task else list(model.tasks)
    data = load_tasks(load_config(run_of(model.path).config))
    return {name: score_examples(model, model.tasks[name], data[name].validation) for name in wanted}


def run_of(file: Path) -> RunFolder:
    """The run whose folder holds the file."""
    for run in map(RunFolder, file.resolve().parents):
        if run.config.is_file() and run.events.is_file():
            return run
    raise FedmtlError(f"{file}: lies in no run's folder, which would name its data; give --task and --file")


def score_examples(model: OnnxModel, task: Task, examples: Examples) -> Scores:
    """Score one task on examples at hand."""
    rows = list(zip(*examples.texts, strict=True))
    outputs = compute(model, [task.name], rows)[task.name]
    loss = float(_losses(task, outputs.astype(np.float64), examples.labels).sum())
    return score(task, sum_predictions(task, outputs, examples.labels, loss, True))


def _losses(task: Task, outputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Squared error or cross-entropy of every example."""
    if task.is_regression:
        errors: np.ndarray = (outputs[:, 0] - labels) ** 2
        return errors
    logits = np.concatenate([np.zeros_like(outputs), outputs], axis=1) if task.outputs == 1 else outputs
    surprise: np.ndarray = np.logaddexp.reduce(logits, axis=1) - logits[np.arange(len(labels)), labels]
    return surprise


def _task(model: OnnxModel, name: str) -> Task:
    if name not in model.tasks:
        raise FedmtlError(f"{model.path.name} has no task {name}; it has {', '.join(model.tasks)}")
    return model.tasks[name]
