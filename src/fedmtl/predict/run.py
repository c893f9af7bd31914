"""A finished run's model on new texts, and on labelled files."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedmtl.errors import FedmtlError, ModelError
from fedmtl.foreign import excerpt
from fedmtl.model.encoder_files import check_inside
from fedmtl.model.multitask import BoundModel
from fedmtl.model.saved import SavedModel, load_model
from fedmtl.predict.answers import (
    Prediction,
    Sink,
    changed_cuts,
    check_texts,
    labelled_sets,
    labelled_test_sets,
    named_sets,
    tasks_on,
    to_predictions,
)
from fedmtl.runs.folder import RunFolder, find_run
from fedmtl.tasks.batches import TextShard, join_rows, sorted_batches
from fedmtl.tasks.examples import Examples
from fedmtl.tasks.metrics import Scores, score, sum_predictions
from fedmtl.tasks.sequences import Rows
from fedmtl.tasks.task import Task, owner_of_set
from fedmtl.tasks.tokens import encode_texts
from fedmtl.training.local import predict_together

if TYPE_CHECKING:
    from fedmtl.runs.summary import Round

CPU = torch.device("cpu")


class ValuesAtClients(FedmtlError):
    """A run's model answers no task without the values that stayed at a client."""


@dataclass(frozen=True)
class LoadedRun:
    """A finished run's model, ready to answer; `tasks` are the tasks it can answer, in the run's order."""

    saved: SavedModel
    bound: BoundModel
    run: RunFolder
    tasks: tuple[str, ...]

    @cached_property
    def tokenizer(self) -> Any:
        """A copy of the model's tokenizer: a call changes its settings, and the model's may be saved again."""
        return copy.deepcopy(self.saved.encoder.tokenizer)


def load_run(
    run: RunFolder | str | os.PathLike[str],
    client: str | None = None,
    round: Round | None = None,
    *,
    values_only: bool = False,
) -> LoadedRun:
    """Load a run's model, the run by its name in `runs/` or its folder.

    Without a round it is the model that the run ended with; `best`, `last` or a number is that of the best round, the
    last one, or any whose checkpoint is there. Where values stay at clients, it is the model of the client that is
    named, with the tasks that client has. A model that is loaded with `values_only` is there sooner, answers and
    scores, and cannot be exported.
    """
    if not isinstance(run, RunFolder):
        run = find_run(os.fspath(run))
    if round is None and client is None:
        check_inside(run.model, run.path)
        saved = load_model(run.model, values_only=values_only)
    else:
        from fedmtl.predict.rounds import load_round

        saved = load_round(run, round, client, values_only=values_only)
    views = saved.plan.keys(saved.model.canonical(), list(saved.tasks), client or "")
    missing = {task: [key for key in view.values() if key not in saved.weights] for task, view in views.items()}
    tasks = tuple(task for task, keys in missing.items() if not keys)
    if not tasks:
        from fedmtl.predict.rounds import clients_with_values

        first = next(key for keys in missing.values() for key in keys)
        clients = clients_with_values(run) or "none is here, they are at the sites"
        raise ValuesAtClients(f"{run.name}: `{first.name}` stays at the clients; name one with --client: {clients}")
    bound = BoundModel(saved.model, saved.plan, tasks, client or "", saved.weights, read=True)
    return LoadedRun(saved, bound, run, tasks)


def evaluate_file(
    loaded: LoadedRun, task: str, path: Path, by: str | None = None, sink: Sink | None = None
) -> dict[str, Scores]:
    """Score one task on a labelled file that has the task's columns; with `by`, also each value of that column."""
    return _score_sets(loaded, labelled_sets(_task(loaded, task), path, by), Scoring(), sink)


def evaluate_test(loaded: LoadedRun, task: str | None = None, sink: Sink | None = None) -> dict[str, Scores]:
    """Score the test files that the run's config names: those of every task that has one, or of one task."""
    from fedmtl.config.file import load_config

    sets = labelled_test_sets(loaded.run.name, load_config(loaded.run.config), known_tasks(loaded, task))
    return _score_sets(loaded, sets, Scoring(), sink)


def evaluate_validation(
    loaded: LoadedRun, task: str | None = None, sink: Sink | None = None, warn: Callable[[str], None] = warnings.warn
) -> dict[str, Scores]:
    """Score the run's validation examples again, as the run did on a CPU: to the last digit of results.csv.

    A task may be a further validation set, TASK:NAME. `warn` is called with a line for each task whose validation is
    no longer cut as in the run.
    """
    # One answer needs none of this, and is there sooner without it. Of the engine's code it is this number.
    from fedmtl.config.file import load_config
    from fedmtl.engines.local import CHUNK
    from fedmtl.tasks.load import load_tasks

    wanted = list(known_tasks(loaded, None if task is None else owner_of_set(task)))
    config = load_config(loaded.run.config)
    data = load_tasks(config, loaded.saved.tasks)
    for words in changed_cuts(loaded.run, data, wanted):
        warn(words)
    sets = named_sets(loaded.run.name, data, wanted, task)
    at_clients = config.evaluation.where == "clients" or loaded.saved.plan.has_personal
    how = Scoring(config.evaluation.batch_size, None if at_clients else CHUNK)
    with _one_thread():
        return _score_sets(loaded, sets, how, sink)


def _score_sets(loaded: LoadedRun, sets: Mapping[str, Examples], how: Scoring, sink: Sink | None) -> dict[str, Scores]:
    scores: dict[str, Scores] = {}
    for name, examples in sets.items():
        task = loaded.saved.tasks[owner_of_set(name)]
        outputs, losses = _compute(loaded, [task.name], examples.texts, examples.labels, how)
        if sink is not None:
            sink(name, task, examples, outputs[task.name])
        sums = sum_predictions(task, outputs[task.name], examples.labels, losses[task.name], True)
        scores[name] = score(task, sums)
    return scores


def known_tasks(loaded: LoadedRun, task: str | None = None) -> dict[str, Task]:
    """The tasks that the model answers, or the one that is named."""
    return {name: _task(loaded, name) for name in (loaded.tasks if task is None else [task])}


def answerable(loaded: LoadedRun, num_texts: int, task: str | None = None) -> list[str]:
    """The tasks that take this many texts, in the run's order."""
    if task is not None:
        check_texts(_task(loaded, task), num_texts)
        return [task]
    return tasks_on(loaded.run.name, {name: loaded.saved.tasks[name] for name in loaded.tasks}, num_texts)


def predict_texts(loaded: LoadedRun, rows: Sequence[tuple[str, ...]], tasks: Sequence[str]) -> list[list[Prediction]]:
    """For every row of one or two texts, each task's answer; tasks that share the encoder share its pass."""
    try:
        return _predict(loaded, rows, tasks)
    except FedmtlError:
        raise
    except Exception as error:  # a tokenizer and an encoder that load and do not fit each other fail in any way
        raise ModelError(
            f"{loaded.run.name}: its model cannot answer ({type(error).__name__}: {excerpt(error)}); put back a whole"
            " copy of the run, or make it again"
        ) from error


def _predict(loaded: LoadedRun, rows: Sequence[tuple[str, ...]], tasks: Sequence[str]) -> list[list[Prediction]]:
    columns = tuple(list(column) for column in zip(*rows, strict=True))
    outputs: dict[str, Rows] = {}
    for group in _same_pass(loaded, tasks):
        outputs |= _compute(loaded, group, columns, None, Scoring())[0]
    answers = [to_predictions(loaded.saved.tasks[task], outputs[task], rows) for task in tasks]
    return [list(row) for row in zip(*answers, strict=True)]


def _same_pass(loaded: LoadedRun, tasks: Sequence[str]) -> list[list[str]]:
    """Tasks whose encoder values and way of encoding are the same."""
    groups: dict[Any, list[str]] = {}
    for task in tasks:
        view = loaded.bound.views[task]
        encoder = tuple(key for name, key in view.items() if not name.startswith("heads."))
        known = loaded.saved.tasks[task]
        groups.setdefault((encoder, known.is_dual, known.kind_of.by_word, known.windows), []).append(task)
    return list(groups.values())


@dataclass(frozen=True)
class Scoring:
    """Which examples are computed together: batches within chunks, of the longest texts first; None is one chunk."""

    batch_size: int = 64
    chunk: int | None = None


@contextmanager
def _one_thread() -> Iterator[None]:
    """Meanwhile, sums come out as in a run, whose workers have one thread each."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def score_examples(loaded: LoadedRun, task: Task, examples: Examples, how: Scoring | None = None) -> Scores:
    """Score one task on examples at hand."""
    return _score_sets(loaded, {task.name: examples}, how or Scoring(), None)[task.name]


def _compute(
    loaded: LoadedRun, tasks: Sequence[str], texts: tuple[list[str], ...], labels: Rows | None, how: Scoring
) -> tuple[dict[str, Rows], dict[str, float]]:
    """Each task's outputs for all texts, in their order, and its summed loss; the tasks share their encoder."""
    first = loaded.saved.tasks[tasks[0]]
    tokens = encode_texts(first, texts, loaded.tokenizer, loaded.saved.max_length)
    is_labelled = labels is not None
    given: Rows = np.zeros(len(texts[0])) if labels is None else labels
    shard = TextShard(tokens, given, np.arange(len(given), dtype=np.int64))
    chunks = [shard.indices] if how.chunk is None else sorted_batches(shard, how.chunk)
    parts = [
        predict_together(loaded.bound, tasks, replace(shard, indices=chunk), how.batch_size, CPU, labelled=is_labelled)
        for chunk in chunks
    ]
    order = np.argsort(np.concatenate(chunks), kind="stable")
    outputs = {task: join_rows([part[task] for part, _ in parts])[order] for task in tasks}
    return outputs, {task: float(sum(losses[task] for _, losses in parts)) for task in tasks}


def _task(loaded: LoadedRun, name: str) -> Task:
    if name not in loaded.saved.tasks:
        raise FedmtlError(f"{loaded.run.name} has no task {name}; it has {', '.join(loaded.saved.tasks)}")
    if name not in loaded.tasks:
        from fedmtl.predict.rounds import clients_with_values

        raise FedmtlError(
            f"{loaded.run.name}: values of {name} stay at its clients; name one of them with --client:"
            f" {clients_with_values(loaded.run)}"
        )
    return loaded.saved.tasks[name]
