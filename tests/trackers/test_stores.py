"""The four libraries with their real stores on this machine; each is read back by its own reader."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedmtl.config import Config
from fedmtl.config.file import dump_config
from fedmtl.runs.folder import RunFolder
from fedmtl.runs.log import read_events
from fedmtl.trackers.points import Book
from fedmtl.trackers.sender import QUIET
from fedmtl.trackers.wandb import records_of

pytestmark = pytest.mark.slow
TRACKERS = ("tensorboard", "mlflow", "wandb", "trackio")
# TensorBoard stores single precision.
PRECISION = {"tensorboard": 1e-6}

Rows = list[tuple[int, str, float]]

READERS = {
    "tensorboard": """
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
known = EventAccumulator(where, {"scalars": 0})
known.Reload()
rows = [(each.step, tag, each.value) for tag in known.Tags()["scalars"] for each in known.Scalars(tag)]
""",
    "mlflow": """
from mlflow import MlflowClient
client = MlflowClient(tracking_uri=where)
[found] = client.search_runs([client.get_experiment_by_name("fedmtl").experiment_id])
rows = [
    (each.step, name, each.value)
    for name in found.data.metrics for each in client.get_metric_history(found.info.run_id, name)
]
facts = {"status": found.info.status, "params": found.data.params, "tags": found.data.tags,
         "user": found.info.user_id, "files": [one.path for one in client.list_artifacts(found.info.run_id)]}
""",
    "trackio": """
from trackio.sqlite_storage import SQLiteStorage
[name] = SQLiteStorage.get_runs("fedmtl")
facts = {"config": SQLiteStorage.get_run_config("fedmtl", name)}
rows = [
    (row["step"], metric, value)
    for row in SQLiteStorage.get_logs("fedmtl", name)
    for metric, value in row.items() if metric not in ("step", "timestamp")
]
""",
}


def read_back(tracker: str, run: RunFolder) -> tuple[Rows, dict]:
    """Every (step, metric, value) that a store has of its only run, and what else it says of it."""
    if tracker == "wandb":
        return read_wandb(run)
    where = {"tensorboard": str(run.path / "tensorboard"), "mlflow": f"sqlite:///{run.path.parent / 'mlflow.db'}"}
    begin, end = f"import json\nwhere, facts = {where.get(tracker)!r}, {{}}", "print('\\n' + json.dumps([rows, facts]))"
    code = f"{begin}\n{READERS[tracker]}\n{end}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment(run)
    )
    assert done.returncode == 0, done.stderr
    rows, facts = json.loads(done.stdout.splitlines()[-1])
    return [(int(step), name, value) for step, name, value in rows], facts


def read_wandb(run: RunFolder) -> tuple[Rows, dict]:
    """Offline files of one run; the library has no reader of them but the one that sends them."""
    rows: Rows = []
    ids, names = set(), set()
    for path in sorted((run.path / "trackers").glob("wandb/offline-run-*/*.wandb")):
        for record in records_of(path):
            if record.HasField("run"):
                ids.add(record.run.run_id)
            if record.HasField("artifact"):
                names.add(record.artifact.name)
            if record.HasField("history"):
                for item in record.history.item:
                    name = item.key or ".".join(item.nested_key)
                    if not name.startswith("_"):
                        rows.append((record.history.step.num, name, json.loads(item.value_json)))
    assert len(ids) == 1
    return rows, {"files": sorted(names)}


def environment(run: RunFolder) -> dict[str, str]:
    return {**os.environ, **QUIET, "TRACKIO_DIR": str(run.path.parent / "trackio"), "SECRET_OF_MINE": "hush-hush"}


def fedmtl(run: RunFolder, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fedmtl", *arguments], capture_output=True, text=True, check=False, env=environment(run)
    )


def expected(run: RunFolder) -> dict[tuple[int, str], float]:
    book = Book()
    for event in read_events(run):
        book.add(event)
    return {(point.step, name): value for point in book.points.values() for name, value in point.metrics.items()}


def check(tracker: str, run: RunFolder) -> dict:
    """Every metric of every round is there once, with its value; returns what else the store says."""
    rows, facts = read_back(tracker, run)
    found = {(step, name): value for step, name, value in rows if not name.startswith(("baseline/", "cpu_joules"))}
    scored = [(step, name) for step, name, _ in rows if not name.startswith(("baseline/", "rounds", "cpu_joules"))]
    assert len(scored) == len(set(scored)), "a step is there twice"
    want = expected(run)
    found = {key: value for key, value in found.items() if key[1] != "rounds"}
    assert found.keys() == want.keys()
    for key, value in want.items():
        assert found[key] == pytest.approx(value, rel=PRECISION.get(tracker, 1e-12))
    return facts


@pytest.fixture
def trained(run_once, tmp_path):
    """A copy of a run of two rounds, so that stores beside it are the test's."""
    return RunFolder(Path(shutil.copytree(run_once().path, tmp_path / "runs" / "trained")))


@pytest.mark.parametrize("tracker", TRACKERS)
def test_every_metric_of_a_two_round_run_is_read_back_and_a_second_sending_adds_nothing(tracker, trained):
    options = ["--option", "mode=offline"] if tracker == "wandb" else []
    options += ["--option", "artifacts=[report, model]"] if tracker != "tensorboard" else []
    for words in ("3 rounds sent to", "has all of its rounds"):
        done = fedmtl(trained, "track", str(trained.path), "--to", tracker, *options)
        assert done.returncode == 0, done.stderr
        assert words in done.stdout
        facts = check(tracker, trained)
    assert {step for step, _ in expected(trained)} == {0, 1, 2}
    if tracker == "mlflow":
        assert facts["status"] == "FINISHED"
        assert facts["user"] == "unknown"
        assert set(facts["tags"]) == {"fedmtl.id", "fedmtl.status", "fedmtl.weights_sha256", "mlflow.runName"}
        assert facts["params"]["config.training.num_rounds"] == "2"
        assert sorted(facts["files"]) == ["model", "report.html"]
    if tracker == "trackio":
        assert facts["config"]["config"]["training"]["num_rounds"] == 2
        assert facts["config"]["_Username"] is None
    if tracker == "wandb":
        assert [name.rpartition("-")[2] for name in facts["files"]] == ["model", "report"]
    nothing_of_the_machine_is_in_the_store(tracker, trained)


def nothing_of_the_machine_is_in_the_store(tracker: str, run: RunFolder) -> None:
    """Look for what libraries collect by themselves: environment, commands, folders, the name of the host."""
    patterns = {"tensorboard": "tensorboard/*", "wandb": "trackers/wandb/*/*.wandb"}
    files = list(run.path.glob(patterns[tracker])) if tracker in patterns else list(run.path.parent.rglob("*.db"))
    assert files
    words = [
        "hush-hush",
        sys.executable,
        "-m fedmtl",
        *([socket.gethostname()] if len(socket.gethostname()) > 3 else []),
    ]
    # MLflow's own database has folders: those of its files, and of an experiment that it makes for itself.
    words += [] if tracker == "mlflow" else [str(run.path.parent), str(Path.cwd())]
    assert not [
        (path, word) for path in files for word in words if word in path.name or word.encode() in path.read_bytes()
    ]


def test_a_run_that_was_killed_and_resumed_is_one_run_in_every_store_with_no_step_twice(make_config, tmp_path):
    config = make_config("training.num_rounds=6", "checkpoint.every=1")
    track = {name: {"mode": "offline"} if name == "wandb" else {} for name in TRACKERS}
    run = start(Config.model_validate({**config.model_dump(), "track": track}), tmp_path, kill_after=2)
    resumed = fedmtl(run, "run", "--resume", str(run.path))
    assert resumed.returncode == 0, resumed.stderr
    wait_for_followers(run)
    for tracker in TRACKERS:
        check(tracker, run)
    assert {step for step, _ in expected(run)} == set(range(7))


def start(config: Config, folder: Path, *, kill_after: int) -> RunFolder:
    """A run in a process of its own, which is killed when that round's events are in the file."""
    file, run = folder / "config.yaml", RunFolder(Path(config.output) / "killed")
    file.write_text(dump_config(config))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "fedmtl", "run", str(file), "--name", "killed"],
            stdout=log,
            stderr=log,
            env=environment(run),
        )
        deadline = time.monotonic() + 120
        while not run.events.exists() or f'"event": "round", "round": {kill_after}' not in run.events.read_text():
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    return run


def wait_for_followers(run: RunFolder) -> None:
    """They may go on when the run is over: on a busy machine a library alone takes seconds to load."""
    from fedmtl.runs.folder import is_busy

    deadline = time.monotonic() + 120
    while any(is_busy(run.path / "trackers", f".{name}.lock") for name in TRACKERS):
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_server_that_is_down_costs_one_warning_and_the_run_is_sent_later(make_config, tmp_path):
    config = make_config("track={mlflow: {address: 'http://127.0.0.1:9'}}", "training.num_rounds=4")
    run, file = RunFolder(Path(config.output) / "alone"), tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    done = fedmtl(run, "run", str(file), "--name", "alone")
    assert done.returncode == 0, done.stderr
    said = [event.reason for event in read_events(run) if event.kind == "remark" and "tracker" in event.reason]
    assert len(said) == 1
    assert "`fedmtl track" in said[0]
    wait_for_followers(run)
    address = f"sqlite:///{run.path.parent / 'mlflow.db'}"
    sent = fedmtl(run, "track", str(run.path), "--to", "mlflow", "--option", f"address={address}")
    assert sent.returncode == 0, sent.stderr
    check("mlflow", run)
