import os
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch

from fedmtl.engines.local import LocalEngine
from fedmtl.engines.processes import raised
from fedmtl.experiment import run as experiment_run
from fedmtl.experiment.run import Interrupted, resume_run, start_run
from fedmtl.federation import checkpoint
from fedmtl.runs.folder import RunFolder
from raw_events import raw_events


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


def be_asked_and_raise(error):
    try:
        be_asked_and_wait()
    except Ended:
        raise error from None


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


def test_an_error_that_was_made_of_a_signal_is_the_signal_again():
    with pytest.raises(Ended) as ended, raised(Ended):
        be_asked_and_raise(ValueError("as compiled code does"))
    assert isinstance(ended.value.__cause__, ValueError)


def test_where_such_an_error_was_handled_the_check_raises_the_signal():
    with raised(Ended) as signals:
        signals.check()
        with suppress(Ended):
            be_asked_and_wait()
        with pytest.raises(Ended):
            signals.check()


def test_an_error_without_a_signal_and_a_second_signal_stay_what_they_are():
    with pytest.raises(ValueError, match="mine"), raised(Ended):
        raise ValueError("mine")
    with pytest.raises(KeyboardInterrupt), raised(Ended):
        be_asked_and_raise(KeyboardInterrupt())


def signalled(original, at):
    """The function, which gets SIGTERM right after its call number `at`."""
    calls = iter(range(10**6))

    def call(*arguments, **keys):
        result = original(*arguments, **keys)
        if next(calls) == at:
            os.kill(os.getpid(), signal.SIGTERM)
            wait(0)
        return result

    return call


def check_goes_on(run, whole):
    """The run says that it was interrupted, blames no client, and comes to the weights of one that was not."""
    events = raw_events(run)
    assert (events[-1]["event"], events[-1]["status"]) == ("end", "interrupted"), events[-1]
    assert not [event for event in events if event["event"] == "failure"]
    resumed = raw_events(resume_run(run))
    assert resumed[-1]["weights_sha256"] == whole
    assert [event["round"] for event in resumed if event["event"] == "round"] == [0, 1, 2]


def test_a_signal_right_after_a_checkpoint_leaves_a_run_that_goes_on(make_config, monkeypatch):
    config = make_config("training.keep_optimizer=true")
    sha = raw_events(start_run(config, "whole"))[-1]["weights_sha256"]
    run = RunFolder(Path(config.output) / "signalled")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_atomic", signalled(checkpoint.write_atomic, 1))
        with pytest.raises(Interrupted, match="ended by SIGTERM after round 1"):
            start_run(config, "signalled")
    check_goes_on(run, sha)


def test_a_signal_that_a_library_makes_an_error_of_costs_no_client(make_config, monkeypatch):
    # safetensors reads a tensor through this function, and says of any exception in it that the file is broken.
    config = make_config("training.keep_optimizer=true")
    sha = raw_events(start_run(config, "whole"))[-1]["weights_sha256"]
    run = RunFolder(Path(config.output) / "signalled")
    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "__getitem__", signalled(torch.UntypedStorage.__getitem__, 3))
        with pytest.raises(Interrupted, match="ended by SIGTERM after round 1"):
            start_run(config, "signalled")
    check_goes_on(run, sha)


@pytest.mark.parametrize("step", ["LocalEngine.close", "save_model", "write_report"])
def test_a_signal_when_the_rounds_are_over_waits_for_the_end(make_config, monkeypatch, step):
    module = "fedmtl.engines.local" if step == "LocalEngine.close" else "fedmtl.experiment.run"
    original = LocalEngine.close if step == "LocalEngine.close" else getattr(experiment_run, step)
    monkeypatch.setattr(f"{module}.{step}", signalled(original, 0))
    run = start_run(make_config("training.num_rounds=1"), "late")
    assert raw_events(run)[-1]["status"] == "done"
    assert run.report.exists()


def test_the_farewell_comes_when_the_folder_is_whole_and_a_signal_cuts_it_short(make_config, monkeypatch):
    config = make_config("training.num_rounds=1")
    run = RunFolder(Path(config.output) / "parted")
    steps = []

    def farewell(state):
        steps.append((state.round, raw_events(run)[-1]["event"], run.report.exists()))
        os.kill(os.getpid(), signal.SIGTERM)
        wait(0)
        steps.append("the rest of it")

    monkeypatch.setattr(experiment_run, "drive", partial(experiment_run.drive, farewell=farewell))
    start_run(config, "parted")
    assert steps == [(1, "end", True)]
    assert raw_events(run)[-1]["status"] == "done"
    assert not run.spool.exists()


def test_a_second_signal_does_not_cost_the_first_ones_end(make_config, monkeypatch):
    config = make_config()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_atomic", signalled(checkpoint.write_atomic, 1))
        patch.setattr(experiment_run, "save_model", signalled(experiment_run.save_model, 0))
        with pytest.raises(Interrupted, match="ended by SIGTERM after round 1; go on with `fedmtl run --resume"):
            start_run(config, "twice")
    events = raw_events(RunFolder(Path(config.output) / "twice"))
    assert (events[-1]["event"], events[-1]["status"]) == ("end", "interrupted")
