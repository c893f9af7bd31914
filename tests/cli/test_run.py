"""fedmtl run: what it prints, what it is called, and how it goes on."""

import errno
import json

from cli.small_runs import small
from fedmtl.runs.folder import RunFolder
from raw_events import raw_events


def test_json_is_the_only_thing_on_stdout(cli, tmp_path):
    done = cli("run", *small("training.num_rounds=1"), "--json")
    record = json.loads(done.out)
    assert done.code == 0
    assert {name: sorted(own) for name, own in record["metrics"].items()} == {
        "sentiment": ["accuracy", "f1", "matthews"],
        "paraphrase": ["accuracy", "f1", "matthews"],
        "similarity": ["mae", "mse", "pearson", "r2", "rmse", "spearman"],
    }
    assert (record["rounds"], record["failures"]) == (1, [])
    assert all(record[name] > 0 for name in ("seconds", "bytes_up", "bytes_down"))
    end = raw_events(RunFolder(tmp_path / "runs/demo"))[-1]
    assert record["weights_sha256"] == end["weights_sha256"]
    assert "round 1/1: sentiment " in done.err
    assert "=== Round" not in done.err


def test_a_second_run_gets_a_number_and_leaves_the_first_alone(cli, tmp_path):
    arguments = ["run", *small("training.num_rounds=0")]
    assert "report: runs/demo/report.html\n" in cli(*arguments).out
    before = {path: path.read_bytes() for path in (tmp_path / "runs/demo").rglob("*") if path.is_file()}
    assert "report: runs/demo-2/report.html\n" in cli(*arguments).out
    assert {path: path.read_bytes() for path in before} == before
    assert "report: runs/mine/report.html\n" in cli(*arguments, "--name", "mine").out


def test_the_closing_table_says_what_the_numbers_hide(cli):
    done = cli("run", *small("training.num_rounds=0"))
    lines = done.out.splitlines()
    assert any(line.startswith("demo: 0 rounds in ") and line.rstrip().endswith("synthetic data") for line in lines)
    assert max(map(len, lines[lines.index(next(line for line in lines if line.startswith("┏"))) :][:14])) <= 80


def test_a_finished_run_is_not_resumed(cli, runs):
    before = (runs / "demo/events.jsonl").read_bytes()
    done = cli("run", "--resume", "demo")
    assert done.code == 0
    assert done.out.startswith("demo is finished, there is nothing to resume; to train longer, start a new run: ")
    assert "=== Round" not in done.out
    assert (runs / "demo/events.jsonl").read_bytes() == before
    assert json.loads(cli("run", "--resume", "demo", "--json").out)["rounds"] == 2


def test_a_resumed_run_tells_only_what_is_new(cli, runs):
    # As if killed after round 1 was told and before round 2 was.
    whole = raw_events(RunFolder(runs / "demo"))
    kept = [e for e in whole if e["event"] != "end" and e.get("round", 0) <= 1]
    (runs / "demo/events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in kept))
    for path in (runs / "demo/checkpoints").glob("round-0002.*"):
        path.unlink()
    done = cli("run", "--resume", "demo")
    assert done.code == 0
    assert "demo goes on after round 1\n" in done.out
    assert "round 1/2: " not in done.out
    assert done.out.count("round 2/2: ") == 1
    assert raw_events(RunFolder(runs / "demo"))[-1]["status"] == "done"


def test_verbose_and_quiet_contradict_each_other(cli):
    done = cli("run", "--verbose", "--quiet")
    assert (done.code, done.error) == (
        2, "--verbose and --quiet: contradict each other; give one of them, or none"
    )  # fmt: skip


def test_resume_takes_no_config(cli, runs):
    done = cli("run", "--resume", "demo", "--set", "training.num_rounds=5")
    assert (done.code, done.error[:24]) == (2, "--resume: takes no confi")
    done = cli("run", "--resume", "dmeo")
    assert (done.code, done.error) == (2, "dmeo: no such run in runs; did you mean demo?")


def test_a_disk_that_fills_up_is_one_line(cli, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "runs/demo/spool/x")

    monkeypatch.setattr("fedmtl.experiment.run.start_run", full)
    done = cli("run", *small())
    assert done.code == 2
    assert done.error.startswith("runs/demo/spool/x: no space left on the disk; free some")
