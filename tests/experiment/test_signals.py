import os
import signal
import time

import pytest

from fedmtl.experiment.signals import raised


class Ended(BaseException):
    pass


class Asked:
    """Gets the signal while it is being deleted, where Python drops exceptions."""

    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(100):
            pass


def be_asked_and_wait():
    os.kill(os.getpid(), signal.SIGTERM)
    wait(10)


def be_asked_while_deleting_and_wait(seconds):
    doomed = Asked()
    del doomed
    wait(seconds)


def wait(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.01)


def test_a_signal_becomes_an_exception_and_the_handlers_of_before_come_back():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Ended) as ended, raised(Ended):
        be_asked_and_wait()
    assert ended.value.args == (signal.SIGTERM,)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_that_python_dropped_is_raised_again():
    with pytest.raises(Ended), raised(Ended):
        be_asked_while_deleting_and_wait(10)


def test_a_dropped_signal_does_not_outlive_what_it_was_to_end():
    with raised(Ended):
        be_asked_while_deleting_and_wait(0)
    # The handler of before would end this process.
    wait(0.2)


def test_a_signal_waits_for_the_end_of_what_must_be_whole():
    done = []

    def work(signals):
        with signals.postponed():
            os.kill(os.getpid(), signal.SIGTERM)
            wait(0.05)
            done.append("inside")
        done.append("after")

    with pytest.raises(Ended), raised(Ended) as signals:
        work(signals)
    assert done == ["inside"]
