"""Texts to measure a model's ranges on: the training text of its run, or a file's lines."""

from __future__ import annotations

from pathlib import Path

from fedmtl.compress.onnx_file import OnnxModel, Row
from fedmtl.config.file import load_config
from fedmtl.errors import DataError, FedmtlError
from fedmtl.experiment.onnx_inference import run_of
from fedmtl.tasks.load import load_tasks


def calibration_rows(model: OnnxModel, file: Path | None, most: int) -> dict[str, list[Row]]:
    """For each task some of its training texts, spread over all; none where the file lies in no run's folder."""
    if file is not None:
        return _from_file(model, file, most)
    try:
        run = run_of(model.path)
    except FedmtlError:
        return {}
    data = load_tasks(load_config(run.config))
    columns = {name: data[name].train.texts for name in model.tasks}
    return {name: _spread(list(zip(*texts, strict=True)), most) for name, texts in columns.items()}


def _from_file(model: OnnxModel, file: Path, most: int) -> dict[str, list[Row]]:
    lines = file.read_text(encoding="utf-8-sig").split("\n")
    rows: list[Row] = [tuple(line.split("\t")) for line in lines if line.strip()]
    found = {}
    for name, task in model.tasks.items():
        fitting = [row for row in rows if len(row) == len(task.text) and all(map(str.strip, row))]
        if fitting:
            found[name] = _spread(fitting, most)
    if not found:
        raise DataError(f"{file}: no line fits a task of {model.path.name}; give one text a line, or two with a tab")
    return found


def _spread(rows: list[Row], most: int) -> list[Row]:
    """At most so many, evenly over the whole."""
    count = min(most, len(rows))
    return [rows[place * len(rows) // count] for place in range(count)]
