"""The live display: the same lines as elsewhere, with bars that leave nothing behind."""

import io
import re
from dataclasses import replace

import pytest

from fedmtl.cli.display import LiveDisplay, PlainDisplay
from fedmtl.cli.progress import Detail
from fedmtl.cli.terminal import Terminal
from fedmtl.runs.events import (
    AggregationEvent,
    AnswerEvent,
    ClientFacts,
    ClientsEvent,
    EarlyStopEvent,
    EvaluationEvent,
    FailureEvent,
    LayerMove,
    ResumedEvent,
    RoundEvent,
    ScopeRule,
    SharingEvent,
    StartEvent,
    TaskFacts,
    WarningEvent,
)

FACTS = TaskFacts(kind="classification", metric="accuracy")
TASKS = dict.fromkeys(("sentiment_of_reviews", "paraphrase_of_questions"), FACTS)
START = StartEvent(version="1", mode="federated", device="cpu", workers=0, seed=0, num_rounds=2, tasks=TASKS)


def evaluation(number: int, task: str, accuracy: float | None) -> EvaluationEvent:
    return EvaluationEvent(round=number, task=task, metrics={"accuracy": accuracy})


def round_end(number: int) -> RoundEvent:
    return RoundEvent(
        round=number,
        clients=2,
        failures=1,
        tasks=dict.fromkeys(TASKS, 1),
        bytes_up=2_000_000,
        bytes_down=3_000,
        seconds=1.0,
    )


def told(display: PlainDisplay) -> None:
    display(START)
    display(ClientsEvent(clients=dict.fromkeys("abcd", ClientFacts())))
    for number, accuracy in ((0, None), (1, 0.75), (2, 0.5)):
        for client in "abc":
            display(AnswerEvent(round=number, client=client, samples=0))
        for task in TASKS:
            display(evaluation(number, task, accuracy))
        display(round_end(number))


def test_bars_follow_rounds_and_clients():
    display = LiveDisplay(Terminal(file=io.StringIO(), force_terminal=True, width=80))
    told(display)
    rounds, clients = display.progress.tasks
    assert (rounds.completed, rounds.total) == (2, 2)
    # Four clients were known; three were asked in the last round.
    assert (clients.completed, clients.total) == (0, 3)


def test_the_scores_stand_below_with_the_best():
    display = LiveDisplay(Terminal(file=io.StringIO(), force_terminal=True, width=80))
    told(display)
    seen = io.StringIO()
    Terminal(file=seen, width=80).print(display._view())
    header, first = seen.getvalue().splitlines()[:2]
    assert header.split() == ["task", "metric", "start", "best", "now"]
    assert first.split() == ["sentiment_of_reviews", "accuracy", "–", "0.750", "0.500"]


def test_a_long_line_is_cut_at_words_in_a_terminal_only():
    wide, narrow = io.StringIO(), io.StringIO()
    told(PlainDisplay(Terminal(file=wide, width=80, soft_wrap=True), Detail.verbose))
    told(LiveDisplay(Terminal(file=narrow, width=80), Detail.verbose))
    line = "  after round 1: sentiment_of_reviews accuracy 0.750, paraphrase_of_questions accuracy 0.750"
    assert f"{line} (up 2.0 MB, down 3.0 kB, 1.0 s)\n" in wide.getvalue()
    assert max(map(len, narrow.getvalue().splitlines())) <= 80
    assert "\n    accuracy 0.750 (up 2.0 MB, down 3.0 kB, 1.0 s)\n" in narrow.getvalue()


def test_rounds_told_before_a_resume_are_not_told_again():
    seen = io.StringIO()
    display = PlainDisplay(Terminal(file=seen, width=80, soft_wrap=True))
    display.name = "first"
    display(ResumedEvent(round=1, broken=["round-0002.json: is broken"], missing="round 0"))
    said = seen.getvalue()
    assert said.splitlines() == [
        "  round-0002.json: is broken",
        "  the events of round 0 are lost; the weights are not",
        "first goes on after round 1",
    ]
    told(display)
    assert "round 1" not in seen.getvalue().removeprefix(said)
    assert "round 2/2: sentiment_of_reviews accuracy 0.500" in seen.getvalue()


def printed(detail: Detail) -> list[str]:
    seen = io.StringIO()
    display = PlainDisplay(Terminal(file=seen, width=80, soft_wrap=True), detail)
    told(display)
    display(WarningEvent(words="one class only"))
    display(FailureEvent(round=3, client="clinic", reason="no answer"))
    display(EarlyStopEvent(round=3, task="sentiment_of_reviews", best_round=1, score=0.75))
    display(round_end(3))
    return seen.getvalue().splitlines()


def test_a_round_is_one_line_and_the_first_names_the_metrics():
    assert printed(Detail.short)[1:4] == [
        "round 0/2: sentiment_of_reviews accuracy –, paraphrase_of_questions accuracy – (1.0 s)",
        "round 1/2: sentiment_of_reviews 0.750, paraphrase_of_questions 0.750 (1.0 s)",
        "round 2/2: sentiment_of_reviews 0.500, paraphrase_of_questions 0.500 (1.0 s)",
    ]


def test_quiet_leaves_warnings_and_failures():
    assert printed(Detail.quiet) == ["  warning: one class only", "  clinic failed in round 3: no answer"]


def test_verbose_says_that_a_task_stopped_below_the_heading_of_its_round():
    lines = printed(Detail.verbose)
    heading = lines.index("=== Round 3/2 ===")
    assert lines[heading + 1].startswith("Aggregating updates from 2 clients")
    assert lines[-2].startswith("  sentiment_of_reviews: stopped")
    assert lines[-1].startswith("  after round 3: not evaluated")


@pytest.mark.parametrize(("clients", "workers", "says"), [("a", 2, True), ("ab", 2, False), ("a", 0, False)])
def test_a_run_with_one_client_says_that_one_core_trains(clients, workers, says):
    seen = io.StringIO()
    display = PlainDisplay(Terminal(file=seen, width=80, soft_wrap=True))
    display(replace(START, workers=workers))
    display(ClientsEvent(clients=dict.fromkeys(clients, ClientFacts())))
    assert ("one client: its steps follow one another on one core" in seen.getvalue()) == says


def test_the_lines_of_a_server_begin_with_their_date_and_time():
    seen = io.StringIO()
    display = PlainDisplay(Terminal(file=seen, width=200, soft_wrap=True))
    display.has_times = True
    display(START)
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d fedmtl 1, federated", seen.getvalue())


def test_a_capability_says_its_line_itself():
    seen = io.StringIO()
    display = PlainDisplay(Terminal(file=seen, width=200, soft_wrap=True))
    display(EarlyStopEvent(round=3, task="sst2", best_round=1, score=0.75))
    facts = {"agreement": {}, "measured": {}}
    moved = LayerMove(layer="encoder.layer.1", before="all", after="task", reason="tasks disagree", **facts)
    stayed = LayerMove(layer="encoder.layer.0", before="all", after="all", reason="too early", **facts)
    display(SharingEvent(round=3, layers=[stayed, moved]))
    # Below the line of their round, which is not over yet.
    assert seen.getvalue() == ""
    display(round_end(3))
    assert seen.getvalue().splitlines() == [
        "round 3: not evaluated (1.0 s)",
        "  sst2: stopped; what the server has of it alone stays as in round 1 (0.750)",
        "  encoder.layer.1: all -> task, tasks disagree",
    ]


def test_where_no_rule_can_help_is_said_in_quiet_too():
    for detail in Detail:
        seen = io.StringIO()
        scopes = {"task:a": ScopeRule(rule="multi_krum", clients=1)}
        PlainDisplay(Terminal(file=seen, width=80, soft_wrap=True), detail)(
            AggregationEvent(round=0, scopes=scopes, helpless=["task:a"])
        )
        assert seen.getvalue().endswith("fewer than three clients share a scope: task:a (1)\n")
