"""A grid is run, broken, and gone on with; cells are runs of a second."""

import os
import signal

import pytest

from fedmtl.config.file import config_from
from fedmtl.errors import ConfigError
from fedmtl.experiment.run import start_run
from fedmtl.runs.events import RoundEvent
from fedmtl.runs.log import read_events
from fedmtl.runs.summary import summarize
from fedmtl_studies.cells import Cell, note_memory
from fedmtl_studies.folder import open_study, read_memory, read_record
from fedmtl_studies.grid import GridInterrupted, Paced, run_grid, seconds_left, suitable_at_once
from raw_events import raw_events
from studies.small_cells import settings


@pytest.fixture
def folder(tmp_path):
    return open_study(tmp_path, "study")


def summary(folder, name):
    return summarize(read_events(folder.cell(name)), name)


def test_a_failing_cell_costs_itself_and_finished_ones_are_not_run_again(folder):
    # the table of tasks is checked only when the cell is prepared: that one fails in its process
    no_data = {**settings(), "data": {"source": "files", "root": str(folder.path / "nowhere")}, "tasks": {"sst2": {}}}
    cells = [Cell("unknown", settings(bogus=1)), Cell("broken", no_data), Cell("good", settings())]
    standings = []
    first = run_grid(folder, cells, 2, standings.append)
    assert [(one.cell, one.status) for one in first] == [("unknown", "failed"), ("broken", "failed"), ("good", "done")]
    assert first[0].reason.startswith("training.bogus: unknown key")
    assert "nowhere" in first[1].reason
    assert len(standings[-1].failed) == 2
    assert standings[-1].total == 3
    assert summary(folder, "good").status == "done"
    before = folder.cell("good").events.stat().st_mtime_ns
    again = run_grid(folder, [cells[2]], 2)
    assert [one.status for one in again] == ["earlier"]
    assert folder.cell("good").events.stat().st_mtime_ns == before


def test_a_cell_that_was_killed_goes_on_and_ends_with_the_same_weights(folder):
    class Killed(BaseException):
        pass

    def kill(event):
        if isinstance(event, RoundEvent) and event.round == 2:
            raise Killed

    config = config_from({**settings(num_rounds=3), "output": str(folder.cells)})
    with pytest.raises(Killed):
        start_run(config, "half", kill)
    assert summary(folder, "half").status == "unfinished"
    begun = raw_events(folder.cell("half"))[:4]
    outcomes = run_grid(folder, [Cell("half", settings(3)), Cell("whole", settings(3))], 2)
    assert [one.status for one in outcomes] == ["done", "done"]
    events = raw_events(folder.cell("half"))
    # its opening and its first round are those of the process that was killed
    assert events[:4] == begun
    assert summary(folder, "half").weights_sha256 == summary(folder, "whole").weights_sha256


def test_a_folder_made_with_other_settings_is_not_touched(folder):
    start_run(config_from({**settings(1), "output": str(folder.cells)}), "cell")
    with pytest.raises(ConfigError, match=r"training.num_rounds was 1 and is now 2; .*--name"):
        run_grid(folder, [Cell("cell", settings(2))], 1)
    # where it computes is no difference
    same = {**settings(1), "compute": {"device": "cpu", "workers": 3}}
    assert run_grid(folder, [Cell("cell", same)], 1)[0].status == "earlier"


def test_a_settled_cell_has_what_is_to_stay_and_knows_its_sizes(folder):
    start_run(config_from({**settings(1), "output": str(folder.cells)}), "cell")
    run = folder.cell("cell")
    weights = run.model / "weights.safetensors"
    size = weights.stat().st_size
    run_grid(folder, [Cell("cell", settings(1))], 3, keep="models")
    noted = read_record(run)
    parameters = summary(folder, "cell").parameters
    assert parameters is not None
    assert noted["cells_at_once"] == 3
    assert noted["trained_bytes"] == 4 * parameters
    assert noted["model_bytes"] > size > noted["trained_bytes"]
    assert not run.checkpoints.exists()
    assert weights.exists()
    run_grid(folder, [Cell("cell", settings(1))], 1, keep="scores")
    assert not weights.exists()
    assert read_record(run) == noted


def test_a_cell_notes_the_most_memory_that_it_took(folder):
    wider = {**settings(1), "model": {"server_model": "random-1x512"}}
    run_grid(folder, [Cell("narrow", settings(1)), Cell("wide", wider)], 1)
    narrow, wide = (read_record(folder.cell(name))["peak_bytes"] for name in ("narrow", "wide"))
    weights = read_record(folder.cell("wide"))["trained_bytes"]
    # Weights, gradients and two moments of AdamW; the process of the narrow one hardly grows.
    assert wide - narrow > 3 * weights


def test_of_a_cell_that_was_resumed_the_larger_memory_counts(folder):
    run = folder.cell("cell")
    run.path.mkdir(parents=True)
    assert read_memory(run) is None
    for peak, noted in ((5, 5), (3, 5), (7, 7)):
        note_memory(run, peak)
        assert read_memory(run) == noted


def test_fixed_values_are_not_counted_as_trained(folder):
    fixed = {**settings(1), "sharing": {"rules": [{"embeddings.*": "fixed"}, {"heads.*": "task"}, {"*": "all"}]}}
    run_grid(folder, [Cell("cell", fixed)], 2)
    plan = next(event for event in raw_events(folder.cell("cell")) if event["event"] == "plan")
    trained = sum(scope["parameters"] for scope in plan["scopes"] if scope["level"] != "fixed")
    assert 0 < trained < plan["total"]
    assert read_record(folder.cell("cell"))["trained_bytes"] == 4 * trained


def test_a_signal_ends_every_cell_after_its_last_whole_round(folder):
    def stop(standing):
        if any(share > 0 for share in standing.running.values()):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(GridInterrupted, match="the same command goes on") as ended:
        run_grid(folder, [Cell("long", settings(5000))], 1, stop)
    assert ended.value.exit_code == 128 + signal.SIGTERM
    end = raw_events(folder.cell("long"))[-1]
    assert (end["event"], end["status"]) == ("end", "interrupted"), end


def test_cells_of_one_client_fill_the_cores(monkeypatch, tmp_path):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(6))
    monkeypatch.setattr("fedmtl_studies.grid.GPU", tmp_path / "none")
    assert (suitable_at_once(1), suitable_at_once(6), suitable_at_once(9)) == (6, 1, 1)
    monkeypatch.setattr("fedmtl_studies.grid.GPU", tmp_path)
    assert suitable_at_once(9) == 3
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(64))
    assert suitable_at_once(1) == 8


WAITING = Paced(work=2.0, share=0.0, seconds=0.0)


def test_nothing_is_known_before_something_was_measured():
    assert seconds_left([WAITING, WAITING], at_once=1) is None
    # begun a moment ago, and finished by an earlier call: neither tells a pace
    assert seconds_left([Paced(2.0, 0.05, 9.0), Paced(2.0, 1.0, 0.0), WAITING], at_once=1) is None


def test_work_that_is_left_goes_at_the_pace_of_what_was_measured():
    # 2 + 4 units in 5 + 13 s: 3 s a unit; left are 2 + 2
    cells = [Paced(2.0, 1.0, 5.0), Paced(4.0, 1.0, 13.0), WAITING, WAITING]
    assert seconds_left(cells, at_once=1) == pytest.approx(12.0)
    assert seconds_left(cells, at_once=2) == pytest.approx(6.0)


def test_an_open_cell_counts_by_its_share():
    # half of 4 units in 6 s: 3 s a unit; its other half and 2 units wait
    assert seconds_left([Paced(4.0, 0.5, 6.0), WAITING], at_once=1) == pytest.approx(12.0)


def test_many_processes_do_not_make_one_cell_faster():
    # 1 unit in 1 s; 6 units are left in one cell
    assert seconds_left([Paced(1.0, 1.0, 1.0), Paced(6.0, 0.0, 0.0)], at_once=8) == pytest.approx(6.0)


def test_when_all_is_done_nothing_is_left():
    assert seconds_left([Paced(1.0, 1.0, 1.0)], at_once=2) == 0.0
