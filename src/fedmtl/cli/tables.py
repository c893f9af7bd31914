"""A run's numbers become tables and lines for the terminal, among them the guide's log lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from fedmtl.runs.event_lines import Event
    from fedmtl.runs.events import Aggregated, EnergyTotals, PlanEvent, RoundEvent, StartEvent
    from fedmtl.runs.summary import Best, RunSummary
    from fedmtl.tasks.metrics import Scores


def number(value: float | None) -> str:
    """Three decimals, or a dash for what is undefined."""
    return "–" if value is None else f"{value:.3f}"


def amount(num_bytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def results_table(summary: RunSummary) -> Table:
    """Every task's metrics, and the averages over tasks, before, at their best and after."""
    synthetic = ", synthetic data" if summary.synthetic else ""
    rounds = "1 round" if summary.rounds == 1 else f"{summary.rounds} rounds"
    table = Table(
        title=f"{summary.name}: {rounds} in {duration(summary.seconds)}{synthetic}",
        title_justify="left",
    )
    table.add_column("task")
    table.add_column("metric")
    for column in ("before", "best", "after"):
        table.add_column(column, justify="right")
    for task, result in summary.scored.items():
        for position, metric in enumerate(result.final):
            table.add_row(
                task if position == 0 else "",
                metric,
                number(result.start.get(metric)),
                _at_round(result.best.get(metric)),
                number(result.final[metric]),
                style="bold" if metric == result.metric else "",
                end_section=position == len(result.final) - 1,
            )
    if len(summary.tasks) > 1:
        for position, (name, average) in enumerate(summary.averages.items()):
            values = (number(average.start), _at_round(average.best), number(average.final))
            table.add_row("all tasks" if position == 0 else "", name, *values)
    return table


def _at_round(best: Best | None) -> str:
    return f"{number(best.value)} @{best.round}" if best else "–"


def result_notes(summary: RunSummary, *, ends_with_best: bool = False) -> list[str]:
    """What the numbers alone would hide; `ends_with_best` says that the run's model is that of its best round."""
    marked = [f"{task} {result.marked}" for task, result in summary.tasks.items() if result.marked]
    notes = [f"after the last round, {', '.join(marked)}"] if marked else []
    passes = [f"{task} {result.passes:.2f}" for task, result in summary.tasks.items() if result.passes is not None]
    if len({result.passes for result in summary.tasks.values()}) > 1:
        notes.append(f"passes over their data: {', '.join(passes)}")
    notes += round_notes(summary, ends_with_best=ends_with_best)
    if summary.failures:
        many = len(summary.failures)
        notes.append(f"{many} {'failure' if many == 1 else 'failures'} of clients; the report names them")
    if summary.energy is not None:
        from fedmtl.runs.energy import energy_words

        notes.append(f"energy: {energy_words(summary.energy)}")
    return notes


def round_notes(summary: RunSummary, *, ends_with_best: bool = False) -> list[str]:
    """Which round was best and how to use it, and what became of tasks that were stopped early."""
    notes = []
    for task, stop in summary.stops.items():
        result = summary.tasks.get(task)
        now = number(result.final.get(result.metric)) if result else "–"
        then = number(stop.stop_score) if stop.stop_score is not None else "–"
        notes.append(
            f"{task} stopped after round {stop.round}, at {then}; what the server has of it alone is that of round"
            f" {stop.best_round}, which scored {number(stop.score)}; its last score is {now}"
        )
    best = summary.averages["overall"].best if summary.averages else None
    last = summary.averages["overall"].final if summary.averages else None
    is_last = best is None or best.round == summary.rounds or number(best.value) == number(last)
    if summary.stops or not is_last:
        where = f"best overall score {number(best.value)} after round {best.round}; " if best else ""
        if ends_with_best:
            others = [
                f"{task}'s, of round {stop.best_round}"
                for task, stop in summary.stops.items()
                if stop.best_round is not None and (best is None or stop.best_round != best.round)
            ]
            of = "that one" + (f" but for {' and '.join(others)}" if others else "") if best else " and ".join(others)
            notes.append(
                f"{where}the run's model is {of} (training.keep: best), and the table ends with the last round"
            )
            return notes
        if best and best.round == 0 and not summary.stops:
            notes.append(f"best overall score {number(best.value)} in round 0, which is before training")
            return notes
        notes.append(f"{where}`fedmtl evaluate {summary.name} --round best` opens the best round, as other commands do")
    return notes


def scores_table(scores: Mapping[str, Scores], main_metrics: Mapping[str, str]) -> Table:
    """Every task's metrics, with why one is undefined or says little."""
    has_notes = any(result.undefined or result.marked for result in scores.values())
    table = Table("task", "metric", "value", *([""] if has_notes else []))
    for name, result in scores.items():
        for position, (metric, value) in enumerate(result.metrics.items()):
            is_main = metric == main_metrics[name]
            note = result.undefined.get(metric) or (result.marked if is_main else None)
            table.add_row(
                name if position == 0 else "",
                metric,
                number(value),
                *([note or ""] if has_notes else []),
                style="bold" if is_main else "",
                end_section=position == len(result.metrics) - 1,
            )
    return table


def comparison_tables(summaries: Sequence[RunSummary], width: int) -> list[Table]:
    """Runs side by side; differences are to the first one. Numbers are never cut: where runs do not fit, more tables.

    A name that is wider than its numbers goes on in the next line.
    """
    rows = comparison_rows(summaries)
    # A cell has a line and two blanks beside it.
    sizes = [max(len(values[run]) for _, values in rows) + 3 for run in range(len(summaries))]
    left = width - max(len(label) for label, _ in rows) - 4
    tables, others = [], list(range(1, len(summaries)))
    while others:
        shown = [0, others.pop(0)]
        while others and sum(sizes[run] for run in (*shown, others[0])) <= left:
            shown.append(others.pop(0))
        table = Table(title=f"differences are to {summaries[0].name}", title_justify="left")
        table.add_column("", no_wrap=True)
        for run in shown:
            table.add_column(summaries[run].name, justify="right", overflow="fold", min_width=sizes[run] - 3)
        for label, values in rows:
            table.add_row(label, *(values[run] for run in shown))
        tables.append(table)
    return tables


def comparison_rows(summaries: Sequence[RunSummary]) -> list[tuple[str, list[str]]]:
    first = summaries[0]
    rows: list[tuple[str, list[str]]] = [("mode", [s.mode for s in summaries])]
    if any(s.status != "done" for s in summaries):
        rows.append(("status", [s.status for s in summaries]))
    metrics = {
        (task, metric): None
        for summary in summaries
        for task, result in summary.scored.items()
        for metric in result.final
    }
    for task, metric in metrics:
        values = [s.scored[task].final.get(metric) if task in s.scored else None for s in summaries]
        rows.append((f"{task} {metric}", _with_differences(values)))
    rows.append(("overall", _with_differences([s.overall for s in summaries])))
    rows.append(("classification", _with_differences([s.classification for s in summaries])))
    rows.append(
        (
            "parameters",
            [_ratio(s.parameters, first.parameters, f"{s.parameters:,}" if s.parameters else "–") for s in summaries],
        )
    )
    rows.append(("bytes up", [_ratio(s.bytes_up, first.bytes_up, amount(s.bytes_up)) for s in summaries]))
    rows.append(("bytes down", [_ratio(s.bytes_down, first.bytes_down, amount(s.bytes_down)) for s in summaries]))
    rows.append(("rounds", [str(s.rounds) for s in summaries]))
    rows.append(("seconds", [f"{s.seconds:.1f}" for s in summaries]))
    spent = [s.energy for s in summaries]
    if any(spent):
        rows.append(("CPU seconds", ["–" if one is None else f"{one.cpu_seconds:.1f}" for one in spent]))
        rows.append(("joules", ["–" if one is None else _joules(one) for one in spent]))
    rows.append(("failures", [str(len(s.failures)) for s in summaries]))
    return rows


def _joules(spent: EnergyTotals) -> str:
    return f"{spent.cpu_joules + (spent.gpu_joules or 0.0):.1f}{' (estimated)' if spent.estimated else ''}"


def _with_differences(values: Sequence[float | None]) -> list[str]:
    base = values[0]
    cells = [number(base)]
    for value in values[1:]:
        difference = f" ({value - base:+.3f})" if value is not None and base is not None else ""
        cells.append(number(value) + difference)
    return cells


def _ratio(value: int | None, base: int | None, text: str) -> str:
    return f"{text} ({value / base:.2f}x)" if value and base and value != base else text


def profile_table(events: Iterable[Event], workers: int) -> Table | None:
    """Seconds per round, the mean over rounds of training; without the first where there are more, as it warms up."""
    from fedmtl.runs.events import ProfileEvent

    rounds = [event for event in events if isinstance(event, ProfileEvent) and event.round > 0]
    shown = rounds[1:] or rounds
    if not shown:
        return None
    total = fmean(event.seconds for event in shown)
    table = Table(title=f"where a round's {total:.2f} s went", title_justify="left")
    for column in ("", "seconds", "share"):
        table.add_column(column, justify="right" if column else "left")
    for label, seconds in _means([event.server for event in shown]):
        table.add_row(label, f"{seconds:.3f}", f"{seconds / total:.1%}")
    inside = _means([event.clients for event in shown])
    if inside:
        table.add_section()
        spent = sum(seconds for _, seconds in inside)
        where = f"{workers} workers" if workers > 1 else "one worker"
        table.add_row(f"at the clients, {where} together", f"{spent:.3f}", "")
        for label, seconds in inside:
            table.add_row(f"  {label}", f"{seconds:.3f}", f"{seconds / spent:.1%}")
    return table


def _means(rounds: Sequence[Mapping[str, float]]) -> list[tuple[str, float]]:
    """What took how many seconds a round, the longest first."""
    labels = dict.fromkeys(label for spent in rounds for label in spent)
    means = ((label, fmean(spent.get(label, 0.0) for spent in rounds)) for label in labels)
    return sorted(means, key=lambda item: -item[1])


def summary_lines(start: StartEvent, plan: PlanEvent) -> list[str]:
    """The start-up summary: who shares how many parameters."""
    lines = [
        "MTL Server Model Summary:",
        f"  Base Model: {'–' if start.encoder is None else start.encoder}",
        f"  Tasks: {list(start.tasks)}",
    ]
    in_heads = {f"task:{task}": count for task, count in plan.heads.items()}
    for scope in plan.scopes:
        encoder = scope.parameters - (in_heads.get(scope.scope, 0) if scope.level == "task" else 0)
        if scope.level == "all":
            lines.append(f"  Shared Parameters: {encoder:,}")
        elif encoder and scope.level != "fixed":
            lines.append(f"  Parameters of {scope.scope.replace(':', ' ')}: {encoder:,}")
        elif scope.level == "fixed":
            lines.append(f"  Fixed Parameters: {scope.parameters:,}")
    if plan.at_clients:
        lines.append(f"  Parameters that stay at the clients: {plan.at_clients:,} in all")
    lines += [f"  Task '{task}' Head: {count:,} parameters" for task, count in plan.heads.items()]
    return [*lines, f"  Total Parameters: {plan.total or 0:,}"]


def round_lines(event: RoundEvent, start: StartEvent) -> list[str]:
    """What was averaged in a round, over whom; tasks in the config's order."""
    if event.round == 0:
        return []
    order, tasks = list(start.tasks), event.tasks
    return [
        f"=== Round {event.round}/{'–' if start.num_rounds is None else start.num_rounds} ===",
        f"Aggregating updates from {event.clients or 0} clients across {len(tasks)} tasks",
        *(f"  Task '{task}': {tasks[task]} clients" for task in order if task in tasks),
        *map(_aggregated_line, sorted(event.aggregated, key=lambda entry: _sort_key(entry, order))),
    ]


def _sort_key(entry: Aggregated, order: list[str]) -> tuple[int, int]:
    """Order what all clients share before what some share, and the heads last."""
    if entry.head is not None:
        return 2, order.index(entry.head) if entry.head in order else len(order)
    return (0 if entry.scope == "all" else 1), 0


def _aggregated_line(entry: Aggregated) -> str:
    # The guide calls a weight or a bias a parameter; in the summary above these lines a parameter is one number.
    counted = ", counted as tensors"
    if entry.head is not None:
        return (
            f"Aggregated {entry.tensors} parameters for task '{entry.head}' head from {entry.clients} clients{counted}"
        )
    if entry.scope == "all":
        return f"Aggregated {entry.tensors} shared parameters from ALL {entry.clients} clients{counted}"
    return f"Aggregated {entry.tensors} tensors of {entry.scope.replace(':', ' ')} from {entry.clients} clients"
