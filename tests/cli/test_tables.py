"""The table at the end of a run."""

from dataclasses import replace

from rich.console import Console

from fedmtl.cli.tables import results_table
from fedmtl.runs.event_lines import from_json
from fedmtl.runs.summary import summarize

TASKS = {"a": {"kind": "classification", "metric": "accuracy"}, "b": {"kind": "classification", "metric": "accuracy"}}


def scored(number, first, second):
    yield {"event": "evaluation", "round": number, "task": "a", "metrics": {"accuracy": first}}
    yield {"event": "evaluation", "round": number, "task": "b", "metrics": {"accuracy": second}}
    mean = (first + second) / 2
    yield {"event": "round", "round": number, "overall": mean, "classification": mean}


def lines(summary):
    console = Console(width=100)
    with console.capture() as captured:
        console.print(results_table(summary))
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in captured.get().splitlines() if "│" in line]


def test_the_averages_stand_below_the_tasks_with_their_best_round():
    records = [{"event": "start", "tasks": TASKS}, *scored(0, 0.5, 0.3), *scored(1, 0.9, 0.7), *scored(2, 0.8, 0.6)]
    summary = summarize([from_json(event) for event in records], "demo")
    assert lines(summary)[-2:] == [
        ["all tasks", "overall", "0.400", "0.800 @1", "0.700"],
        ["", "classification", "0.400", "0.800 @1", "0.700"],
    ]
    # One task is its average.
    assert lines(replace(summary, tasks={"a": summary.tasks["a"]})) == [["a", "accuracy", "0.500", "0.900 @1", "0.800"]]
