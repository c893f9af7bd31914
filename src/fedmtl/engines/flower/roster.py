"""Who is there: nodes that came are welcomed, and those whose hello is accepted are known by their client's name."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from fedmtl.engines.flower.enrolment import Enrolments
from fedmtl.engines.flower.records import MOST_LETTERS, Envelope
from fedmtl.errors import FedmtlError
from fedmtl.federation.handshake import Hello, read_hello
from fedmtl.federation.messages import ClientId
from fedmtl.foreign import printable

GLANCE = 0.05
# A site that lives says so every two seconds.
SILENCE = 15.0
MOST_NOTES = 1000
# A node that is not known by a client's name.
UNKNOWN = "unknown"
NOTES_A_MINUTE = 20


class Nodes(Protocol):
    """The nodes that a server can send messages to, and what they answered; a node that is gone is a KeyError.

    `activations` counts how often each node has come, `seen` and `fetched` say when it last lived and took an object;
    `news` is set when one comes or answers.
    """

    @property
    def activations(self) -> Mapping[int, int]: ...

    @property
    def seen(self) -> Mapping[int, float]: ...

    @property
    def fetched(self) -> Mapping[int, float]: ...

    @property
    def news(self) -> threading.Event: ...

    def send(
        self,
        node_id: int,
        kind: str,
        words: str = "",
        frame: bytes | Path | None = None,
        most_bytes: int = ...,
        about: str = "",
    ) -> str:
        """Leave a message for a node and return its id; its answer may have `most_bytes`."""
        ...

    def take_answer(self, message_id: str, name: str) -> Envelope | None:
        """The answer once it has come, its frame in a file of that name; one that cannot be read is a WireError."""
        ...

    def close_message(self, message_id: str) -> None:
        """Forget a message, whatever is answered later."""
        ...

    def is_fetched(self, message_id: str) -> bool:
        """Whether the node has the message whole."""
        ...

    def has_left(self, node_id: int) -> bool: ...

    def remove_node(self, node_id: int) -> None:
        """Forget what was said to a node that may not take part any more."""
        ...

    def public_key(self, node_id: int) -> bytes:
        """What a node proves itself by when it comes again; empty where it has shown nothing."""
        ...

    def take_remarks(self) -> list[tuple[int, str]]:
        """What nodes did that was refused, since this was last called."""
        ...


# (hello, the key it came with) -> why not
Judge = Callable[[Hello, bytes], str | None]


@dataclass(frozen=True)
class Note:
    """Something that happened beside the jobs.

    A site came (with its `hello`); it was refused, which is its failure; or there is a remark, which is nobody's
    failure: about a late answer, about somebody who is not who they say they are, or about the server itself.
    """

    kind: Literal["came", "refused", "remark"]
    client: ClientId
    reason: str = ""
    hello: Hello | None = None


@dataclass(frozen=True)
class Present:
    """A site as it last said hello; `coming` counts its node's comings, so that a restart shows."""

    node_id: int
    coming: int
    hello: Hello


class Allowance:
    """How much is written down of each client: somebody who makes events without end fills no disk with them."""

    def __init__(self, most: int = NOTES_A_MINUTE, now: Callable[[], float] = time.monotonic) -> None:
        self._most, self._now = most, now
        self._since = now()
        self._taken: Counter[ClientId] = Counter()

    def takes(self, client: ClientId) -> bool:
        """Whether one more note about a client may be recorded in this minute."""
        if self._now() >= self._since + 60:
            self._since, self._taken = self._now(), Counter()
        self._taken[client] += 1
        return self._taken[client] <= self._most


class Roster:
    """Welcomes nodes in a separate thread, which nothing that one of them does can end."""

    def __init__(self, link: Nodes, welcome: str, judge: Judge, enrolments: Enrolments) -> None:
        self._link, self._welcome, self._judge, self._enrolments = link, welcome, judge, enrolments
        self._notes: deque[Note] = deque(maxlen=MOST_NOTES)
        self._allowance = Allowance()
        self._last_problem: str | None = None
        self._greeted: dict[int, tuple[int, str]] = {}
        self._present: dict[ClientId, Present] = {}
        self._left: dict[ClientId, str] = {}
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="roster", daemon=True)
        self._thread.start()

    def present(self) -> dict[ClientId, Present]:
        """The sites that were heard of in the last seconds and are enrolled now, by name."""
        with self._lock:
            known = dict(self._present)
        return {
            client: site
            for client, site in sorted(known.items())
            if self._is_alive(site) and self.may_take_part(client, site)
        }

    def find(self, client: ClientId) -> Present | None:
        """The site, heard of lately or not."""
        with self._lock:
            return self._present.get(client)

    def may_take_part(self, client: ClientId, site: Present) -> bool:
        """Whether a site is enrolled at this moment, under its key and for all that it brought."""
        try:
            key = self._link.public_key(site.node_id)
        except KeyError:
            return False
        enrolled = self._enrolments.tasks().get(client)
        return (
            enrolled is not None
            and self._enrolments.name_of(key) in (None, client)
            and set(site.hello.tasks) <= set(enrolled)
        )

    def name_of(self, node_id: int) -> ClientId | None:
        """The client that a node is: by its key where there are keys, else by the hello that was accepted."""
        try:
            enrolled = self._enrolments.name_of(self._link.public_key(node_id))
        except KeyError:
            return None
        if enrolled is not None:
            return enrolled or None
        with self._lock:
            return next((name for name, site in self._present.items() if site.node_id == node_id), None)

    def everybody(self) -> Mapping[ClientId, Present]:
        with self._lock:
            return dict(self._present)

    def left(self) -> dict[ClientId, str]:
        """The sites that cannot take part, or were refused, and have not come again since; with the reason."""
        with self._lock:
            return dict(self._left)

    def take_notes(self) -> list[Note]:
        """What happened since this was last called; passed on here, so that one thread writes a run's folder."""
        for node_id, reason in self._link.take_remarks():
            self._say(Note("remark", self.name_of(node_id) or UNKNOWN, reason))
        return [self._notes.popleft() for _ in range(len(self._notes))]

    def close(self) -> None:
        self._done.set()
        self._thread.join(5)

    def _is_alive(self, site: Present) -> bool:
        silence = time.monotonic() - self._link.seen.get(site.node_id, 0.0)
        return silence < SILENCE and not self._link.has_left(site.node_id)

    def _watch(self) -> None:
        while not self._done.wait(GLANCE):
            self._guarded(self._look_at_enrolments)
            for node_id, coming in list(self._link.activations.items()):
                if self._greeted.get(node_id, (0, ""))[0] != coming:
                    self._guarded(self._greet, node_id, coming)
            for node_id, (coming, message_id) in list(self._greeted.items()):
                if message_id:
                    self._guarded(self._listen, node_id, coming, message_id)

    def _guarded(self, step: Callable[..., None], *arguments: int | str) -> None:
        """Whatever one node, or the list, brings about is a remark; the others are still welcomed."""
        try:
            step(*arguments)
        except Exception as error:
            node_id = arguments[0] if arguments else None
            client = UNKNOWN
            if isinstance(node_id, int):
                client = self.name_of(node_id) or UNKNOWN
                # Not again and again: it is welcomed anew when it comes anew.
                self._greeted[node_id] = (int(arguments[1]), "")
            self._say(Note("remark", client, printable(f"{type(error).__name__}: {error}", MOST_LETTERS)))

    def _say(self, note: Note) -> None:
        if (note.kind != "remark" or note not in self._notes) and self._allowance.takes(note.client):
            self._notes.append(note)
            self._link.news.set()

    def _look_at_enrolments(self) -> None:
        problem = self._enrolments.problem()
        if problem != self._last_problem:
            self._last_problem = problem
            self._say(Note("remark", "", problem or "the list of enrolled sites can be read again"))
        for client, site in self.everybody().items():
            if not self._link.has_left(site.node_id) and not self.may_take_part(client, site):
                self._link.remove_node(site.node_id)
                self._say(Note("remark", client, "is not enrolled any more, or not for what it brought"))

    def _greet(self, node_id: int, coming: int) -> None:
        before = self._greeted.get(node_id)
        if before is not None and before[1]:
            self._link.close_message(before[1])
        self._greeted[node_id] = (coming, "")
        # A node that is gone already is welcomed when it comes again.
        with suppress(KeyError):
            self._greeted[node_id] = (coming, self._link.send(node_id, "welcome", self._welcome))

    def _listen(self, node_id: int, coming: int, message_id: str) -> None:
        hello: Hello | None = None
        claimed: ClientId | None = None
        has_left = False
        try:
            envelope = self._link.take_answer(message_id, f"hello-{node_id}")
            if envelope is None:
                return
            self._greeted[node_id] = (coming, "")
            if envelope.error is not None:
                claimed, has_left = envelope.client, True
                raise FedmtlError(f"left: {envelope.error}")
            hello = read_hello(envelope.words)
            claimed = hello.client
            reason = self._taken_by_another(node_id, hello.client) or self._judge(hello, self._link.public_key(node_id))
        except FedmtlError as error:
            self._greeted[node_id] = (coming, "")
            reason = str(error)
        if hello is not None and reason is None:
            with self._lock:
                self._present[hello.client] = Present(node_id, coming, hello)
                self._left.pop(hello.client, None)
            self._say(Note("came", hello.client, hello=hello))
            return
        words = printable(reason or "", 2000)
        note = self._refused(node_id, claimed, words)
        if note.kind == "refused":
            with self._lock:
                self._left[note.client] = words
        self._say(note)
        if has_left:
            # It knows; a message to it would wait for its next coming, and end that.
            return
        with suppress(KeyError):
            self._link.send(node_id, "refused", words)

    def _refused(self, node_id: int, claimed: ClientId | None, reason: str) -> Note:
        """A refusal is the failure of the site it came from, never of the one whose name somebody else gave."""
        client = self.name_of(node_id)
        if client is None and claimed is not None and self._enrolments.name_of(b"") is None:
            is_free = self._taken_by_another(node_id, claimed) is None and claimed in self._enrolments.tasks()
            client = claimed if is_free else None
        return Note("remark", UNKNOWN, reason) if client is None else Note("refused", client, reason)

    def _taken_by_another(self, node_id: int, client: ClientId) -> str | None:
        """A name belongs to the node that took it for as long as that lives; keys decide where there are any."""
        known = self.find(client)
        if self._enrolments.name_of(self._link.public_key(node_id)) is not None:
            return None
        if known is None or known.node_id == node_id or not self._is_alive(known):
            return None
        key = self._link.public_key(node_id)
        if key and key == self._link.public_key(known.node_id):
            # The same site, before it was noticed that its earlier process is gone.
            return None
        return f"another process is here as {client}; end that one, or wait {SILENCE:.0f} s after it ended"
