"""The run folder: its name, its parts, and how it is found."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fedmtl.errors import FedmtlError, RunNotFound
from fedmtl.runs import folder
from fedmtl.runs.folder import RunFolder, create_run, find_run, locked
from fedmtl.runs.log import append_event
from runs.two_tasks import START


class TestNames:
    def test_a_second_run_of_one_name_gets_a_number(self, tmp_path):
        names = [create_run(tmp_path, "demo").name for _ in range(3)]
        assert names == ["demo", "demo-2", "demo-3"]

    def test_runs_created_at_the_same_time_never_share_a_folder(self, tmp_path):
        with ThreadPoolExecutor(8) as pool:
            runs = list(pool.map(lambda _: create_run(tmp_path, "demo"), range(16)))
        assert len({run.path for run in runs}) == 16

    def test_a_folder_appears_with_its_files(self, tmp_path, monkeypatch):
        def files(run):
            return {"config.yaml": run.name.encode()}

        (tmp_path / "demo").mkdir()
        with ThreadPoolExecutor(8) as pool:
            runs = list(pool.map(lambda _: create_run(tmp_path, "demo", files), range(16)))
        assert len({run.path for run in runs}) == 16
        assert all(run.config.read_text() == run.name for run in runs)
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["demo", *(run.name for run in runs)])

    @pytest.mark.parametrize("step", ["write_atomic", "_rename_to_new"])
    def test_whatever_ends_it_there_is_no_folder_without_a_config(self, tmp_path, monkeypatch, step):
        def end(*arguments):
            raise KeyboardInterrupt

        monkeypatch.setattr(f"fedmtl.runs.folder.{step}", end)
        with pytest.raises(KeyboardInterrupt):
            create_run(tmp_path / "runs", "demo", lambda run: {"config.yaml": b"x"})
        assert list((tmp_path / "runs").iterdir()) == []

    def test_an_empty_folder_that_appears_in_between_is_not_taken_over(self, tmp_path, monkeypatch):
        real = folder.write_atomic

        def write_and_disturb(path, *parts):
            real(path, *parts)
            (tmp_path / "demo").mkdir(exist_ok=True)

        monkeypatch.setattr(folder, "write_atomic", write_and_disturb)
        made = create_run(tmp_path, "demo", lambda run: {"config.yaml": b"x"})
        assert made.name == "demo-2"
        assert list((tmp_path / "demo").iterdir()) == []

    def test_what_a_killed_start_left_is_removed_by_the_next_and_nothing_else(self, tmp_path):
        def unfinished(name: str) -> Path:
            (tmp_path / name).mkdir()
            (tmp_path / name / "config.yaml").write_text("x")
            return tmp_path / name

        killed, busy = unfinished(".demo.0123abcd.tmp"), unfinished(".demo.11111111.tmp")
        (killed / ".lock").touch()
        young = unfinished(".demo.22222222.tmp")
        foreign = unfinished(".notes.tmp")
        backup = unfinished(".mybackup.deadbeef.tmp")
        (backup / "letters.txt").write_text("mine")
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / ".demo.44444444.tmp").symlink_to(tmp_path / "elsewhere")
        with locked(busy):
            for path in (killed, busy, foreign, backup):
                os.utime(path, (0, 0))
            create_run(tmp_path, "demo", lambda run: {"config.yaml": b"x"})
        assert not killed.exists()
        assert busy.exists()
        assert young.exists()
        assert foreign.exists()
        assert (backup / "letters.txt").read_text() == "mine"
        assert (tmp_path / "elsewhere").exists()

    def test_temporary_files_of_a_killed_writer_are_removed(self, tmp_path):
        run = RunFolder(tmp_path)
        run.checkpoints.mkdir()
        left = [tmp_path / ".results.csv.0123abcd.tmp", run.checkpoints / ".round-0001.json.0123abcd.tmp"]
        for path in (*left, tmp_path / ".mine.tmp"):
            path.write_text("half")
        folder.remove_temporary(run)
        assert [path.exists() for path in (*left, tmp_path / ".mine.tmp")] == [False, False, True]

    @pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-x", "a b", "ä", "a\n"])
    def test_a_name_that_is_no_plain_word_is_refused(self, tmp_path, name):
        with pytest.raises(FedmtlError, match="use letters, digits"):
            create_run(tmp_path, name)

    def test_an_output_that_is_a_file_is_named(self, tmp_path):
        (tmp_path / "runs").write_text("")
        with pytest.raises(FedmtlError, match="runs: cannot be written"):
            create_run(tmp_path / "runs", "demo")

    def test_a_run_is_found_by_name_and_by_folder(self, run, tmp_path, monkeypatch):
        append_event(run, START)
        assert find_run("demo", tmp_path / "runs") == run
        assert find_run(str(run.path)) == run
        monkeypatch.chdir(tmp_path)
        assert find_run("demo") == RunFolder(Path("runs/demo"))

    def test_a_missing_run_is_answered_with_near_names(self, run, tmp_path):
        append_event(run, START)
        with pytest.raises(RunNotFound, match=r"demmo: no such run in .*; did you mean demo"):
            find_run("demmo", tmp_path / "runs")
        with pytest.raises(RunNotFound, match="it has demo; give a name"):
            find_run("other", tmp_path / "runs")
        with pytest.raises(RunNotFound, match=r"no folder .*start one with `fedmtl run`"):
            find_run("demo", tmp_path / "none")
        with pytest.raises(RunNotFound, match="~nosuchuser: no such run in"):
            find_run("~nosuchuser", tmp_path / "runs")

    def test_every_part_lies_in_the_folder(self, run):
        parts = [run.config, run.events, run.results, run.checkpoints, run.clients, run.model, run.report]
        assert [part.name for part in parts] == [
            "config.yaml",
            "events.jsonl",
            "results.csv",
            "checkpoints",
            "clients",
            "model",
            "report.html",
        ]
        assert {part.parent for part in [*parts, run.spool]} == {run.path}
