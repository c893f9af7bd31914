"""results.csv, and both files cut back to a round."""

import pytest

from fedmtl.runs.events import EndEvent, EvaluationEvent, RoundEvent, StartEvent, TaskFacts
from fedmtl.runs.log import append_event, append_results, cut_back, read_events, results_table
from runs.two_tasks import START, round_events


class TestResults:
    def test_columns_and_values_are_as_documented(self, three_rounds):
        header, first, second, *_ = three_rounds.results.read_text().splitlines()
        assert header == (
            "round,overall,classification,clients,failures,bytes_up,bytes_down,seconds,"
            "sst2.accuracy,sst2.f1,sst2.matthews,sst2.train_loss,"
            "stsb.pearson,stsb.spearman,stsb.mse,stsb.rmse,stsb.mae,stsb.r2,stsb.train_loss"
        )
        assert first == "0,,0.0,2,1,10,20,1.5,0.0,0.25,,0.7,,,4.0,2.0,1.5,-1.0,"
        assert second == "1,,0.25,2,1,10,20,1.5,0.25,0.25,,0.7,,,4.0,2.0,1.5,-1.0,"

    def test_a_round_that_was_not_evaluated_has_empty_metrics(self, run):
        append_event(run, START)
        append_results(run, [round_events(1)[-1]])
        assert run.results.read_text().splitlines()[1] == "1,,0.5,2,1,10,20,1.5,,,,0.7,,,,,,,"

    def test_it_can_be_recomputed_from_the_events(self, three_rounds):
        assert results_table(read_events(three_rounds)) == three_rounds.results.read_text()

    def test_an_empty_table_of_results_gets_its_header_again(self, three_rounds):
        three_rounds.results.write_text("")
        append_results(three_rounds, round_events(4))
        assert three_rounds.results.read_text().startswith("round,overall,")

    @pytest.mark.parametrize(
        ("facts", "columns"),
        [
            (TaskFacts(kind="ordinal", metric="kappa", metrics=["kappa", "mae"]), ["a.kappa", "a.mae"]),
            (TaskFacts(kind="ordinal", metric="kappa"), ["a.kappa"]),
            (TaskFacts(kind="ordinal"), []),
        ],
    )
    def test_a_kind_of_task_that_is_not_built_in_has_the_columns_that_its_start_names(self, run, facts, columns):
        append_event(run, StartEvent(tasks={"a": facts}))
        metrics = {"kappa": 0.5, "mae": 1.0}
        append_results(run, [EvaluationEvent(round=1, task="a", metrics=metrics), RoundEvent(round=1)])
        header, row = run.results.read_text().splitlines()
        assert header.split(",")[8:] == [*columns, "a.train_loss"]
        assert row.split(",")[8:] == [*(str(metrics[name.removeprefix("a.")]) for name in columns), ""]
        before = run.results.read_bytes()
        for event in (EvaluationEvent(round=1, task="a", metrics=metrics), RoundEvent(round=1)):
            append_event(run, event)
        cut_back(run, 1)
        assert run.results.read_bytes() == before


class TestCutBack:
    def test_it_drops_later_rounds_and_the_end(self, three_rounds):
        cut_back(three_rounds, 1)
        events = read_events(three_rounds)
        assert [event.kind for event in events[:2]] == ["start", "plan"]
        assert [event.round for event in events[2:]] == [0] * 4 + [1] * 4
        rows = three_rounds.results.read_text().splitlines()
        assert [row.split(",")[0] for row in rows] == ["round", "0", "1"]

    def test_going_on_from_there_gives_the_files_of_a_run_never_cut(self, three_rounds):
        events, results = three_rounds.events.read_bytes(), three_rounds.results.read_bytes()
        cut_back(three_rounds, 1)
        for number in (2, 3):
            own = round_events(number, accuracy=number / 4)
            for event in own:
                append_event(three_rounds, event)
            append_results(three_rounds, own)
        append_event(three_rounds, EndEvent(rounds=3))
        assert three_rounds.events.read_bytes() == events
        assert three_rounds.results.read_bytes() == results

    def test_it_mends_lines_that_a_kill_cut_off(self, three_rounds):
        for path in (three_rounds.events, three_rounds.results):
            path.write_bytes(path.read_bytes()[:-7])
        cut_back(three_rounds, 3)
        assert len(read_events(three_rounds)) == 2 + 4 * 4
        assert results_table(read_events(three_rounds)) == three_rounds.results.read_text()

    def test_a_task_of_half_a_surrogate_pair_has_its_column(self, run):
        run.events.write_text('{"event": "start", "tasks": {"\\ud800": {"kind": "regression"}}}\n')
        cut_back(run, 0)
        assert run.results.read_text().split(",")[8:10] == ["?.pearson", "?.spearman"]

    def test_a_run_killed_before_its_first_event_stays_empty(self, run):
        cut_back(run, 0)
        assert read_events(run) == []
        assert not run.results.exists()
