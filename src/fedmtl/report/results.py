"""The results: one row per task, the averages, and every metric of the last evaluation."""

from __future__ import annotations

from typing import Literal

from fedmtl.report.formats import MISSING, change, count, score
from fedmtl.report.markup import Html, escape, join, notes, table, tag
from fedmtl.report.outline import section
from fedmtl.report.record import (
    FEWEST_POINTS,
    SMALLEST_CHANGE,
    Run,
    Summary,
    Trend,
    average,
    main_metric,
    series,
    summarize,
)
from fedmtl.runs.events import EvaluationEvent
from fedmtl.runs.verdicts import NAMES

_ARROW = {"rising": "↗", "falling": "↘"}
EMPTY = Html()
_HEAD = ("Task", "Start", "Best", "Final", "Trend")
_TREND_NOTE = (
    f"Trend: the change of a least-squares line over the last third of the evaluated rounds, at least {FEWEST_POINTS},"
    " ± its standard error, from the scatter about the line. “Rising” or “falling” stands there when the change is"
    f" {score(SMALLEST_CHANGE)} or more and differs from zero at the 95 % level; without a word, no direction can be"
    " told from these rounds."
)


def results(run: Run, beside: Html = EMPTY) -> Html:
    """The section of scores; `beside` is a picture that stands next to the first table where there is space."""
    rows = [_task_row(run, name) for task in run.tasks for name in run.sets(task)]
    rows.append(_average_row(run, "overall", "mean of main metrics"))
    rows.append(_average_row(run, "classification", "mean accuracy"))
    return section(
        "results",
        tag(
            "div",
            table("Main metric of each task over the run", _HEAD, rows, words={4}, class_="results"),
            beside,
            class_="beside",
        ),
        notes((*_marked_notes(run), *_undefined_notes(run), *_stop_notes(run), _TREND_NOTE)),
        *_compared(run),
        *_all_metrics(run),
    )


def _compared(run: Run) -> list[Html]:
    """What baselines score beside the run's last evaluation, where there are any."""
    rows = []
    for task in run.tasks:
        metric, last = main_metric(run, task), last_evaluation(run, task)
        others = [event for event in run.baselines if event.task == task]
        names = list(dict.fromkeys((metric, *(("mse",) if run.task(task).score_range else ()))))
        for event in others:
            fitted = MISSING if event.train is None else f"{count(event.train)} of {count(event.available)}"
            scores = ", ".join(f"{name} {score(event.metrics.get(name))}" for name in names)
            rows.append((task, NAMES.get(event.name, event.name), scores, fitted, count(event.examples)))
        if others and last is not None:
            scores = ", ".join(f"{name} {score(last.metrics.get(name))}" for name in names)
            rows.append((task, tag("b", "this run"), scores, MISSING, count(last.examples)))
    head = ("Task", "Compared with", "Score", "Fitted to", "Scored on")
    return [table("What simpler models score", head, rows, words={1, 2}, class_="compared")] if rows else []


def last_evaluation(run: Run, task: str) -> EvaluationEvent | None:
    """The task's last evaluation; None when it was never scored."""
    events = run.evaluations.get(task)
    return events[max(events)] if events else None


def task_name(run: Run, task: str) -> Html:
    if not run.task(task).auxiliary:
        return escape(task)
    aside = tag("span", "auxiliary", class_="aside", title="trains the encoder, does not count in the averages")
    return join((task, aside), " ")


def _task_row(run: Run, task: str) -> list[object]:
    metric = main_metric(run, task)
    events = run.evaluations.get(task, {})
    summary = summarize(series(run, task, metric))
    final = events.get(summary.final_round or 0)
    values = (
        _value(summary.start, events.get(0), metric),
        _value(summary.best, events.get(summary.best_round or 0), metric),
        _value(summary.final, final, metric),
    )
    remarks = [] if final is None else [final.marked or (final.undefined or {}).get(metric)]
    if summary.final_round is not None and summary.final_round < run.last_round:
        remarks.append(f"round {summary.final_round}")
    return _row(task_name(run, task), metric, summary, values, ", ".join(filter(None, remarks)))


def _average_row(run: Run, name: Literal["overall", "classification"], metric: str) -> list[object]:
    summary = summarize(average(run, name))
    values = (score(summary.start), score(summary.best), score(summary.final))
    remark = "a task has no score" if summary.final is None and summary.final_round is not None else ""
    return _row(tag("em", name.capitalize()), metric, summary, values, remark)


def _row(name: Html, metric: str, summary: Summary, values: tuple[str, str, str], remark: str) -> list[object]:
    """Start, best and final, each with what belongs to it in small print below."""
    start, best, final = values
    at = "" if summary.best_round is None else f"round {summary.best_round}"
    return [
        join((name, tag("small", metric))),
        start,
        join((best, tag("small", at, class_="at"))),
        join((tag("strong", final), tag("small", remark))),
        _trend(summary.trend),
    ]


def _value(value: float | None, event: EvaluationEvent | None, metric: str) -> Html:
    """A score, with a dagger where its evaluation is marked and the reason where it is undefined."""
    if event is None:
        return tag("span", MISSING, title="not evaluated")
    if value is None:
        reason = (event.undefined or {}).get(metric, "undefined, no reason recorded")
        return tag("span", MISSING, title=reason)
    if event.marked:
        return join((score(value), tag("sup", "†", title=event.marked)))
    return escape(score(value))


def _trend(found: Trend | None) -> Html:
    if found is None:
        return join((MISSING, tag("small", f"fewer than {FEWEST_POINTS} scored rounds")))
    moved = tag("span", f"{change(found.change)} ± {score(found.error)}", class_="portion")
    rounds = tag("span", f"rounds {found.first}–{found.last}")
    if not found.word:
        return join((moved, tag("small", rounds)))
    words = tag("span", f"{_ARROW[found.word]} {found.word}", class_=f"trend {found.word}")
    return join((words, tag("small", moved, " ", rounds)))


def _shown(run: Run, task: str) -> list[EvaluationEvent]:
    """The evaluations whose scores the results show: start, best and final."""
    events = run.evaluations.get(task, {})
    summary = summarize(series(run, task, main_metric(run, task)))
    chosen = {at for at in (0, summary.best_round, summary.final_round) if at is not None}
    return [events[at] for at in sorted(chosen) if at in events]


def _marked_notes(run: Run) -> list[str]:
    found: dict[str, list[str]] = {}
    for task in run.tasks:
        for event in _shown(run, task):
            if event.marked:
                found.setdefault(event.marked, []).append(f"{task} at round {event.round}")
    return [f"† {words}: {', '.join(where)}." for words, where in found.items()]


def _undefined_notes(run: Run) -> list[str]:
    lines = []
    for task in run.tasks:
        for event in _shown(run, task):
            for metric, reason in (event.undefined or {}).items():
                lines.append(f"{MISSING} {metric} of {task} at round {event.round} is undefined: {reason}.")
    return lines


def _stop_notes(run: Run) -> list[str]:
    """Of a stopped task, its score then and now; and which round was best, if it was not the last."""
    lines = []
    for task, stop in run.stops.items():
        then = "" if stop.stop_score is None else f" (score {score(stop.stop_score)})"
        last = last_evaluation(run, task)
        now = "is not scored again"
        if last is not None and last.round > stop.round:
            now = f"scores {score(last.metrics.get(main_metric(run, task)))} after round {last.round}"
        lines.append(
            f"{task} stopped early after round {stop.round}{then}: its head and the layers that are its alone stay as"
            f" they were in round {stop.best_round}, which scored {score(stop.score)}. What it shares with other tasks"
            f" goes on; it {now}."
        )
    overall = summarize(average(run, "overall"))
    if run.stops or (overall.best_round is not None and overall.best_round != overall.final_round):
        words = "" if overall.best_round is None else f"The best overall score is that of round {overall.best_round}. "
        lines.append(
            f"{words}`fedmtl evaluate {run.name} --round best` opens the best round's model"
            f"{', of a stopped task that of its best round' if run.stops else ''}; so do predict, export, distill,"
            " prune, quantize and measure."
        )
    return lines


def _all_metrics(run: Run) -> list[Html]:
    """One table per kind of task, since their metrics differ."""
    kinds: dict[str, list[str]] = {}
    for task in run.tasks:
        if run.evaluations.get(task):
            kinds.setdefault(run.task(task).kind or "other", []).extend(run.sets(task))
    return [_metric_table(run, kind, tasks) for kind, tasks in kinds.items()]


def _metric_table(run: Run, kind: str, tasks: list[str]) -> Html:
    finals = {task: event for task in tasks if (event := last_evaluation(run, task)) is not None}
    metrics = list(dict.fromkeys(name for event in finals.values() for name in event.metrics))
    rows = [
        (
            task_name(run, task),
            event.round,
            *(_value(event.metrics.get(name), event, name) for name in metrics),
            score(event.loss),
            count(event.examples),
        )
        for task, event in finals.items()
    ]
    return table(f"Last evaluation of {kind} tasks", ("Task", "Round", *metrics, "loss", "examples"), rows)
