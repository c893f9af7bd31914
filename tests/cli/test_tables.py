"""The tables at the end of a run and of a measurement."""

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from fedmtl.cli.measure import costs_table
from fedmtl.cli.tables import comparison_tables, results_table
from fedmtl.compress.measure.measured import Measured, Variant
from fedmtl.runs.event_lines import from_json
from fedmtl.runs.summary import summarize

TASKS = {"a": {"kind": "classification", "metric": "accuracy"}, "b": {"kind": "classification", "metric": "accuracy"}}


def scored(number, first, second):
    yield {"event": "evaluation", "round": number, "task": "a", "metrics": {"accuracy": first}}
    yield {"event": "evaluation", "round": number, "task": "b", "metrics": {"accuracy": second}}
    mean = (first + second) / 2
    yield {"event": "round", "round": number, "overall": mean, "classification": mean}


def lines(table, bar="│"):
    console = Console(width=80)
    with console.capture() as captured:
        console.print(table)
    return [[cell.strip() for cell in line.split(bar)[1:-1]] for line in captured.get().splitlines() if bar in line]


def test_the_averages_stand_below_the_tasks_with_their_best_round():
    records = [{"event": "start", "tasks": TASKS}, *scored(0, 0.5, 0.3), *scored(1, 0.9, 0.7), *scored(2, 0.8, 0.6)]
    summary = summarize([from_json(event) for event in records], "demo")
    assert lines(results_table(summary))[-2:] == [
        ["all tasks", "overall", "0.400", "0.800 @1", "0.700"],
        ["", "classification", "0.400", "0.800 @1", "0.700"],
    ]
    # One task is its average.
    alone = replace(summary, tasks={"a": summary.tasks["a"]})
    assert lines(results_table(alone)) == [["a", "accuracy", "0.500", "0.900 @1", "0.800"]]


def test_runs_that_do_not_fit_beside_each_other_are_compared_in_more_tables_and_no_name_is_cut():
    records = [{"event": "start", "tasks": TASKS, "mode": "federated"}, *scored(1, 0.9, 0.7), *scored(2, 0.8, 0.6)]
    events = [from_json(event) for event in records]
    names = [f"a-rather-long-name-of-a-run-with-seed-{number}" for number in range(6)]
    tables = comparison_tables([summarize(events, name) for name in names], 80)
    console = Console(width=80)
    with console.capture() as captured:
        console.print(*tables)
    text = captured.get()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    seen = []
    for table in tables:
        assert table.columns[1].header == names[0]
        seen += [column.header for column in table.columns[2:]]
        heads = lines(table, "┃")
        # The folded names, put together again.
        assert ["".join(parts) for parts in zip(*heads, strict=True)][1:] == [c.header for c in table.columns[1:]]
    assert seen == names[1:]


def test_sizes_have_their_share_of_the_first():
    sizes = {"bert": 400_000_000, "tiny": 50_000_000}
    measured = [
        Measured(Variant(name, Path(name), "onnx"), size, size, None, 10, None, (), None)
        for name, size in sizes.items()
    ]
    assert [row[:3] for row in lines(costs_table(measured))] == [
        ["bert", "400.0 MB", "100.0%"],
        ["tiny", "50.0 MB", "12.5%"],
    ]
