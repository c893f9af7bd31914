"""The handlers live at the top of this file, so that workers can import them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedmtl.engines.processes import WorkerPool
from fedmtl.errors import FedmtlError


def start(setup):
    def handle(call):
        if call == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if call == "sleep":
            time.sleep(60)
        if call == "ours":
            raise FedmtlError("a clear line")
        if call == "theirs":
            raise ValueError("a bug")
        return (setup, call, os.getpid())

    return handle


def start_counted(log):
    """Calls are lists of what to do, one entry per attempt; every attempt adds a line to the log."""

    def handle(plan):
        with Path(log).open("a") as file:
            file.write(f"{os.getpid()}\n")
        act = plan[len(attempts(log)) - 1]
        if act == "sleep":
            time.sleep(60)
        if act == "raise":
            raise ValueError("a bug")
        if act == "exit":
            os._exit(3)
        if isinstance(act, signal.Signals):
            os.kill(os.getpid(), act)
        return act

    return handle


def attempts(log):
    """The process of every attempt."""
    return Path(log).read_text().split()


def start_writer(path):
    """A job that takes long and writes its result to a file."""

    def handle(call):
        Path(path).with_suffix(".begun").touch()
        time.sleep(1)
        Path(path).write_text("an old result")

    return handle


def broken_start(setup):
    raise FedmtlError("no such encoder")


@pytest.fixture(params=[0, 1, 2])
def pool(request):
    made = WorkerPool(start, "setup", request.param)
    yield made
    made.close()


def test_every_call_is_answered_once(pool):
    answers = sorted(pool.map(range(7), 60), key=lambda answer: answer.ticket)
    assert [answer.ticket for answer in answers] == list(range(7))
    assert [answer.result[:2] for answer in answers] == [("setup", number) for number in range(7)]


def test_an_error_is_an_answer(pool):
    answers = {answer.ticket: answer.error for answer in pool.map(["ours", "theirs", 1], 60)}
    assert answers == {0: "a clear line", 1: "ValueError: a bug", 2: None}


def test_work_in_this_process_and_in_workers():
    here = WorkerPool(start, None, 0)
    assert {answer.result[2] for answer in here.map(range(2), 60)} == {os.getpid()}
    there = WorkerPool(start, None, 2)
    try:
        assert os.getpid() not in {answer.result[2] for answer in there.map(range(4), 60)}
    finally:
        there.close()


@pytest.fixture
def counted(tmp_path):
    made = WorkerPool(start_counted, str(tmp_path / "log"), 1)
    yield made
    made.close()


def test_a_call_whose_worker_died_is_given_to_another_once_more(counted, tmp_path):
    [answer] = counted.map([[signal.SIGKILL, "fine"]], 60)
    assert (answer.error, answer.result) == (None, "fine")
    first, second = attempts(tmp_path / "log")
    assert first != second


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ([signal.SIGKILL, signal.SIGKILL, "fine"], "killed by SIGKILL (out of memory?), then killed by SIGKILL (out"),
        ([signal.SIGTERM, "exit", "fine"], "killed by SIGTERM, then exit code 3"),
    ],
)
def test_the_second_death_is_the_calls_error_and_says_how_both_ended(counted, tmp_path, plan, reason):
    [answer] = counted.map([plan], 60)
    assert f"both processes that had its job died: {reason}" in answer.error
    assert len(attempts(tmp_path / "log")) == 2


def test_a_call_that_always_kills_its_worker_costs_itself_alone():
    pool = WorkerPool(start, None, 2)
    try:
        answers = {answer.ticket: answer for answer in pool.map([0, "die", 2, 3, 4], 60)}
        assert "both processes that had its job died" in answers[1].error
        assert [answers[ticket].error for ticket in (0, 2, 3, 4)] == [None] * 4
        assert [answer.error for answer in pool.map(range(4), 60)] == [None] * 4
    finally:
        pool.close()


def test_a_call_that_raised_is_not_repeated(counted, tmp_path):
    [answer] = counted.map([["raise", "fine"]], 60)
    assert answer.error == "ValueError: a bug"
    assert len(attempts(tmp_path / "log")) == 1


def test_a_call_past_its_deadline_is_not_repeated(counted, tmp_path):
    list(counted.map([["fine"]], 60))
    [answer] = counted.map([["fine", "sleep", "fine"]], 1)
    assert "no answer within 1 s" in answer.error
    assert len(attempts(tmp_path / "log")) == 2


@pytest.mark.slow
def test_the_repeat_has_the_deadline_of_the_first_attempt(counted, tmp_path):
    list(counted.map([["fine"]], 60))
    began = time.monotonic()
    [answer] = counted.map([["fine", signal.SIGKILL, "sleep", "fine"]], 4)
    assert 4 <= time.monotonic() - began < 30
    assert "no answer within 4 s" in answer.error
    assert len(attempts(tmp_path / "log")) == 3


def test_a_silent_worker_is_given_up_at_the_deadline():
    pool = WorkerPool(start, None, 2)
    try:
        list(pool.map(range(2), 60))
        began = time.monotonic()
        answers = {answer.ticket: answer for answer in pool.map(["sleep", 1], 1.0)}
        assert time.monotonic() - began < 20
        assert answers[1].error is None
        assert "no answer within 1 s" in (answers[0].error or "")
        assert [answer.error for answer in pool.map(range(3), 60)] == [None] * 3
    finally:
        pool.close()


def test_calls_that_never_got_a_worker_are_answered_at_the_deadline():
    pool = WorkerPool(start, None, 1)
    try:
        list(pool.map([0], 60))
        began = time.monotonic()
        answers = list(pool.map(["sleep", 1, 2], 1.0))
        assert time.monotonic() - began < 20
        assert [answer.ticket for answer in answers] == [0, 1, 2]
        assert all("no answer within 1 s" in (answer.error or "") for answer in answers)
    finally:
        pool.close()


def test_a_worker_that_cannot_start_says_why():
    pool = WorkerPool(broken_start, None, 1)
    try:
        assert [answer.error for answer in pool.map(range(2), 60)] == ["no such encoder"] * 2
    finally:
        pool.close()


def test_a_worker_that_died_while_idle_costs_no_call():
    pool = WorkerPool(start, None, 1)
    try:
        [answer] = pool.map([0], 60)
        os.kill(answer.result[2], signal.SIGKILL)
        assert [answer.error for answer in pool.map(range(3), 60)] == [None] * 3
    finally:
        pool.close()


@pytest.mark.slow
def test_a_death_while_idle_does_not_use_up_the_repeat(counted, tmp_path):
    list(counted.map([["fine"]], 60))
    os.kill(int(attempts(tmp_path / "log")[0]), signal.SIGKILL)
    time.sleep(0.5)
    [answer] = counted.map([["fine", signal.SIGKILL, "fine"]], 60)
    assert answer.error is None
    assert len(attempts(tmp_path / "log")) == 3


PARENT = """
import sys
sys.path.insert(0, sys.argv[1])
from engines.test_processes import start_writer
from fedmtl.engines.processes import WorkerPool
if __name__ == "__main__":
    list(WorkerPool(start_writer, sys.argv[2], 1).map([0], 60))
"""


@pytest.mark.slow
def test_a_worker_whose_parent_was_killed_writes_nothing_more(tmp_path):
    # A run that is killed and resumed at once finds its folder quiet.
    result = tmp_path / "result"
    (tmp_path / "parent.py").write_text(PARENT)
    tests = str(Path(__file__).parents[1])
    parent = subprocess.Popen([sys.executable, str(tmp_path / "parent.py"), tests, str(result)])
    end = time.monotonic() + 60
    while not result.with_suffix(".begun").exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    time.sleep(2)
    assert not result.exists()


def test_closing_twice_leaves_no_process():
    pool = WorkerPool(start, None, 2)
    pids = {answer.result[2] for answer in pool.map(range(4), 60)}
    pool.close()
    pool.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
