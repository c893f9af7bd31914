"""The handlers live at the top of this file, so that workers can import them."""

import os
import signal
import time

import pytest

from fedmtl.engines.worker import WorkerPool
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


def test_a_killed_worker_costs_its_call_and_is_replaced():
    pool = WorkerPool(start, None, 2)
    try:
        answers = {answer.ticket: answer for answer in pool.map([0, "die", 2, 3, 4], 60)}
        assert answers[1].error == "its process ended with code -9"
        assert [answers[ticket].error for ticket in (0, 2, 3, 4)] == [None] * 4
        assert [answer.error for answer in pool.map(range(4), 60)] == [None] * 4
    finally:
        pool.close()


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


def test_a_worker_that_died_while_idle_costs_one_call():
    pool = WorkerPool(start, None, 1)
    try:
        [answer] = pool.map([0], 60)
        os.kill(answer.result[2], signal.SIGKILL)
        errors = [answer.error for answer in pool.map(range(3), 60)]
        assert errors == ["its process ended with code -9", None, None]
    finally:
        pool.close()


def test_closing_twice_leaves_no_process():
    pool = WorkerPool(start, None, 2)
    pids = {answer.result[2] for answer in pool.map(range(4), 60)}
    pool.close()
    pool.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
