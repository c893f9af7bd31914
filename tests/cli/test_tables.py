"""The tables at the end of a run and of a measurement."""

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from fedmtl.cli.measure import costs_table
from fedmtl.cli.tables import results_table
from fedmtl.compress.measure.measured import Measured, Variant
from fedmtl.runs.event_lines import from_json
from fedmtl.runs.summary import summarize

TASKS = {"a": {"kind": "classification", "metric": "accuracy"}, "b": {"kind": "classification", "metric": "accuracy"}}


def scored(number, first, second):
    yield {"event": "evaluation", "round": number, "task": "a", "metrics": {"accuracy": first}}
    yield {"event": "evaluation", "round": number, "task": "b", "metrics": {"accuracy": second}}
    mean = (first + second) / 2
    yield {"event": "round", "round": number, "overall": mean, "classification": mean}


def lines(table):
    console = Console(width=100)
    with console.capture() as captured:
        console.print(table)
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in captured.get().splitlines() if "│" in line]


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
