"""Files that are whole, folders that are private, and the lock."""

import errno
import os
import signal
import subprocess
import sys

import pytest

from fedmtl.errors import FedmtlError
from fedmtl.runs.folder import create_run, locked, make_private_folder, write_atomic
from fedmtl.runs.log import append_event
from runs.two_tasks import START


class TestWriteAtomic:
    def test_it_replaces_the_file_and_makes_the_folder(self, tmp_path):
        path = tmp_path / "new" / "file"
        write_atomic(path, b"old")
        write_atomic(path, b"new")
        assert path.read_bytes() == b"new"
        assert [entry.name for entry in path.parent.iterdir()] == ["file"]

    def test_a_full_disk_keeps_the_old_file_and_leaves_nothing_else(self, tmp_path, monkeypatch):
        path = tmp_path / "file"
        write_atomic(path, b"old")

        def full(descriptor):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(FedmtlError) as caught:
            write_atomic(path, b"new")
        assert str(caught.value) == (
            f"{tmp_path}: no space left on its disk; free some, or set `output` to another disk"
        )
        assert path.read_bytes() == b"old"
        assert [entry.name for entry in tmp_path.iterdir()] == ["file"]

    def test_only_its_owner_reads_the_file(self, tmp_path):
        write_atomic(tmp_path / "a", b"")
        assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


class TestPrivacy:
    def test_a_run_its_events_and_its_results_are_for_their_owner_only(self, three_rounds):
        before = os.umask(0o022)
        try:
            run = create_run(three_rounds.path.parent, "other")
            append_event(run, START)
        finally:
            os.umask(before)
        assert run.path.stat().st_mode & 0o777 == 0o700
        assert run.events.stat().st_mode & 0o777 == 0o600
        assert three_rounds.results.stat().st_mode & 0o777 == 0o600

    def test_a_folder_that_others_could_open_is_closed(self, tmp_path):
        (tmp_path / "a").mkdir(mode=0o755)
        make_private_folder(tmp_path / "a")
        assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700


HOLD = """
import sys, time
from pathlib import Path
from fedmtl.runs.folder import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(120)
"""


class TestLock:
    def test_a_second_process_is_told_who_is_at_work_and_a_killed_one_leaves_nothing(self, tmp_path):
        holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "locked\n"
            with pytest.raises(FedmtlError) as caught, locked(tmp_path):
                pass
            assert str(caught.value) == (
                f"{tmp_path}: another process is at work in it (process {holder.pid}); wait until it ends, or end it"
                " first"
            )
        finally:
            holder.send_signal(signal.SIGKILL)
            holder.wait()
            holder.stdout.close()
        # The file of the killed process is still there, and hinders nobody.
        assert (tmp_path / ".lock").read_text() == f"{holder.pid}\n"
        with locked(tmp_path):
            assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"

    def test_it_ends_with_its_block_even_by_an_error(self, tmp_path):
        for _ in range(2):
            with pytest.raises(ZeroDivisionError), locked(tmp_path):
                raise ZeroDivisionError

    def test_a_folder_that_is_gone_is_one_line(self, tmp_path):
        with pytest.raises(FedmtlError, match="gone: cannot be written"), locked(tmp_path / "gone"):
            pass
