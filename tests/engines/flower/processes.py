"""A deployment in processes of its own, as a user starts it; each in a session whose members can be counted."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engines.flower.deployment import make_certs
from fedmtl.config import Config
from fedmtl.config.file import dump_config
from fedmtl.experiment.run import start_run
from fedmtl.runs.folder import RunFolder

COMMAND = (sys.executable, "-m", "fedmtl")


@dataclass
class Program:
    """One fedmtl command; `log` holds what it wrote."""

    log: Path
    process: subprocess.Popen[bytes]

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, seconds: float = 120) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.log.name} goes on; it wrote:\n{self.text()}") from None

    def wait_for(self, words: str, seconds: float = 120) -> None:
        end = time.monotonic() + seconds
        while not re.search(words, self.text()):
            is_going = time.monotonic() < end and self.process.poll() is None
            assert is_going, f"{words!r} is not in:\n{self.text()}"
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL for the program itself; what it started has to notice."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def session(self) -> list[int]:
        return session_members(self.process.pid)


@dataclass
class Programs:
    """All programs of a test; whatever happens, none outlives it."""

    folder: Path
    prefix: Sequence[str] = ()
    started: list[Program] = field(default_factory=list)

    def start(self, name: str, *arguments: str, prefix: Sequence[str] | None = None) -> Program:
        self.folder.mkdir(parents=True, exist_ok=True)
        log = self.folder / f"{name}-{len(self.started)}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*(self.prefix if prefix is None else prefix), *COMMAND, *arguments],
                cwd=self.folder,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            )
        program = Program(log, process)
        self.started.append(program)
        return program

    def left(self, seconds: float = 10) -> list[int]:
        """The processes that are still there some seconds after all programs ended."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            members = [pid for program in self.started for pid in program.session()]
            if not members:
                return []
            time.sleep(0.1)
        return members

    def end(self) -> None:
        for program in self.started:
            for pid in program.session():
                os.kill(pid, signal.SIGKILL)
            program.process.wait()


def session_members(session: int) -> list[int]:
    """The processes of a session that are not zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, _, own = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue
            if int(own) == session and state != "Z":
                found.append(int(entry.name))
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def deployed_and_alone(folder: Path, config: Config, sites: Mapping[str, tuple[str, Path | None]]) -> list[RunFolder]:
    """The run of a config over sites, each with its task and file, in processes over TLS, and on one machine."""
    (folder / "run.yaml").write_text(dump_config(config))
    programs = Programs(folder)
    try:
        make_certs(folder / "certs", {name: [task] for name, (task, _) in sites.items()})
        port = free_port()
        server = programs.start("server", "server", "--config", "run.yaml", "--listen", f"127.0.0.1:{port}",
                                "--certs", "certs", "--name", "sites")  # fmt: skip
        started = [
            programs.start(name, "client", "--client-id", name, "--tasks", task, "--server", f"127.0.0.1:{port}",
                           "--ca", "certs/ca.crt", "--key", f"certs/sites/{name}.key",
                           *(["--data", str(data)] if data else []))
            for name, (task, data) in sites.items()
        ]  # fmt: skip
        alone = start_run(config, "alone")
        assert [site.wait() for site in started] == [0] * len(sites), started[0].text()
        assert server.wait() == 0, server.text()
    finally:
        programs.end()
    return [RunFolder(Path(config.output) / "sites"), alone]
