"""An ONNX file of ours: what is in it, and how it answers by ONNX Runtime and `tokenizers`, without torch.

It answers new texts and labelled files as `predict/run.py` does for a finished run.

Settings of ONNX Runtime: as many threads for one operator as the caller gives, by default one per core; operators one
after the other, since an encoder is a chain; all graph optimizations but one; and no spinning, so that waiting threads
leave the cores to others.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from fedmtl.errors import FedmtlError, ModelError, needs_extra
from fedmtl.foreign import excerpt, parse_record
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
from fedmtl.tasks.batches import join_rows
from fedmtl.tasks.examples import Examples
from fedmtl.tasks.metrics import Scores, score, sum_predictions
from fedmtl.tasks.sequences import Rows, Sequences
from fedmtl.tasks.task import Task, Windows, owner_of_set, read_tasks, windows_of
from fedmtl.tasks.tokens import first_pieces, mend_surrogates
from fedmtl.tasks.windows import NOWHERE, CutText, central, cut_text, rows_of_texts
from fedmtl.tasks.words import plain_text

if TYPE_CHECKING:
    from fedmtl.runs.folder import RunFolder

FORMAT = 1
FORMAT_KEY, MODEL_KEY, TOKENIZER_KEY = "fedmtl.format", "fedmtl.model", "fedmtl.tokenizer"
# Of a bundle, the folder that `export --to onnx` writes.
GRAPH = "model.onnx"
# Of a model that reads long texts in windows, the rows of each text.
WINDOWS = "windows"
INPUTS = ("input_ids", "attention_mask", "token_type_ids", WINDOWS)
BATCH = 32
# Any prime spreads ids over a vocabulary.
STRIDE = 7919
# On a CPU the fused operator takes four times as long as the sum and the norm it replaces, a tenth of a whole pass.
SLOW_FUSIONS = ["SkipLayerNormFusion"]

Row = tuple[str, ...]


class _Record(BaseModel):
    """What the file says of its model."""

    model_config = ConfigDict(extra="forbid", strict=True)

    encoder: str = ""
    tasks: dict[str, dict[str, Any]]
    max_length: int = Field(ge=1, le=1 << 20)
    parameters: int | None = None


@dataclass(frozen=True)
class OnnxModel:
    """An open file: its tasks, its tokenizer, and the session that computes; older files do not say `parameters`."""

    path: Path
    tasks: dict[str, Task]
    max_length: int
    inputs: tuple[str, ...]
    tokenizer: Any
    session: Any
    parameters: int | None = None
    padding: Mapping[str, Any] = field(default_factory=dict)
    from_left: bool = False

    @property
    def windows(self) -> Windows | None:
        """How it reads long texts in windows, where it does."""
        return windows_of(self.tasks)


def output_name(task: str) -> str:
    """The graph's output of a task; no value inside a graph is called so, whatever the task's name."""
    return f"heads.{task}"


def require(what: str, *packages: str, extra: str = "onnx") -> None:
    """Raise one line where a package of an extra is missing."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ModelError(needs_extra(what, package, extra))


def open_onnx(path: Path, threads: int | None = None) -> OnnxModel:
    """The model in a file that `export_onnx` or `quantize` wrote, or in a bundle, whose code is not run."""
    require(str(path), "onnxruntime")
    path = path / GRAPH if path.is_dir() else path
    if not path.is_file():
        raise ModelError(f"{path}: no such file; write it with `fedmtl export RUN --to onnx`")
    from tokenizers import Tokenizer

    session = open_session(path, threads)
    metadata = session.get_modelmeta().custom_metadata_map
    found = metadata.get(FORMAT_KEY)
    if found != str(FORMAT):
        which = "is not a file of fedmtl" if found is None else f"has format {found}, this version reads {FORMAT}"
        raise ModelError(f"{path}: {which}; write it anew with `fedmtl export RUN --to onnx`")
    remedy = "write it anew with `fedmtl export RUN --to onnx`"
    record = parse_record(_Record, metadata.get(MODEL_KEY, "").encode(errors="replace"), str(path), remedy, ModelError)
    tasks = read_tasks(record.tasks, str(path), ModelError)
    inputs = tuple(given.name for given in session.get_inputs())
    outputs = {given.name for given in session.get_outputs()}
    cuts = {(task.windows.stride, task.windows.most) if task.windows else None for task in tasks.values()}
    has_windows = (WINDOWS in inputs) == (cuts != {None}) and len(cuts) == 1
    if not has_windows or not set(inputs) <= set(INPUTS) or not {output_name(task) for task in tasks} <= outputs:
        raise ModelError(f"{path}: its graph is not that of its tasks; {remedy}")
    try:
        tokenizer = _bounded(Tokenizer.from_str(metadata.get(TOKENIZER_KEY, "")), record.max_length)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # its kinds are not public, and a panic in Rust is no Exception
        raise ModelError(f"{path}: its tokenizer cannot be used ({excerpt(error)}); {remedy}") from error
    padding, from_left = tokenizer.padding, tokenizer.truncation["direction"] == "left"
    if windows_of(tasks) is not None:
        # Texts are cut, and their windows filled up, behind the tokenizer.
        tokenizer.no_truncation()
        tokenizer.no_padding()
    return OnnxModel(path, tasks, record.max_length, inputs, tokenizer, session, record.parameters, padding, from_left)


def _bounded(tokenizer: Any, max_length: int) -> Any:
    """The tokenizer, which cuts at the model's length and pads to a batch's longest row, whatever its file says."""
    cut, pad = tokenizer.truncation or {}, tokenizer.padding
    if pad is None:
        raise ValueError("it does not pad")
    tokenizer.enable_truncation(max_length, direction=cut.get("direction", "right"))
    tokenizer.enable_padding(**{name: pad[name] for name in ("direction", "pad_id", "pad_type_id", "pad_token")})
    # What does not fit a length, such as more added tokens than it has, shows at a first text.
    tokenizer.encode_batch(["a b c d", ("a b c d", "e f g h")])
    return tokenizer


def open_session(model: Path | bytes, threads: int | None = None) -> Any:
    """An ONNX Runtime session on the CPU, with the settings this file names."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or len(os.sched_getaffinity(0))
    options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    source = model if isinstance(model, bytes) else str(model)
    try:
        return onnxruntime.InferenceSession(
            source, options, providers=["CPUExecutionProvider"], disabled_optimizers=SLOW_FUSIONS
        )
    except Exception as error:  # its kinds are not public
        first = str(error).strip().splitlines()[0][:160]
        where = model if isinstance(model, Path) else "the graph"
        raise ModelError(f"{where}: ONNX Runtime cannot load it; write it anew. [{first}]") from error


def feeds(model: OnnxModel, task: Task, rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """The rows' tokens as this task's call takes them: for a dual pair, all first texts, then all second."""
    encoded = _encode(model, task, rows)
    return _feeds(model, encoded, _cut(model, encoded))


def _encode(model: OnnxModel, task: Task, rows: Sequence[Row]) -> list[Any]:
    columns = [mend_surrogates(list(column)) for column in zip(*rows, strict=True)]
    if task.kind_of.by_word:
        columns = [list(map(plain_text, columns[0]))]
    # One list of texts, or of pairs.
    texts: list[Any] = columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))
    try:
        encoded: list[Any] = model.tokenizer.encode_batch(columns[0] + columns[1] if task.is_dual else texts)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust, whose message may have parts of a text
        raise ModelError(f"{model.path}: its tokenizer cannot encode a text ({type(error).__name__})") from None
    return encoded


def _cut(model: OnnxModel, encoded: Sequence[Any]) -> list[CutText] | None:
    """The windows of every text, where the model reads several."""
    if model.windows is None:
        return None
    found = []
    for row in encoded:
        text_of = np.array([NOWHERE if text is None else text for text in row.sequence_ids], dtype=np.int64)
        found.append(cut_text(text_of, model.max_length, model.windows, from_left=model.from_left))
    return found


def _feeds(model: OnnxModel, encoded: Sequence[Any], cuts: list[CutText] | None) -> dict[str, np.ndarray]:
    if cuts is not None:
        return _window_feeds(model, encoded, cuts)
    offered = {
        "input_ids": [row.ids for row in encoded],
        "attention_mask": [row.attention_mask for row in encoded],
        "token_type_ids": [row.type_ids for row in encoded],
    }
    return {name: np.asarray(offered[name], dtype=np.int64) for name in model.inputs}


def _window_feeds(model: OnnxModel, encoded: Sequence[Any], cuts: list[CutText]) -> dict[str, np.ndarray]:
    """A row for every window, and which rows are each text's."""
    columns = [(row, columns) for row, cut in zip(encoded, cuts, strict=True) for columns in cut.columns]
    shape = len(columns), max(len(each) for _, each in columns)
    ids = np.full(shape, model.padding["pad_id"], dtype=np.int64)
    types = np.full(shape, model.padding["pad_type_id"], dtype=np.int64)
    mask = np.zeros(shape, dtype=np.int64)
    for number, (row, each) in enumerate(columns):
        ids[number, : len(each)] = np.asarray(row.ids)[each]
        types[number, : len(each)] = np.asarray(row.type_ids)[each]
        mask[number, : len(each)] = 1
    rows = rows_of_texts(Sequences.of([[len(each) for each in cut.columns] for cut in cuts], np.int32))
    offered = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types, WINDOWS: rows}
    return {name: offered[name] for name in model.inputs}


def made_up_ids(rows: int, length: int, vocabulary: int) -> np.ndarray:
    """Token ids from all over the vocabulary: a text of one word would find its row in the cache."""
    ids: np.ndarray = (np.arange(rows * length, dtype=np.int64) * STRIDE % vocabulary).reshape(rows, length)
    return ids


def made_up_feeds(model: OnnxModel, rows: int, length: int) -> dict[str, np.ndarray]:
    """Rows of so many tokens without padding, from all over the vocabulary."""
    ids = made_up_ids(rows, length, model.tokenizer.get_vocab_size())
    offered = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    offered[WINDOWS] = np.arange(rows, dtype=np.int64)[:, None]
    return {name: offered[name] for name in model.inputs}


def compute(model: OnnxModel, tasks: Sequence[str], rows: Sequence[Row], batch: int = BATCH) -> dict[str, Rows]:
    """What each task's head says of every row, in the rows' order; tasks that encode alike share a pass."""
    answers: dict[str, list[Any]] = {task: [None] * len(rows) for task in tasks}
    for group in _alike(model, tasks):
        first = model.tasks[group[0]]
        for indices in _batches(rows, batch):
            encoded = _encode(model, first, [rows[index] for index in indices])
            cuts, of_words = _cut(model, encoded), first.kind_of.by_word
            for task, outputs in zip(group, run(model, group, _feeds(model, encoded, cuts)), strict=True):
                of_texts = _joined_windows(outputs, cuts) if of_words and cuts is not None else outputs
                for number, (index, output) in enumerate(zip(indices, of_texts, strict=True)):
                    text, cut = rows[index][0], None if cuts is None else cuts[number]
                    answers[task][index] = _of_words(output, text, encoded[number], cut) if of_words else output
    return {task: _joined(model.tasks[task], outputs) for task, outputs in answers.items()}


def _joined_windows(outputs: np.ndarray, cuts: Sequence[CutText]) -> Iterator[np.ndarray]:
    """For every text the outputs of the tokens of all its windows, end to end."""
    begin = 0
    for cut in cuts:
        yield np.concatenate([outputs[begin + n, : len(columns)] for n, columns in enumerate(cut.columns)])
        begin += len(cut.columns)


def _of_words(outputs: np.ndarray, text: str, tokens: Any, cut: CutText | None) -> np.ndarray:
    """The row of every word's first piece, zeros for a word without one; of several windows, of the most central."""
    columns = np.array(first_pieces(text, tokens.offsets), dtype=np.int64)
    if cut is not None:
        columns = np.where(columns >= 0, central(cut, len(tokens.ids))[columns], NOWHERE)
    found: np.ndarray = np.where((columns >= 0)[:, None], outputs[columns], np.float32(0))
    return found


def _joined(task: Task, outputs: list[Any]) -> Rows:
    if not task.kind_of.by_word:
        return np.stack(outputs) if outputs else np.zeros((0, 1), np.float32)
    return join_rows([task.kind_of.no_outputs(task), *(Sequences(one, np.array([0, len(one)])) for one in outputs)])


def run(model: OnnxModel, tasks: Sequence[str], given: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The named heads' outputs; the runtime may leave out the rest of the graph (onnxruntime 1.31 computes all)."""
    import onnxruntime

    options = onnxruntime.RunOptions()
    options.only_execute_path_to_fetches = True
    outputs: list[np.ndarray] = model.session.run([output_name(task) for task in tasks], given, options)
    return outputs


def _alike(model: OnnxModel, tasks: Sequence[str]) -> list[list[str]]:
    groups: dict[tuple[bool, bool], list[str]] = {(False, False): []}
    for task in tasks:
        known = model.tasks[task]
        groups.setdefault((known.is_dual, known.kind_of.by_word), []).append(task)
    return [group for group in groups.values() if group]


def _batches(rows: Sequence[Row], size: int) -> Iterator[list[int]]:
    """Yield the indices of rows of similar length, longest first."""
    order = sorted(range(len(rows)), key=lambda index: -sum(map(len, rows[index])))
    for start in range(0, len(order), size):
        yield order[start : start + size]


def answerable(model: OnnxModel, num_texts: int, task: str | None = None) -> list[str]:
    """The tasks that take this many texts, in the file's order."""
    if task is None:
        return tasks_on(model.path.name, model.tasks, num_texts)
    check_texts(_task(model, task), num_texts)
    return [task]


def predict_texts(model: OnnxModel, rows: Sequence[Row], tasks: Sequence[str]) -> list[list[Prediction]]:
    """For every row of one or two texts, each task's answer; tasks that share the encoder share its pass."""
    outputs = compute(model, tasks, rows)
    answers = [to_predictions(model.tasks[task], outputs[task], rows) for task in tasks]
    return [list(row) for row in zip(*answers, strict=True)]


def evaluate_file(
    model: OnnxModel, task: str, path: Path, by: str | None = None, sink: Sink | None = None
) -> dict[str, Scores]:
    """Score one task on a labelled file that has the task's columns; with `by`, also each value of that column."""
    return _score_sets(model, labelled_sets(_task(model, task), path, by), sink)


def evaluate_test(model: OnnxModel, task: str | None = None, sink: Sink | None = None) -> dict[str, Scores]:
    """Score on the test files of the run in whose folder the file lies."""
    from fedmtl.config.file import load_config

    config = load_config(run_of(model.path).config)
    return _score_sets(model, labelled_test_sets(model.path.name, config, known_tasks(model, task)), sink)


def evaluate_validation(
    model: OnnxModel, task: str | None = None, sink: Sink | None = None, warn: Callable[[str], None] = warnings.warn
) -> dict[str, Scores]:
    """Score on the validation examples of the run in whose folder the file lies; a task may be TASK:NAME.

    `warn` is called with a line for each task whose validation is no longer cut as in the run.
    """
    # One answer needs none of this, and is there sooner without it.
    from fedmtl.config.file import load_config
    from fedmtl.tasks.load import load_tasks

    wanted = list(known_tasks(model, None if task is None else owner_of_set(task)))
    run = run_of(model.path)
    data = load_tasks(load_config(run.config), model.tasks)
    for words in changed_cuts(run, data, wanted):
        warn(words)
    return _score_sets(model, named_sets(model.path.name, data, wanted, task), sink)


def _score_sets(model: OnnxModel, sets: Mapping[str, Examples], sink: Sink | None) -> dict[str, Scores]:
    scores: dict[str, Scores] = {}
    for name, examples in sets.items():
        task = model.tasks[owner_of_set(name)]
        outputs = compute(model, [task.name], list(zip(*examples.texts, strict=True)))[task.name]
        if sink is not None:
            sink(name, task, examples, outputs)
        loss = _summed_loss(task, outputs, examples.labels)
        scores[name] = score(task, sum_predictions(task, outputs, examples.labels, loss, True))
    return scores


def _summed_loss(task: Task, outputs: Rows, labels: Any) -> float:
    """The sum over examples; that of an example with several rows is their mean, those of no token not counted."""
    if not isinstance(outputs, Sequences):
        return float(task.kind_of.plain_losses(task, outputs.astype(np.float64), labels).sum())
    is_there = outputs.values.any(axis=1)
    owners = outputs.owners()[is_there]
    losses = task.kind_of.plain_losses(task, outputs.values[is_there].astype(np.float64), labels.values[is_there])
    return float(losses @ (1.0 / np.bincount(owners, minlength=len(outputs))[owners]))


def run_of(file: Path) -> RunFolder:
    """The run whose folder holds the file."""
    from fedmtl.runs.folder import RunFolder

    for run in map(RunFolder, file.resolve().parents):
        if run.config.is_file() and run.events.is_file():
            return run
    raise FedmtlError(f"{file}: lies in no run's folder, which would name its data; give --task and --file")


def score_examples(model: OnnxModel, task: Task, examples: Examples) -> Scores:
    """Score one task on examples at hand."""
    return _score_sets(model, {task.name: examples}, None)[task.name]


def known_tasks(model: OnnxModel, task: str | None = None) -> dict[str, Task]:
    """The tasks that the file answers, or the one that is named."""
    return model.tasks if task is None else {task: _task(model, task)}


def _task(model: OnnxModel, name: str) -> Task:
    if name not in model.tasks:
        raise FedmtlError(f"{model.path.name} has no task {name}; it has {', '.join(model.tasks)}")
    return model.tasks[name]
