"""What a run says of itself in plain words: where it lost to something simpler, and what to try.

Everything is read from the run's events. A difference counts where it is larger than its standard error, which follows
from the number of validation examples; scores of the same examples differ less than that, so it is a cautious one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fedmtl.errors import FedmtlError
from fedmtl.runs.event_lines import Event, last_of
from fedmtl.runs.events import (
    BaselineEvent,
    DataEvent,
    EndEvent,
    EvaluationEvent,
    RoundEvent,
    StartEvent,
    TaskFacts,
)
from fedmtl.runs.summary import LAST, best_overall, exposed, protection, task_rounds

NAMES = {
    "constant": "the majority class or the mean score",
    "tfidf": "TF-IDF with a linear model",
    "frozen": "the frozen encoder with a linear model",
    "alone": "each client alone",
    "single": "the task federated by itself",
}
# These cost whole runs, and say what sharing the encoder is worth.
WITHOUT_SHARING = ("alone", "single")
# A validation loss that rises by less than this share, or a training loss that falls by less, is no sign.
RISES, FALLS = 0.1, 0.05
# Nor is a rise of the validation loss by less than this share of the loss before training.
MATTERS = 0.02
LOWER_IS_BETTER = "mse"
# After fewer rounds than this a head may not have moved from one label yet, whatever the rate.
FEW_ROUNDS = 4


@dataclass(frozen=True)
class Verdict:
    """One line about a task; `code` says which check it is from."""

    code: str
    task: str
    words: str


@dataclass(frozen=True)
class _Record:
    """A task's scores over the run: `final` is the evaluation of the model that the run ended with."""

    task: str
    facts: TaskFacts
    metric: str
    scored: Mapping[int, EvaluationEvent]
    final: EvaluationEvent
    losses: Mapping[int, float | None]
    most_examples: int | None

    def examples(self, count: int | None) -> int:
        """How many different validation examples a score is of: clients may have scored the same ones."""
        counts = [number for number in (count, self.most_examples) if number]
        return min(counts, default=0)

    def error(self, metric: str, one: float, other: float, counts: tuple[int | None, int | None]) -> float | None:
        """The standard error of a difference of two scores."""
        both = [
            standard_error(metric, value, self.examples(count))
            for value, count in zip((one, other), counts, strict=True)
        ]
        return None if None in both else math.hypot(*(each for each in both if each is not None))


def verdicts(events: Sequence[Event], name: str = "RUN") -> list[Verdict]:
    """The lines about a run, losses first: one for each check that a task fails, then one for all that it wins.

    Last comes what protected the updates, and what is averaged over so few clients that it shows what they returned.
    """
    found: list[Verdict] = []
    won: list[str] = []
    for record in _records(events, name):
        bad = [*_of_task(record, events, name)]
        found += bad
        if not bad and (words := _lead(record, _baselines(record, events))):
            won.append(words)
    if won:
        found.append(Verdict("ahead", "", f"against the best baseline: {'; '.join(won)}"))
    found += [Verdict("privacy", "", words) for words in protection(events)]
    few = exposed(events)
    return [*found, Verdict("exposed", "", few)] if few else found


def standard_error(metric: str, value: float, examples: int) -> float | None:
    """How far a score may be off by the choice of that many examples; None for a metric that it is not known of.

    A share's is binomial, a correlation's Fisher's, that of squared errors holds for normal ones.
    """
    if examples < 4:
        return None
    if metric in ("accuracy", "f1"):
        share = (value * examples + 1) / (examples + 2)
        return math.sqrt(max(0.0, share * (1 - share)) / examples)
    if metric in ("pearson", "spearman"):
        return max(1 - value * value, 1 / examples) / math.sqrt(examples - 3)
    if metric == "matthews":
        return math.sqrt(max(1 - value * value, 1 / examples) / examples)
    return value * math.sqrt(2 / examples) if metric == LOWER_IS_BETTER else None


def _records(events: Sequence[Event], name: str) -> Iterator[_Record]:
    start, end = last_of(events, StartEvent), last_of(events, EndEvent)
    if start is None:
        return
    try:
        rounds = task_rounds(events, (end and end.keep) or LAST, name)
    except FedmtlError:
        rounds = task_rounds(events, LAST, name)
    examples = {event.task: event.validation for event in events if isinstance(event, DataEvent)}
    for task, facts in start.tasks.items():
        scored = {event.round: event for event in events if isinstance(event, EvaluationEvent) and event.task == task}
        before = [number for number in scored if number <= rounds[task]]
        if not before or max(scored) == 0:
            continue
        losses = {event.round: event.losses.get(task) for event in events if isinstance(event, RoundEvent)}
        yield _Record(task, facts, facts.metric or "", scored, scored[max(before)], losses, examples.get(task))


def _baselines(record: _Record, events: Sequence[Event]) -> list[BaselineEvent]:
    return [event for event in events if isinstance(event, BaselineEvent) and event.task == record.task]


def _of_task(record: _Record, events: Sequence[Event], name: str) -> Iterator[Verdict]:
    final, metric, task = record.final, record.metric, record.task
    value = final.metrics.get(metric)
    if value is None:
        reason = (final.undefined or {}).get(metric, "it is undefined")
        tip = "try a tenth of training.learning_rate" if "finite" in reason else _tip(record)
        yield Verdict("undefined", task, f"{task}: has no {metric} after round {final.round}, as {reason}; {tip}")
        return
    cheap = [event for event in _baselines(record, events) if event.name not in WITHOUT_SHARING]
    lost = _lost_to(record, cheap, metric) or _lost_to(record, cheap, LOWER_IS_BETTER)
    if lost:
        yield Verdict("baseline", task, f"{task}: {lost}; {_tip(record)}")
    yield from _against_rounds(record, events, name, value)
    for event in _baselines(record, events):
        other = event.metrics.get(metric)
        if (
            event.name in WITHOUT_SHARING
            and other is not None
            and _is_worse(record, metric, value, other, event.examples)
        ):
            yield Verdict(
                "sharing",
                task,
                f"{task}: sharing costs it, {_shown(metric, value)} against {other:.3f} of {NAMES[event.name]}; try"
                " upper layers by task (`sharing.rules`), or `mode: federated_single_task`",
            )


def _lost_to(record: _Record, baselines: Sequence[BaselineEvent], metric: str) -> str | None:
    """Which baselines a task loses to; a constant beats it already where the task is not clearly better."""
    value = record.final.metrics.get(metric)
    beaten_by: list[tuple[float, float, str]] = []
    doubtful = ""
    for event in baselines:
        other = event.metrics.get(metric)
        if value is None or other is None:
            continue
        error = record.error(metric, value, other, (record.final.examples, event.examples))
        if error is None:
            continue
        ahead, name = _ahead(metric, value, other), f"{_name(record, event)} ({other:.3f})"
        if ahead < -error or (ahead <= 0 and event.name == "constant"):
            beaten_by.append((ahead, error, name))
        elif ahead <= error and event.name == "constant":
            doubtful = f"{_shown(metric, value)} is not clearly better than {name}, standard error {error:.3f}"
    if not beaten_by or value is None:
        return doubtful or None
    names = [name for _, _, name in sorted(beaten_by)]
    listed = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    error = max(error for _, error, _ in beaten_by)
    words = "worse" if min(ahead for ahead, _, _ in beaten_by) < 0 else "no better"
    return f"{_shown(metric, value)} is {words} than {listed}, standard error {error:.3f}"


def _ahead(metric: str, value: float, other: float) -> float:
    return other - value if metric == LOWER_IS_BETTER else value - other


def _is_worse(record: _Record, metric: str, value: float, other: float, examples: int | None = None) -> bool:
    error = record.error(metric, value, other, (record.final.examples, examples or record.final.examples))
    return error is not None and _ahead(metric, value, other) < -error


def _against_rounds(record: _Record, events: Sequence[Event], name: str, value: float) -> Iterator[Verdict]:
    """Worse than before any training, than its best round, or ever better at its training examples only."""
    final, metric, task = record.final, record.metric, record.task
    first = record.scored.get(0)
    for one in dict.fromkeys((metric, LOWER_IS_BETTER)) if first is not None else ():
        now, before = final.metrics.get(one), first.metrics.get(one) if first else None
        if now is not None and before is not None and _is_worse(record, one, now, before):
            words = f"{task}: {_shown(one, now)} is worse than before training ({before:.3f})"
            yield Verdict("round_0", task, f"{words}; try a smaller training.learning_rate")
            break
    defined = {at: event.metrics.get(metric) for at, event in record.scored.items()}
    best_round, best = max(
        ((at, score) for at, score in defined.items() if score is not None), key=lambda pair: (pair[1], -pair[0])
    )
    if best_round not in (0, final.round) and _is_worse(record, metric, value, best):
        overall = best_overall(events)
        use = f"`fedmtl evaluate {name} --round best`, or `training.keep: best`"
        if overall is None or overall.round == final.round:
            use = f"`tasks.{task}.patience: 2` stops it at its best round"
        words = f"{task}: {_shown(metric, value)} is worse than after round {best_round} ({best:.3f})"
        yield Verdict("best_round", task, f"{words}; {use}")
    least = _overfits_since(record)
    if least is not None:
        words = f"{task}: overfits since round {least}: its training loss falls, its validation loss rose"
        change = f"from {record.scored[least].loss:.3f} to {final.loss:.3f}"
        yield Verdict(
            "overfitting", task, f"{words} {change}; try fewer rounds, `tasks.{task}.patience: 2`, or more dropout"
        )


def _overfits_since(record: _Record) -> int | None:
    """The round with the least validation loss, where the model trained on for two rounds and lost by it."""
    losses = {at: event.loss for at, event in record.scored.items() if at > 0}
    known = {at: loss for at, loss in losses.items() if loss is not None and at <= record.final.round}
    final = record.final
    if not known or final.loss is None:
        return None
    least = min(known, key=lambda at: (known[at], at))
    trained = record.losses.get(least), record.losses.get(final.round)
    if final.round < least + 2 or None in trained or final.loss <= known[least] * (1 + RISES):
        return None
    # Of a loss of nearly nothing a rise by a share is nothing either.
    untrained = record.scored[0].loss if 0 in record.scored else None
    if final.loss - known[least] < max(MATTERS * (untrained or 0.0), 0.0005):
        return None
    now, then = final.metrics.get(record.metric), record.scored[least].metrics.get(record.metric)
    is_better = then is not None and now is not None and now > then
    fell = trained[1] is not None and trained[0] is not None and trained[1] < trained[0] * (1 - FALLS)
    return least if fell and not is_better else None


def _tip(record: _Record) -> str:
    """What to try, by what the losses did."""
    trained = [loss for at, loss in sorted(record.losses.items()) if loss is not None and at > 0]
    first = record.scored.get(0)
    final, before = record.final, first.metrics.get(record.metric) if first else None
    if first is not None and first.loss and final.loss and final.loss > 1.5 * first.loss:
        return "its loss grew: try a tenth of training.learning_rate"
    value = final.metrics.get(record.metric)
    if value is not None and before is not None and _is_worse(record, record.metric, value, before):
        return "try a smaller training.learning_rate"
    if final.marked and len(trained) < FEW_ROUNDS:
        return f"its answers hardly differ after {len(trained)} rounds: train for more of them"
    if final.marked:
        return "its answers hardly differ: training.learning_rate is far too small, or far too large"
    if len(trained) > 1 and trained[-1] > trained[0] * (1 - FALLS):
        return "it hardly learned: try a larger training.learning_rate or training.head_rate"
    if record.facts.pair == "cross":
        return "try `model.pair: dual`, or more rounds"
    values = [event.metrics.get(record.metric) for _, event in sorted(record.scored.items())]
    known = [each for each in values if each is not None]
    if len(known) > 2 and known[-1] > max(known[:-1]):
        return "it was still improving: try more training.num_rounds, or a larger training.learning_rate"
    return "try another training.learning_rate or training.head_rate, or more rounds"


def _lead(record: _Record, baselines: Sequence[BaselineEvent]) -> str | None:
    """How far a task is above its best baseline, where it has one."""
    metric, value = record.metric, record.final.metrics.get(record.metric)
    cheap = [event for event in baselines if event.name not in WITHOUT_SHARING]
    known = [(score, event) for event in cheap if (score := event.metrics.get(metric)) is not None]
    if not known or value is None:
        return None
    other, best = max(known, key=lambda pair: pair[0])
    error = record.error(metric, value, other, (record.final.examples, best.examples))
    within = "" if error is None or value - other > error else f", within the standard error {error:.3f}"
    return f"{record.task} {metric} {value:.3f} is {value - other:+.3f} to {_name(record, best)} ({other:.3f}{within})"


def _name(record: _Record, event: BaselineEvent) -> str:
    if event.name == "constant":
        return "the mean score" if record.facts.score_range else "the majority class"
    return NAMES.get(event.name, event.name)


def _shown(metric: str, value: float) -> str:
    return f"{metric} {value:.3f}"
