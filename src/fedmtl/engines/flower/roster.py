"""Who is there: nodes that came are welcomed, and those whose hello is accepted are known by their client's name."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fedmtl.engines.flower.link import Link
from fedmtl.errors import WireError
from fedmtl.federation.handshake import Hello, read_hello
from fedmtl.federation.messages import ClientId

GLANCE = 0.05
# A site that lives says so every two seconds.
SILENCE = 15.0
MOST_NOTES = 1000
ADMIT_EVERY = 1.0

# (hello, the key it came with) -> why not
Judge = Callable[[Hello, bytes], str | None]


@dataclass(frozen=True)
class Note:
    """Somebody came: with a hello that was accepted, or with a reason why not."""

    client: ClientId
    hello: Hello | None = None
    reason: str = ""


@dataclass(frozen=True)
class Present:
    """A site as it last said hello; `coming` counts its node's comings, so that a restart shows."""

    node_id: int
    coming: int
    hello: Hello


class Roster:
    """Welcomes nodes in a thread of its own."""

    def __init__(self, link: Link, welcome: str, judge: Judge, keys: Callable[[], list[bytes]]) -> None:
        self._link, self._welcome, self._judge, self._keys = link, welcome, judge, keys
        self._admit_keys()
        self._notes: deque[Note] = deque(maxlen=MOST_NOTES)
        self._greeted: dict[int, tuple[int, str]] = {}
        self._present: dict[ClientId, Present] = {}
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="roster", daemon=True)
        self._thread.start()

    def present(self) -> dict[ClientId, Present]:
        """The sites that were heard of in the last seconds, by name."""
        now = time.monotonic()
        with self._lock:
            known = dict(self._present)
        return {client: known[client] for client in sorted(known) if self._is_alive(known[client], now)}

    def find(self, client: ClientId) -> Present | None:
        """The site, heard of lately or not."""
        with self._lock:
            return self._present.get(client)

    def name_of(self, node_id: int) -> ClientId | None:
        with self._lock:
            return next((name for name, site in self._present.items() if site.node_id == node_id), None)

    def everybody(self) -> Mapping[ClientId, Present]:
        with self._lock:
            return dict(self._present)

    def take_notes(self) -> list[Note]:
        """Who came since this was last asked; told here, so that one thread writes a run's folder."""
        return [self._notes.popleft() for _ in range(len(self._notes))]

    def close(self) -> None:
        self._done.set()
        self._thread.join(5)

    def _is_alive(self, site: Present, now: float) -> bool:
        return now - self._link.seen.get(site.node_id, 0.0) < SILENCE and not self._link.has_left(site.node_id)

    def _admit_keys(self) -> None:
        """Sites may be enrolled while the run goes on."""
        self._admitted = time.monotonic()
        for key in self._keys():
            self._link.add_node(key)

    def _watch(self) -> None:
        while not self._done.wait(GLANCE):
            if time.monotonic() > self._admitted + ADMIT_EVERY:
                self._admit_keys()
            for node_id, coming in list(self._link.activations.items()):
                if self._greeted.get(node_id, (0, ""))[0] != coming:
                    self._greet(node_id, coming)
            for node_id, (coming, message_id) in list(self._greeted.items()):
                if message_id:
                    self._listen(node_id, coming, message_id)

    def _greet(self, node_id: int, coming: int) -> None:
        before = self._greeted.get(node_id)
        if before is not None and before[1]:
            self._link.close_message(before[1])
        self._greeted[node_id] = (coming, self._link.send(node_id, "welcome", self._welcome))

    def _listen(self, node_id: int, coming: int, message_id: str) -> None:
        name = f"node-{node_id}"
        try:
            envelope = self._link.take_answer(message_id, f"hello-{node_id}")
            if envelope is None:
                return
            self._greeted[node_id] = (coming, "")
            if envelope.error is not None:
                raise WireError(envelope.error)
            hello = read_hello(envelope.words)
            name = hello.client
            reason = self._judge(hello, self._link.public_key(node_id))
        except WireError as error:
            self._greeted[node_id] = (coming, "")
            reason = str(error)
        if reason is None:
            with self._lock:
                self._present[hello.client] = Present(node_id, coming, hello)
            self._notes.append(Note(name, hello))
            self._link.news.set()
        else:
            self._notes.append(Note(name, reason=reason))
            self._link.send(node_id, "refused", reason)
