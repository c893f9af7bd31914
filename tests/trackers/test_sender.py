import json
import os
import subprocess
import threading
import time
from dataclasses import dataclass, field

import pytest

from fedmtl.errors import FedmtlError
from fedmtl.runs.folder import locked
from fedmtl.runs.log import Trackers, cut_back
from fedmtl.trackers import sender
from fedmtl.trackers.points import StoredOptions
from fedmtl.trackers.sender import Follower, Sender, follow, send_once
from trackers.made_runs import add, checkpoint, ending, made_run, metrics_of, opening, round_events


@dataclass
class Store:
    """A tracker in memory; it refuses a metric that a step has, and fails where `down` says so."""

    runs: dict = field(default_factory=dict)
    down: bool = False
    dies_in_round: int | None = None
    finished: list = field(default_factory=list)
    stored: list = field(default_factory=list)
    facts: dict = field(default_factory=dict)

    def __call__(self, options, run, id):
        if self.down:
            raise ConnectionError("nobody listens\nat all")
        self.steps = self.runs.setdefault(id, {})
        return self

    def logged(self):
        return {step: set(metrics) for step, metrics in self.steps.items()}

    def describe(self, facts):
        self.facts = dict(facts)

    def log(self, step, metrics):
        there = self.steps.setdefault(step, {})
        assert not there.keys() & metrics.keys(), f"step {step} is logged twice"
        if step == self.dies_in_round:
            # Half of a round is in the store when the process is killed.
            there |= dict(list(metrics.items())[:3])
            self.dies_in_round = None
            raise KeyboardInterrupt
        there |= metrics

    def store(self, name, path):
        self.stored.append(name)

    def finish(self, status, summary, step):
        self.finished.append((status, step))

    def close(self):
        pass

    def only_run(self):
        [steps] = self.runs.values()
        return steps


@pytest.fixture
def run(tmp_path):
    return made_run(tmp_path / "run", [*opening(), *round_events(0), *round_events(1), *round_events(2), *ending()])


def test_every_metric_of_every_round_is_in_the_store_once_however_often_it_is_sent(run):
    store, options = Store(), StoredOptions(artifacts=["report", "model"])
    assert send_once(run, "memory", options, store) == 3
    assert send_once(run, "memory", options, store) == 0
    assert store.only_run() == {step: metrics_of(step) for step in (0, 1, 2)}
    assert store.facts["config"]["seed"] == 3
    assert store.finished == [("done", 2)] * 2
    assert store.stored == ["report", "model"]


def test_a_file_that_changed_is_stored_again_and_no_other(run):
    store = Store()
    send_once(run, "memory", StoredOptions(), store)
    (run.model / "weights.safetensors").write_bytes(b"others")
    send_once(run, "memory", StoredOptions(), store)
    assert store.stored == ["model", "model"]


def test_a_round_that_a_kill_left_half_logged_is_completed(run):
    store = Store(dies_in_round=1)
    with pytest.raises(KeyboardInterrupt):
        send_once(run, "memory", StoredOptions(), store)
    assert len(store.only_run()[1]) == 3
    send_once(run, "memory", StoredOptions(), store)
    assert store.only_run() == {step: metrics_of(step) for step in (0, 1, 2)}


def test_the_id_is_in_the_folder_before_the_tracker_hears_of_it(run):
    with pytest.raises(FedmtlError, match=r"memory: ConnectionError: nobody listens; see docs/trackers\.md"):
        send_once(run, "memory", StoredOptions(), Store(down=True))
    noted = json.loads((run.path / "trackers" / "memory.json").read_text())
    store = Store()
    send_once(run, "memory", StoredOptions(), store)
    assert store.runs.keys() == {noted["id"]}
    assert noted["error"] == "ConnectionError: nobody listens"
    assert json.loads((run.path / "trackers" / "memory.json").read_text())["error"] is None


def test_a_run_that_somebody_is_at_work_on_is_sent_and_not_finished(tmp_path):
    run, store = made_run(tmp_path / "run", [*opening(), *round_events(0)]), Store()
    with locked(run.path):
        assert send_once(run, "memory", StoredOptions(), store) == 1
    assert store.finished == store.stored == []


def test_killed_and_resumed_is_one_run_without_a_doubled_step(tmp_path):
    run, store = made_run(tmp_path / "run", [*opening(), *round_events(0), *round_events(1)]), Store()
    checkpoint(run, 0)
    # The run was killed between the events of round 1 and its checkpoint.
    follow(run, "memory", StoredOptions(), store, _over())
    assert store.only_run() == {0: metrics_of(0)}
    assert store.finished == [("interrupted", 1)]
    cut_back(run, 0)
    add(run, [*round_events(1), *round_events(2), *ending()])
    follow(run, "memory", StoredOptions(), store, _over())
    assert store.only_run() == {step: metrics_of(step) for step in (0, 1, 2)}
    assert store.finished[-1] == ("done", 2)


def test_a_follower_sends_rounds_as_they_come_and_tries_again_after_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(sender, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(sender, "FIRST_WAIT", 0.01)
    run, store, over = made_run(tmp_path / "run", [*opening(), *round_events(0)]), Store(down=True), threading.Event()
    thread = threading.Thread(target=follow, args=(run, "memory", StoredOptions(), store, over))
    thread.start()
    noted = run.path / "trackers" / "memory.json"
    _until(lambda: noted.exists() and json.loads(noted.read_text())["error"] == "ConnectionError: nobody listens")
    store.down = False
    _until(lambda: store.runs and store.only_run().get(0) == metrics_of(0))
    add(run, round_events(1))
    _until(lambda: store.only_run().get(1) == metrics_of(1))
    assert store.finished == []
    add(run, ending())
    over.set()
    thread.join(10)
    assert store.finished == [("done", 1)]
    assert json.loads(noted.read_text())["error"] is None


def test_a_failure_is_said_once_and_names_the_command(run):
    follower = Follower(run.path, "mlflow", "track.mlflow: needs mlflow")
    with pytest.raises(sender.Trouble, match=r"needs mlflow; `fedmtl track .*run --to mlflow` sends what is missing"):
        follower.event(opening()[0])
    follower.event(opening()[0])
    follower.close()


def test_libraries_are_as_quiet_for_the_command_as_beside_a_run(run, monkeypatch):
    for name in sender.QUIET:
        monkeypatch.delenv(name, raising=False)
    seen = {}
    store = Store()

    def opener(*given):
        seen.update({name: os.environ.get(name) for name in sender.QUIET})
        return store(*given)

    send_once(run, "memory", StoredOptions(), opener)
    assert seen == sender.QUIET


def test_trackers_that_hang_are_waited_for_together(run, monkeypatch):
    real, begun = subprocess.Popen, []

    def hanging(command, **given):
        begun.append(real(["sleep", "20"], **given))
        return begun[-1]

    monkeypatch.setattr(sender.subprocess, "Popen", hanging)
    monkeypatch.setattr(sender, "LAST_SECONDS", 0.3)
    remarks = []
    trackers = Trackers({name: Follower(run.path, name, None) for name in "abcd"}, remarks.append)
    started = time.monotonic()
    trackers.close()
    for process in begun:
        process.kill()
        process.wait()
    assert len(remarks) == 4
    assert all("is still sending, and goes on by itself" in words for words in remarks)
    # One after the other they would take 1.2 seconds.
    assert time.monotonic() - started < 0.9


@pytest.mark.parametrize("kind", [OSError, FedmtlError])
def test_a_password_in_an_address_of_the_environment_is_not_noted(run, kind):
    following = Sender(run, "memory", StoredOptions(), Store())
    following.fail(kind(f"request to http://me:{'secret' * 60}@example.org/api failed"))
    noted = (run.path / "trackers" / "memory.json").read_text()
    assert "secret" not in noted
    assert "http://...@example.org/api failed" in noted


def test_a_note_that_is_not_ours_is_named_with_what_to_do(run):
    (run.path / "trackers").mkdir()
    (run.path / "trackers" / "memory.json").write_text("[]")
    with pytest.raises(FedmtlError, match=r"memory.json: is not what fedmtl writes there; delete it"):
        Sender(run, "memory", StoredOptions(), Store())


def _over():
    event = threading.Event()
    event.set()
    return event


def _until(holds):
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
