"""What a run is compared with: something simpler, fitted to the same training examples in one process.

`constant` is the majority class or the mean score. `tfidf` is a linear model (scikit-learn's logistic regression, for
scores ridge regression) on TF-IDF of words, `frozen` the same on what the untrained encoder makes of the texts. They
are fitted once, after the last round, so that no bit of the training depends on them, to a sample of the texts that is
drawn before the texts are dropped. `alone` and `single` are whole runs of another mode, and come before this one.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedmtl.config import Config
from fedmtl.config.schema import Baseline, Mode
from fedmtl.errors import FedmtlError
from fedmtl.runs.event_lines import Event, Observer
from fedmtl.runs.events import BaselineEvent, EvaluationEvent, RoundEvent
from fedmtl.runs.folder import RunFolder
from fedmtl.runs.log import read_events
from fedmtl.runs.summary import summarize
from fedmtl.seeds import derive_seed
from fedmtl.tasks.examples import Examples, join_examples
from fedmtl.tasks.metrics import Scores, score, sum_predictions
from fedmtl.tasks.task import Task

if TYPE_CHECKING:
    from fedmtl.tasks.load import TaskData

Array = npt.NDArray[Any]
AUTO: tuple[Baseline, ...] = ("constant", "tfidf", "frozen")
# Whole runs of another mode on the same data and budget.
MODES: Mapping[Baseline, Mode] = {"alone": "local", "single": "federated_single_task"}
# Texts of a task that wait for the end of a run: some ten megabytes.
MOST_TRAIN, MOST_VALIDATION = 20_000, 10_000
# Of the encoder's passes over examples in a run, the share that `frozen` may add; one of training costs three.
SHARE, STEP, FEWEST_PASSES = 0.1, 3, 2_000
# A linear model's cost grows with its labels: above these, fewer examples are used.
MOST_CELLS, MOST_WORDS = 400_000, 50_000
MISSING = (
    "not compared with {}: scikit-learn is not installed; `pip install scikit-learn`, or `evaluation.baselines: none`"
)


@dataclass(frozen=True, eq=False)
class Sample:
    """Examples of one task in random order, so that its first ones are a sample too; `available` counts train."""

    task: Task
    train: Examples
    validation: Examples
    available: int
    names: tuple[Baseline, ...]


def draw_samples(config: Config, data: Mapping[str, TaskData]) -> dict[str, Sample]:
    """The texts that baselines are fitted to, for the tasks whose kind another model's answers can be scored by."""
    samples = {}
    for name, part in data.items():
        names = wanted(config, synthetic=part.synthetic)
        labels = part.validation.labels[:0]
        if not names or not len(part.validation) or part.task.kind_of.outputs_for(part.task, labels) is None:
            continue
        trains = [part.train, *part.client_train.values()]
        train = join_examples(part.task, [replace(each, column=None) for each in trains])
        if len(train):
            seed = derive_seed(config.seed, "baseline", name)
            drawn = _drawn(train, MOST_TRAIN, seed), _drawn(part.validation, MOST_VALIDATION, seed)
            samples[name] = Sample(part.task, *drawn, len(train), names)
    return samples


def wanted(config: Config, *, synthetic: bool = False) -> tuple[Baseline, ...]:
    """The baselines that a config names, but for those that are runs themselves."""
    given = config.evaluation.baselines
    if given == "auto":
        return AUTO[:1] if synthetic else AUTO
    return () if given == "none" else tuple(name for name in AUTO if name in given)


def _drawn(examples: Examples, most: int, seed: int) -> Examples:
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(examples))
    return examples.take(order[:most])


# After the last round


def compare(
    config: Config, samples: Mapping[str, Sample], device: str, events: Sequence[Event]
) -> Iterable[Event | str]:
    """Fit what is not among the events yet: a BaselineEvent each, or a sentence that says what is not compared."""
    known = {(event.task, event.name) for event in events if isinstance(event, BaselineEvent)}
    missing = {name: [one for one in sample.names if (name, one) not in known] for name, sample in samples.items()}
    for name, sample in samples.items():
        if "constant" in missing[name]:
            yield _event(sample, "constant", lambda s: (_constant(s.task, s.train.labels, len(s.validation)), s))
    linear: list[Baseline] = [one for one in AUTO[1:] if any(one in names for names in missing.values())]
    if not linear:
        return
    try:
        import sklearn  # noqa: F401
    except ImportError:
        yield MISSING.format(" and ".join({"tfidf": "TF-IDF", "frozen": "the frozen encoder"}[one] for one in linear))
        return
    for name, sample in samples.items():
        if "tfidf" in missing[name]:
            yield _event(sample, "tfidf", _tfidf)
    frozen = {name: _affordable(sample, events) for name, sample in samples.items() if "frozen" in missing[name]}
    if frozen:
        encoder = _Frozen(config, {name: sample.task for name, sample in frozen.items()}, device)
        for sample in frozen.values():
            yield _event(sample, "frozen", encoder.answers)


def _event(sample: Sample, name: Baseline, fit: Any) -> BaselineEvent:
    begun = time.perf_counter()
    answers, used = fit(sample)
    scores = _scores(sample.task, answers, used.validation.labels)
    return BaselineEvent(
        task=sample.task.name,
        name=name,
        metrics=scores.metrics,
        train=len(used.train),
        available=sample.available,
        examples=scores.examples,
        seconds=time.perf_counter() - begun,
    )


def _scores(task: Task, answers: Array, labels: Array) -> Scores:
    outputs = task.kind_of.outputs_for(task, answers)
    assert outputs is not None, "other kinds have no sample"
    return score(task, sum_predictions(task, outputs, labels, 0.0, keep_pairs=True))


def _constant(task: Task, labels: Array, count: int) -> Array:
    best = np.bincount(labels).argmax() if task.kind_of.has_labels else labels.mean(dtype=np.float64)
    return np.full(count, best)


def _fit_linear(task: Task, train: Any, labels: Array, validation: Any, *, sparse: bool) -> Array:
    """The answers of a linear model; features are words' weights (sparse), or an encoder's, which are scaled first."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.preprocessing import StandardScaler

    if len(np.unique(labels)) == 1:
        return _constant(task, labels, validation.shape[0])
    if not sparse:
        scaler = StandardScaler().fit(train)
        train, validation = scaler.transform(train), scaler.transform(validation)
    if not task.kind_of.has_labels:
        # Wide features on few examples want a strong prior; a predicted score is one of the scale.
        ridge = Ridge(alpha=1.0 if sparse else float(train.shape[1]))
        return np.asarray(ridge.fit(train, labels.astype(np.float64)).predict(validation)).clip(0.0, 1.0)
    with warnings.catch_warnings():
        # After so many steps the answers hardly change any more.
        warnings.simplefilter("ignore", ConvergenceWarning)
        # That there are about as many labels as examples was said when the data was looked over.
        warnings.filterwarnings("ignore", "The number of unique classes", UserWarning)
        logistic = LogisticRegression(C=3.0 if sparse else 0.01, max_iter=200)
        found: Array = logistic.fit(train, labels).predict(validation)
    return found


def _fewer(sample: Sample) -> Sample:
    most = max(FEWEST_PASSES, MOST_CELLS // max(2, len(sample.task.labels)))
    return _first(sample, most, len(sample.validation))


def _first(sample: Sample, train: int, validation: int) -> Sample:
    return replace(
        sample,
        train=sample.train.take(range(min(train, len(sample.train)))),
        validation=sample.validation.take(range(min(validation, len(sample.validation)))),
    )


def _tfidf(sample: Sample) -> tuple[Array, Sample]:
    from sklearn.feature_extraction.text import TfidfVectorizer

    used = _fewer(sample)
    # Whatever a text has is a word: one letter, and signs alone.
    words = TfidfVectorizer(sublinear_tf=True, max_features=MOST_WORDS, token_pattern=r"(?u)\w+|[^\w\s]+")
    words.fit([text for column in used.train.texts for text in column])
    train, validation = (
        _word_features(sample.task, [words.transform(column) for column in part.texts])
        for part in (used.train, used.validation)
    )
    return _fit_linear(sample.task, train, used.train.labels, validation, sparse=True), used


def _word_features(task: Task, texts: list[Any]) -> Any:
    """Of a pair: where its texts differ, what they share, how much; a label may also depend on which text has what."""
    if len(texts) == 1:
        return texts[0]
    from scipy import sparse

    first, second = texts
    both = first.multiply(second)
    parts = [abs(first - second), both, sparse.csr_matrix(both.sum(axis=1))]
    return sparse.hstack([*(texts if task.kind_of.has_labels else ()), *parts]).tocsr()


def _affordable(sample: Sample, events: Iterable[Event]) -> Sample:
    """As many of the examples as a bounded share of the run's work pays for, a third of them for validation."""
    work = 0
    for event in events:
        if isinstance(event, RoundEvent):
            work += STEP * (event.seen or {}).get(sample.task.name, 0)
        elif isinstance(event, EvaluationEvent) and event.task == sample.task.name:
            work += event.examples or 0
    passes = max(FEWEST_PASSES, int(SHARE * work))
    validation = min(len(sample.validation), passes // 3)
    return _first(_fewer(sample), passes - validation, validation)


class _Frozen:
    """The encoder of a config as it was before any training: the mean over tokens, the texts of a pair apart."""

    def __init__(self, config: Config, tasks: Mapping[str, Task], device: str) -> None:
        import torch

        from fedmtl.model.multitask import open_model

        plain = {
            name: replace(task, pair="dual", pool="mean", head=None, head_start="fresh") for name, task in tasks.items()
        }
        added = {"lora": None, "adapters": None, "start_from": None}
        self._model_config = config.model.model_copy(update=added)
        is_plain = config.compute.encoder == "plain"
        self._encoder, self._model = open_model(self._model_config, plain, config.seed, plain=is_plain)
        self._device, self._tasks = torch.device(device), plain
        self._model.to(self._device)

    def answers(self, sample: Sample) -> tuple[Array, Sample]:
        """The linear model's answers to the validation examples; each text is encoded once."""
        task = self._tasks[sample.task.name]
        train, validation = (self._features(task, part) for part in (sample.train, sample.validation))
        return _fit_linear(task, train, sample.train.labels, validation, sparse=False), sample

    def _features(self, task: Task, examples: Examples) -> Array:
        import torch

        from fedmtl.model.multitask import pair_features
        from fedmtl.tasks.batches import Shard, collate, sorted_batches
        from fedmtl.tasks.tokens import tokenize
        from fedmtl.training.local import to_tensors

        rows: dict[int, Array] = {}
        with tempfile.TemporaryDirectory() as cache, torch.inference_mode():
            length = self._model_config.max_length
            folder, _ = tokenize(task, examples.texts, self._encoder.tokenizer, length, Path(cache))
            shard = Shard(folder, examples.labels, np.arange(len(examples), dtype=np.int64))
            for batch in sorted_batches(shard, 64):
                inputs, _ = to_tensors(collate(shard, batch, self._model.pad_id, None), self._device)
                vectors = self._model.vectors(task.name, inputs)
                vectors = pair_features(*vectors.chunk(2)) if task.is_dual else vectors
                rows.update(zip(batch.tolist(), vectors.float().cpu().numpy(), strict=True))
        return np.stack([rows[row] for row in range(len(examples))])


# Before the first round


def train_modes(config: Config, run: RunFolder, log: Observer) -> None:
    """Make the runs of other modes that `evaluation.baselines` names, in `baselines/` of the run folder, once.

    One that was interrupted goes on; what it scored becomes BaselineEvents of this run.
    """
    from fedmtl.experiment.run import resume_run, start_run

    given = config.evaluation.baselines
    known = {event.name for event in read_events(run) if isinstance(event, BaselineEvent)}
    for name, mode in MODES.items():
        if isinstance(given, str) or name not in given or name in known or config.mode == mode:
            continue
        other = RunFolder(run.path / "baselines" / name)
        if other.events.exists():
            done = resume_run(other, compares=False)
        else:
            done = start_run(_of_mode(config, mode, other.path.parent), name, compares=False)
        if done.name != name:
            raise FedmtlError(f"{other.path}: is no run; delete it, and resume {run.name}")
        summary = summarize(read_events(done), name)
        for task, result in summary.tasks.items():
            log(BaselineEvent(task=task, name=name, metrics=dict(result.final), seconds=summary.seconds))


def _of_mode(config: Config, mode: Mode, output: Path) -> Config:
    """The same run in another mode, without what moves layers between tasks or needs weights at the server."""
    return config.model_copy(
        update={
            "mode": mode,
            "output": str(output),
            # What it scores is in the summary of the run that it is compared with.
            "track": {},
            "evaluation": config.evaluation.model_copy(update={"baselines": "none"}),
            "sharing": config.sharing.model_copy(update={"adaptive": None}),
            # Where nothing is averaged, there is nothing to hide in a sum.
            "privacy": config.privacy.model_copy(update={"client": None} if mode == "local" else {}),
            "training": config.training.model_copy(update={"pruning": None} if mode == "local" else {}),
        }
    )
