"""The tables at the end of a run and of a measurement."""

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from fedmtl.cli.measure import costs_table
from fedmtl.cli.tables import comparison_rows, comparison_tables, results_table, round_notes, scores_table
from fedmtl.compress.measure.measured import Measured, Variant
from fedmtl.runs.event_lines import from_json
from fedmtl.runs.summary import summarize
from fedmtl.tasks.metrics import Scores

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


def test_further_validation_sets_stand_below_their_task_and_count_for_nothing():
    more = [
        {"event": "evaluation", "round": n, "task": "a:other", "metrics": {"accuracy": score}}
        for n, score in ((0, 0.1), (1, 0.2), (2, 0.15))
    ]
    records = [
        {"event": "start", "tasks": TASKS},
        *scored(0, 0.5, 0.3),
        *scored(1, 0.9, 0.7),
        *scored(2, 0.8, 0.6),
        *more,
    ]
    events = [from_json(event) for event in records]
    summary = summarize(events, "demo")
    assert lines(results_table(summary))[1] == ["a:other", "accuracy", "0.100", "0.200 @1", "0.150"]
    assert (summary.overall, list(summary.tasks)) == (0.7, ["a", "b"])
    assert dict(comparison_rows([summary, summarize(events, "best", "best")]))["a:other accuracy"] == [
        "0.150",
        "0.200 (+0.050)",
    ]
    assert summary.to_json()["further"] == {"a:other": {"accuracy": 0.15}}


def test_the_last_lines_say_which_round_the_model_is_of():
    records = [{"event": "start", "tasks": TASKS}, *scored(0, 0.5, 0.3), *scored(1, 0.9, 0.7), *scored(2, 0.8, 0.6)]
    summary = summarize([from_json(event) for event in records], "demo")
    (last,), (best,) = round_notes(summary), round_notes(summary, ends_with_best=True)
    assert last.endswith("`fedmtl evaluate demo --round best` opens the best round, as other commands do")
    assert best == (
        "best overall score 0.800 after round 1; the run's model is that one (training.keep: best), and the table ends"
        " with the last round"
    )


def test_the_last_lines_name_the_round_of_a_task_that_was_stopped():
    stop = {"event": "early_stop", "round": 3, "task": "b", "score": 0.9, "best_round": 2, "stop_score": 0.1}
    records = [{"event": "start", "tasks": TASKS}, *scored(0, 0.5, 0.3), *scored(1, 0.9, 0.7), *scored(2, 0.5, 0.9)]
    events = [from_json(event) for event in [*records, *scored(3, 0.6, 0.1), stop]]
    *_, last = round_notes(summarize(events, "demo"), ends_with_best=True)
    # The mean of both is best after round 1; b was stopped, and is that of round 2.
    assert "the run's model is that one but for b's, of round 2 (training.keep: best)" in last


def test_a_best_round_before_training_is_not_recommended():
    records = [{"event": "start", "tasks": TASKS}, *scored(0, 0.9, 0.7), *scored(1, 0.5, 0.3), *scored(2, 0.8, 0.6)]
    summary = summarize([from_json(event) for event in records], "demo")
    assert round_notes(summary) == ["best overall score 0.800 in round 0, which is before training"]


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


def test_scores_have_a_column_of_notes_only_where_there_is_one():
    plain = {"a": Scores({"accuracy": 0.5, "matthews": 0.1}, {}, None, 0.7, 9)}
    noted = {"b": Scores({"accuracy": 0.5, "matthews": None}, {"matthews": "one label only"}, None, 0.7, 9)}
    main = {"a": "accuracy", "b": "accuracy"}
    assert len(scores_table(plain, main).columns) == 3
    assert list(scores_table(plain | noted, main).columns[3].cells) == ["", "", "", "one label only"]
