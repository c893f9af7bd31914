"""The front door for Python code: `run` trains a config, and a `Run` is its folder, with its numbers and its model.

Commands import this file before they do anything, so it imports what reads configs, trains, answers or exports only
when that is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from fedmtl.errors import DataError, FedmtlError
from fedmtl.runs.folder import RunFolder, find_run

if TYPE_CHECKING:
    from fedmtl.config import Config
    from fedmtl.config.file import ConfigSource
    from fedmtl.export.card import Hub
    from fedmtl.export.hf import HfExport
    from fedmtl.predict.answers import Prediction
    from fedmtl.predict.run import LoadedRun
    from fedmtl.runs.event_lines import Event, Observer
    from fedmtl.runs.summary import Round, RunSummary
    from fedmtl.tasks.metrics import Scores

# One text, or the two texts of a pair.
Row = tuple[str, ...]


def run(
    config: ConfigSource = None,
    name: str | None = None,
    observe: Observer | None = None,
    *,
    overrides: Sequence[str] = (),
) -> Run:
    """Train a config in a new run folder, and return the finished run.

    The config is the path of a YAML file, a mapping, a Config, or None for the packaged demonstration; overrides are
    written `path.to.key=value`. The run's name is the file's unless one is given, and a name that is taken gets -2,
    -3, and so on. `observe` is called with every event as it happens. A run that cannot go on raises CannotContinue,
    Ctrl-C raises Interrupted; both leave a folder that `Run.resume` goes on with. Worker processes import the script
    that calls this, so a script calls it under `if __name__ == "__main__":`.
    """
    from fedmtl.config.file import explained_config, explained_demo
    from fedmtl.experiment.prepare import settled
    from fedmtl.experiment.run import start_run

    explained, data = settled(explained_demo(overrides) if config is None else explained_config(config, overrides))
    done = start_run(explained.config, name or _default_name(config), observe or _ignore, data=data)
    return Run(done.path)


def _default_name(config: ConfigSource) -> str:
    if config is None:
        return "demo"
    from fedmtl.config import Config

    return "run" if isinstance(config, Config | Mapping) else Path(config).stem


def _ignore(event: object) -> None:
    pass


@dataclass(frozen=True)
class Run:
    """A run folder: what was run, how far it is, what it scored, and the model it made.

    It may be opened while the run goes on, and after it failed; everything is read from the folder when it is
    needed. The model is there once the run has ended, however it ended.
    """

    path: Path
    _models: dict[tuple[str | None, Round | None, bool], tuple[int, LoadedRun]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))

    @classmethod
    def open(cls, run: str | os.PathLike[str]) -> Run:
        """Open a run by its name in `runs/` or by its folder; RunNotFound says which runs there are."""
        return cls(find_run(os.fspath(run)).path)

    @property
    def name(self) -> str:
        """The name of the run, which is that of its folder."""
        return self.path.name

    @property
    def folder(self) -> RunFolder:
        """The paths of the files in the run's folder."""
        return RunFolder(self.path)

    @cached_property
    def config(self) -> Config:
        """The config of the run with every default filled in."""
        from fedmtl.config.file import load_config

        return load_config(self.folder.config)

    @property
    def status(self) -> str:
        """How far the run is: `waiting`, `running`, `killed`, `done`, `interrupted` or `failed`."""
        from fedmtl.runs.folder import is_busy
        from fedmtl.runs.summary import run_status

        return run_status(self.events(), self.name, is_busy=is_busy(self.folder.path)).status

    def events(self) -> list[Event]:
        """Return all that happened so far, in order: each event is a record of a class in `fedmtl.runs.events`.

        docs/run-folder.md describes the fields. The lines as they are in the file, one JSON object each, are in
        `run.folder.events`, which `pandas.read_json(..., lines=True)` takes.
        """
        from fedmtl.runs.log import read_events

        return read_events(self.folder)

    def summary(self) -> RunSummary:
        """Return the run in numbers: every task's metrics at its start, its best and its end, bytes and seconds."""
        from fedmtl.runs.summary import summarize

        return summarize(self.events(), self.name)

    def metrics(self) -> list[dict[str, Any]]:
        """Return a table of one row for each finished round and task, which `pandas.DataFrame` takes as it is.

        Columns: `round` (0 is before training), `task`, `metric` (the name of the task's main metric), `score` (its
        value), each metric by its name, `loss` and `examples` of the evaluation, and `train_loss`. None stands for
        what is undefined, belongs to another kind of task, or was not evaluated in that round.
        """
        return _metric_rows(self.events())

    def model(self, client: str | None = None, round: Round | None = None) -> LoadedRun:
        """Load the model that the run ended with; where values stay at clients, the model of the client that is named.

        `round` is `best`, `last` or a number: the model after that round, as far as its checkpoint is there. It is
        loaded once, and again after a resume has written another.
        """
        return self._load(client, round, values_only=False)

    def _load(self, client: str | None, round: Round | None, *, values_only: bool) -> LoadedRun:
        """Load a model once; with `values_only`, one that answers and scores will do."""
        from fedmtl.predict.run import load_run

        record = self.folder.model / "tasks.json"
        written = record.stat().st_mtime_ns if record.exists() else 0
        key = (client, round, values_only)
        whole = self._models.get((client, round, False), (None, None))
        if values_only and whole[0] == written and whole[1] is not None:
            return whole[1]
        if key not in self._models or self._models[key][0] != written:
            self._models[key] = (written, load_run(self.folder, client, round, values_only=values_only))
        return self._models[key][1]

    @overload
    def predict(  # type: ignore[overload-overlap]  # a text is an iterable of texts, and still one text
        self, texts: str | Row, task: str | None = None, client: str | None = None, round: Round | None = None
    ) -> list[Prediction]: ...

    @overload
    def predict(
        self,
        texts: Iterable[str | Sequence[str]],
        task: str | None = None,
        client: str | None = None,
        round: Round | None = None,
    ) -> list[list[Prediction]]: ...

    def predict(
        self,
        texts: str | Row | Iterable[str | Sequence[str]],
        task: str | None = None,
        client: str | None = None,
        round: Round | None = None,
    ) -> list[Prediction] | list[list[Prediction]]:
        """Answer texts with every head that takes them, or with the head of one task; `round` is as in `model`.

        One text is a string, a pair is a tuple of two; either gives a list with one prediction for each task. A list
        of texts, or of pairs, gives such a list for each of them.
        """
        from fedmtl.predict.run import answerable, predict_texts

        is_one = isinstance(texts, str) or (isinstance(texts, tuple) and all(isinstance(text, str) for text in texts))
        rows = _rows([texts] if is_one else texts)
        if not rows:
            return []
        model = self._load(client, round, values_only=True)
        answers = predict_texts(model, rows, answerable(model, len(rows[0]), task))
        return answers[0] if is_one else answers

    def evaluate(
        self,
        task: str | None = None,
        file: str | os.PathLike[str] | None = None,
        client: str | None = None,
        round: Round | None = None,
        by: str | None = None,
        *,
        test: bool = False,
    ) -> dict[str, Scores]:
        """Score the model on the run's validation examples, or one task on any labelled file; scores by task.

        A task may be one of its further validation sets, such as `mnli:mismatched`. With `test` it is scored on the
        test files that the config names (`source.test`).

        `by` names a column of the file that says which group an example is of: every group has its scores too, under
        such as `sst2:country=DE`.

        `round` is as in `model`. On the validation examples of a run that the server scored on a CPU, the scores are
        those of results.csv, to the last digit; of a round in which a task stopped early, results.csv has its score
        before its values went back to its best round.
        """
        if file is not None and task is None:
            raise FedmtlError("evaluate: a file needs a task, which says whose columns and labels it has")
        if by is not None and file is None:
            raise FedmtlError("evaluate: groups are those of a file, by one of its columns; give one with its task")
        if test and file is not None:
            raise FedmtlError("evaluate: found a file and test, which scores the config's files; give one of them")
        from fedmtl.predict.run import evaluate_file, evaluate_test, evaluate_validation

        model = self._load(client, round, values_only=True)
        if task is not None and file is not None:
            return evaluate_file(model, task, Path(file), by)
        return evaluate_test(model, task) if test else evaluate_validation(model, task)

    def resume(self, observe: Observer | None = None) -> Run:
        """Go on after the last whole round, to the weights of a run that never stopped; one that is done stays so."""
        if self.status != "done" or not self.folder.report.exists():
            from fedmtl.experiment.run import resume_run

            resume_run(self.folder, observe or _ignore)
        return self

    def report(self) -> Path:
        """Write report.html from what is in the folder now, and return its path."""
        from fedmtl.report.page import write_report

        return write_report(self.path)

    def export_hf(
        self,
        folder: str | os.PathLike[str] | None = None,
        client: str | None = None,
        round: Round | None = None,
    ) -> HfExport:
        """Write every task for transformers: of its plain classes where they can hold it, and all tasks in one folder.

        Where plain classes cannot hold a task, or where there are several, `every-task/` has all heads, with a
        modelling file of its own: it loads with `trust_remote_code=True`. Every folder has a model card. Without a
        folder they are written into `export` in the run's folder, those of a round, which is as in `model`, into
        `export/best`, `export/last` or such as `export/round-3`.
        """
        from fedmtl.export.card import Hub
        from fedmtl.export.hf import export_hf

        model = self.model(client, round)
        target = self._export_folder() / _round_name(round) if folder is None else Path(folder)
        return export_hf(model.saved, model.bound, target, self._card(round, Hub(pipeline="text-classification")))

    def export_sentence_transformers(
        self,
        folder: str | os.PathLike[str] | None = None,
        client: str | None = None,
        round: Round | None = None,
    ) -> dict[str, Path | str]:
        """Write a folder that sentence-transformers loads; by task, its folder, or why it has none.

        Its vectors are those that the heads see. Heads of tasks on single texts are Dense modules in it. Where tasks
        have layers of their own, every task has a folder. Without a folder it is `export/sentence-transformers` in the
        run's folder, that of a round such as `export/sentence-transformers.best`.
        """
        from fedmtl.export.card import Hub
        from fedmtl.export.sentence_transformers import export_sentence_transformers

        model = self.model(client, round)
        name = ".".join(filter(None, ("sentence-transformers", _round_name(round))))
        target = self._export_folder() / name if folder is None else Path(folder)
        card = self._card(round, Hub("sentence-transformers", "sentence-similarity"))
        return export_sentence_transformers(model.saved, model.bound, target, card)

    def _export_folder(self) -> Path:
        from fedmtl.model.encoder_files import check_inside

        # The run may be anybody's: nothing is written through a link of it.
        check_inside(self.path / "export", self.path)
        return self.path / "export"

    def _card(self, round: Round | None, hub: Hub) -> Callable[[str], str]:
        from fedmtl.export.card import model_card

        return lambda usage: model_card(self.folder, usage, round, hub)

    def export_onnx(
        self,
        out: str | os.PathLike[str] | None = None,
        client: str | None = None,
        round: Round | None = None,
    ) -> Path:
        """Write a folder that answers every task with numpy, tokenizers and onnxruntime alone, and return its path.

        It is `export/onnx` in the run's folder unless one is given, that of a round, which is as in `model`, such as
        `export/onnx-best` or `export/onnx-round-3`. A path that ends in `.onnx` is the graph alone, as one file.
        """
        from fedmtl.predict.onnx import require

        require("export --to onnx", "onnx", "onnxscript")
        from fedmtl.export.onnx import export_bundle, export_onnx

        name = "-".join(filter(None, ("onnx", _round_name(round))))
        target = self._export_folder() / name if out is None else Path(out)
        model = self.model(client, round)
        if target.suffix == ".onnx":
            return export_onnx(model.saved, model.bound, target)
        from fedmtl.export.card import Hub

        return export_bundle(model.saved, model.bound, target, self._card(round, Hub("onnx")), is_ours=out is None)


def _round_name(round: Round | None) -> str:
    """What files of a round are called; empty for the model that a run ended with."""
    if round is None:
        return ""
    from fedmtl.predict.rounds import round_name

    return round_name(round)


def _metric_rows(events: Sequence[Event]) -> list[dict[str, Any]]:
    from fedmtl.runs.event_lines import first_of
    from fedmtl.runs.events import EvaluationEvent, RoundEvent, StartEvent

    start = first_of(events, StartEvent)
    evaluated = {(event.round, event.task): event for event in events if isinstance(event, EvaluationEvent)}
    finished = {event.round: event for event in events if isinstance(event, RoundEvent)}
    names = dict.fromkeys(name for event in evaluated.values() for name in event.metrics)
    rows: list[dict[str, Any]] = []
    for number, end in finished.items():
        for task, facts in start.tasks.items() if start else ():
            event = evaluated.get((number, task))
            metrics = event.metrics if event else {}
            rows.append(
                {"round": number, "task": task, "metric": facts.metric, "score": metrics.get(facts.metric or "")}
                | {name: metrics.get(name) for name in names}
                | {"loss": event.loss if event else None, "examples": event.examples if event else None}
                | {"train_loss": end.losses.get(task)}
            )
    return rows


def _rows(texts: Any) -> list[Row]:
    """The texts as rows of one text or two, all alike; anything else is a DataError that says which text is wrong."""
    from fedmtl.config.errors import shown

    if not isinstance(texts, Iterable):
        raise DataError(f"predict: found {shown(texts)}; give a text, a tuple of two for a pair, or a list of them")
    rows: list[Row] = []
    for number, given in enumerate(texts, start=1):
        row = (given,) if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
        if len(row) not in (1, 2) or not all(isinstance(text, str) for text in row):
            raise DataError(f"predict, text {number}: found {shown(given)}; give a text, or a tuple of two for a pair")
        if rows and len(row) != len(rows[0]):
            raise DataError(f"predict, text {number}: has {len(row)} texts, the first {len(rows[0])}; give as many")
        if not all(map(str.strip, row)):
            raise DataError(f"predict, text {number}: is empty; write some words, or leave it out")
        rows.append(row)
    return rows
