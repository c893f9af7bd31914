"""A server and its sites in threads of this process, over real sockets; elsewhere processes compare weights."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fedmtl.config import Config
from fedmtl.deploy.server import Endpoint, serve_run
from fedmtl.deploy.site_worker import SiteSettings, start_site
from fedmtl.engines.flower.addresses import Address
from fedmtl.engines.flower.audit import Audit
from fedmtl.engines.flower.calls import SiteJob
from fedmtl.engines.flower.certificates import CA, make_authority, make_node_key, read_private_key
from fedmtl.engines.flower.enrolment import enroll
from fedmtl.engines.flower.line import Line, SiteKeys
from fedmtl.engines.flower.site_service import serve_site
from fedmtl.engines.processes import Handler, WorkerPool
from fedmtl.federation.policy import Policy
from fedmtl.runs.event_lines import Event
from fedmtl.runs.events import FailureEvent, WaitingEvent
from fedmtl.runs.folder import RunFolder, make_private_folder
from raw_events import raw_events

MAX_BYTES = 1 << 30
PATIENCE = 60.0


@dataclass
class Server:
    """`serve_run` in a thread; `events` are all it told."""

    config: Config
    certs: Path | None = None
    name: str = "deployed"
    events: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._address: queue.Queue[Address] = queue.Queue()
        self._outcome: queue.Queue[RunFolder | BaseException] = queue.Queue()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self.address = self._listening()

    def _listening(self) -> Address:
        while self._address.empty() and self._thread.is_alive():
            time.sleep(0.02)
        if self._address.empty():
            self.finish()
        return self._address.get()

    def _serve(self) -> None:
        try:
            endpoint = Endpoint(Address("127.0.0.1", 0), self.certs)
            self._outcome.put(serve_run(self.config, self.name, endpoint, self._observe))
        except BaseException as error:
            self._outcome.put(error)

    def _observe(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, WaitingEvent):
            host, _, port = event.address.rpartition(":")
            self._address.put(Address(host, int(port)))

    def finish(self) -> RunFolder:
        outcome = self._outcome.get(timeout=PATIENCE)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def failures(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for event in self.events:
            if isinstance(event, FailureEvent):
                found.setdefault(event.client, []).append(event.reason or "")
        return found


@dataclass
class Site:
    """`serve_site` in a thread, its worker in the same."""

    server: Server
    folder: Path
    client: str
    tasks: tuple[str, ...]
    keys: SiteKeys | None = None
    files: dict[str, str] = field(default_factory=dict)
    is_started: bool = True
    leaves_after: int | None = None
    policy: Policy = field(default_factory=Policy)
    save_model: Path | None = None
    key: Path | None = None
    said: list[str] = field(default_factory=list)
    outcome: Any = None

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._serve, daemon=True)
        if self.is_started:
            self._thread.start()

    def _serve(self) -> None:
        try:
            make_private_folder(self.folder)
            wants = self.save_model is not None
            audit = Audit(self.folder)
            self.outcome = serve_site(self.line(), self.pool(), self.said.append, audit, self.client, wants_model=wants)
        except Left:
            self.outcome = "left"
        except BaseException as error:
            self.outcome = error

    def line(self) -> Line:
        return Line(self.server.address, self.keys, self.folder / "spool", MAX_BYTES)

    def pool(self) -> WorkerPool:
        settings = SiteSettings(
            self.client,
            self.tasks,
            self.folder,
            self.folder / "spool",
            self.files,
            device="cpu",
            policy=self.policy,
            save_model=self.save_model,
            key=self.key,
        )
        return WorkerPool(partial(start_in_turn, leaves_after=self.leaves_after), settings, 0)

    def finish(self) -> Any:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), f"{self.client} goes on; it said {self.said}"
        return self.outcome


# New encoders are drawn with torch's own generator, of which a process has one.
TURN = threading.Lock()


class Left(BaseException):
    """The site's process is gone, in the middle of a job."""


def start_in_turn(settings: SiteSettings, leaves_after: int | None = None) -> Handler:
    handler = start_site(settings)
    jobs = 0

    def handle(call: Any) -> Any:
        nonlocal jobs
        jobs += isinstance(call, SiteJob)
        if leaves_after is not None and jobs > leaves_after:
            raise Left
        with TURN:
            return handler(call)

    return handle


def make_certs(folder: Path, enrolled: dict[str, Iterable[str]], host: str = "127.0.0.1") -> dict[str, SiteKeys]:
    """An authority, and enrolled sites with their keys."""
    make_authority(folder, [host])
    found = {}
    for name, tasks in enrolled.items():
        private, public = make_node_key(name, folder / "sites")
        enroll(folder, name, public.read_bytes(), list(tasks))
        found[name] = SiteKeys(read_private_key(private), folder / CA)
    return found


def of_kind(run: RunFolder, kind: str) -> list[dict[str, Any]]:
    return [event for event in raw_events(run) if event["event"] == kind]
