"""Ctrl-C, SIGTERM and a reader that leaves: the folder stays whole, and the run can go on."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.small_runs import small
from fedmtl.cli.run import loading
from fedmtl.errors import FedmtlError
from fedmtl.runs.folder import RunFolder
from raw_events import raw_events

FEDMTL = [sys.executable, "-c", "from fedmtl.cli import main; main()"]
# Long enough that a signal after round 1 always comes before the end.
NUM_ROUNDS = 15
LONG = small(f"training.num_rounds={NUM_ROUNDS}", "compute.workers=1")


def default_signals() -> None:
    # A shell without job control starts background jobs with SIGINT ignored, and so its children.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run of many rounds that has told its first one."""
    process = subprocess.Popen(
        [*FEDMTL, "run", *LONG],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        start_new_session=True,
        preexec_fn=default_signals,
    )
    with process:
        assert process.stdout is not None
        while "round 1/" not in process.stdout.readline():
            assert process.poll() is None
        yield process
        if process.poll() is None:
            process.kill()


def check_folder(process: subprocess.Popen[str], run: RunFolder, number: signal.Signals) -> None:
    """The run ended by this signal, and its folder is whole up to the last round it told."""
    _, errors = process.communicate(timeout=60)
    events = raw_events(run)
    end, rounds = events[-1], [event["round"] for event in events if event["event"] == "round"]
    assert process.returncode == 128 + number
    assert (end["status"], end["rounds"]) == ("interrupted", rounds[-1])
    assert rounds == list(range(len(rounds)))
    assert rounds[-1] < NUM_ROUNDS
    assert errors == f"error: ended by {number.name} after round {rounds[-1]}; go on with `fedmtl run --resume demo`\n"
    assert len(run.results.read_text().splitlines()) == 1 + len(rounds)
    assert run.report.exists()
    assert (run.model / "weights.safetensors").exists()
    assert not run.spool.exists()


@pytest.mark.slow
def test_sigterm_ends_the_run_at_its_last_whole_round(started, tmp_path):
    started.terminate()
    check_folder(started, RunFolder(tmp_path / "runs/demo"), signal.SIGTERM)


@pytest.mark.slow
def test_a_run_ended_by_ctrl_c_goes_on_to_the_weights_of_one_that_was_not(cli, started, tmp_path):
    run = RunFolder(tmp_path / "runs/demo")
    # To the whole group, as a terminal does: the workers must not die of it.
    os.killpg(started.pid, signal.SIGINT)
    check_folder(started, run, signal.SIGINT)
    # Without workers, which is the same computation and needs no start.
    config = run.config.read_text()
    run.config.write_text(config.replace("  workers: 1\n", "  workers: 0\n"))
    done = cli("run", "--resume", "demo", "--json")
    assert done.code == 0, done.err
    resumed = json.loads(done.out)
    whole = json.loads(cli("run", *LONG, "--set", "compute.workers=0", "--json", "--name", "whole").out)
    assert resumed["rounds"] == whole["rounds"] == NUM_ROUNDS
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert raw_events(run)[-1]["status"] == "done"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_libraries_load_waits_for_them_and_is_one_line(number):
    before = signal.getsignal(number)
    loaded = []

    def load() -> None:
        with loading():
            os.kill(os.getpid(), number)
            # Half a library is none: what follows is still done.
            loaded.append("all of it")

    with pytest.raises(FedmtlError, match=f"ended by {number.name} before the run began") as caught:
        load()
    assert loaded == ["all of it"]
    assert caught.value.exit_code == 128 + number
    assert signal.getsignal(number) == before


@pytest.mark.slow
def test_a_reader_that_leaves_does_not_end_the_run(tmp_path):
    # `tiny` is the encoder that takes the least to load.
    arguments = [*FEDMTL, "run", *small("training.num_rounds=1", "model.server_model=tiny")]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0
    assert raw_events(RunFolder(tmp_path / "runs/demo"))[-1]["status"] == "done"
