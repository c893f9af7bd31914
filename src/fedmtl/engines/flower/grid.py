"""A Flower app's two ends, over Flower's public API alone: the nodes of a stock SuperLink, and what runs at each.

A node is welcomed when the Grid lists it and again when it comes back; a message to a node that went away is forgotten,
and sent again by whoever sent it. A ClientApp runs in a new process for every message, so each message has all that its
answer needs: the welcome comes along with every job.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedmtl.engines.flower.records import MOST_LETTERS, Envelope, fill_records, open_records, read_words
from fedmtl.federation.faults import SENTENCES, read_fault
from fedmtl.foreign import printable

# Between two looks at the SuperLink for answers, and for nodes.
GLANCE = 0.2
NODES_EVERY = 1.0
MOST_WORDS = 40 << 20
# A SuperLink that does not answer is tried again for so long; a heartbeat of Flower's own ends the app's process later.
PATIENCE = 120.0
# The round's deadline is ours; Flower drops what is older, whatever became of this process.
TTL = 7 * 24 * 3600.0
CRASHED = f"{SENTENCES['worker_ended']}, or the app could not be loaded; its SuperNode's log says which"


@dataclass
class _Sent:
    """A message to a node, and its answer once that came."""

    node_id: int
    most_bytes: int
    reply: Message | None = None


class GridPort:
    """The SuperNodes of the SuperLink that runs this app; `welcome` goes along with every message.

    A separate thread looks for nodes and answers. Nodes stay when a run is over: others may run on them. A node is
    known by its number where Flower's keys give it always the same (`has_numbers`), else by what its site's folder
    shows.
    """

    stay = True
    address = "Flower's SuperLink"

    def __init__(self, grid: Grid, spool: Path, welcome: str, *, has_numbers: bool = False) -> None:
        self._grid, self._spool, self._welcome, self._has_numbers = grid, spool, welcome, has_numbers
        self.nodes = self
        self.activations: Counter[int] = Counter()
        self.seen: dict[int, float] = {}
        self.fetched: dict[int, float] = {}
        self.news = threading.Event()
        self._present: set[int] = set()
        self._marks: dict[int, bytes] = {}
        self._sent: dict[str, _Sent] = {}
        self._remarks: list[tuple[int, str]] = []
        # One for the Grid, whose calls may take long, and one for what is known here.
        self._grid_lock, self._lock = threading.Lock(), threading.RLock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="grid", daemon=True)
        self._thread.start()

    def send(
        self,
        node_id: int,
        kind: str,
        words: str = "",
        frame: bytes | Path | None = None,
        most_bytes: int = MOST_WORDS,
        about: str = "",
    ) -> str:
        """Push a message to a node; one that is gone is a KeyError."""
        if self.has_left(node_id):
            raise KeyError(node_id)
        data = frame.read_bytes() if isinstance(frame, Path) else frame
        named = {"kind": kind, "words": words, "welcome": "" if kind == "welcome" else self._welcome}
        message_type = MessageType.TRAIN if kind == "job" else MessageType.QUERY
        # Flower's logs print it as the round.
        group = "".join(filter(str.isdigit, about))
        message = Message(fill_records(named, data), node_id, message_type, ttl=TTL, group_id=group)
        with self._grid_lock:
            found = [message_id for message_id in self._grid.push_messages([message]) if message_id]
            if not found:
                raise KeyError(node_id)
            # Before its answer is looked for.
            with self._lock:
                self._sent[found[0]] = _Sent(node_id, most_bytes)
        return found[0]

    def take_answer(self, message_id: str, name: str) -> Envelope | None:
        with self._lock:
            sent = self._sent.get(message_id)
            if sent is None or sent.reply is None:
                return None
            del self._sent[message_id]
        if sent.reply.has_error():
            fault = read_fault(sent.reply.error.reason)
            return Envelope(error=CRASHED) if fault is None else Envelope(error=fault.words(), client=fault.client)
        mark = read_words(sent.reply.content).get("mark", "")
        if mark:
            self._marks[sent.node_id] = mark.encode()
        return open_records(sent.reply.content, self._spool / name, sent.most_bytes)

    def close_message(self, message_id: str) -> None:
        with self._lock:
            self._sent.pop(message_id, None)

    def is_fetched(self, message_id: str) -> bool:
        """Whether the message was answered: Flower says no earlier that a node has it."""
        with self._lock:
            sent = self._sent.get(message_id)
            return sent is None or sent.reply is not None

    def has_left(self, node_id: int) -> bool:
        with self._lock:
            return node_id not in self._present

    def remove_node(self, node_id: int) -> None:
        with self._lock:
            self._sent = {message_id: sent for message_id, sent in self._sent.items() if sent.node_id != node_id}

    def public_key(self, node_id: int) -> bytes:
        """A node's number, or what only its site's folder has, as it showed it with its hello."""
        return number_key(node_id) if self._has_numbers else self._marks.get(node_id, b"")

    def take_remarks(self) -> list[tuple[int, str]]:
        with self._lock:
            taken, self._remarks = self._remarks, []
        return taken

    def close(self) -> None:
        self._done.set()
        self._thread.join(30)

    def _watch(self) -> None:
        looked = answered = time.monotonic()
        while not self._done.wait(GLANCE):
            try:
                if not self.activations or time.monotonic() >= looked + NODES_EVERY:
                    self._look_for_nodes()
                    looked = time.monotonic()
                self._look_for_answers()
                answered = time.monotonic()
            except Exception as error:
                # The SuperLink is away for a moment; without it, nodes are silent, and rounds end at their deadline.
                if time.monotonic() > answered + PATIENCE:
                    answered = time.monotonic()
                    reason = printable(f"the SuperLink does not answer: {error!r}", MOST_LETTERS)
                    with self._lock:
                        self._remarks.append((0, reason))

    def _look_for_nodes(self) -> None:
        with self._grid_lock:
            found = set(self._grid.get_node_ids())
        now = time.monotonic()
        with self._lock:
            self.seen.update(dict.fromkeys(found, now))
            for node_id in found - self._present:
                self._forget(node_id)
                self.activations[node_id] += 1
                self.news.set()
            self._present = found

    def _look_for_answers(self) -> None:
        with self._lock:
            waiting = {message_id for message_id, sent in self._sent.items() if sent.reply is None}
        if not waiting:
            return
        with self._grid_lock:
            replies = list(self._grid.pull_messages(waiting))
        with self._lock:
            for reply in replies:
                sent = self._sent.get(reply.metadata.reply_to_message_id)
                if sent is None:
                    continue
                if reply.has_error() and reply.metadata.src_node_id != sent.node_id:
                    # The SuperLink's word for a node that is away: it is welcomed anew when it is listed again.
                    self._forget(sent.node_id)
                    self._present.discard(sent.node_id)
                    continue
                sent.reply = reply
                self.fetched[sent.node_id] = time.monotonic()
                self.news.set()

    def _forget(self, node_id: int) -> None:
        """What was said to a node before it went is not answered any more."""
        self._marks.pop(node_id, None)
        self.remove_node(node_id)


def number_key(node_id: int) -> bytes:
    """What stands for a node that is known by its number."""
    return f"node {node_id}".encode()


@dataclass(frozen=True)
class Incoming:
    """A message at a site: its kind and words, the welcome that came along, its frame in a file."""

    envelope: Envelope
    welcome: str


@dataclass(frozen=True)
class Answer:
    """What leaves a site: words or a frame, or the fault in its place; `mark` is what it is known by again."""

    kind: str = ""
    words: str = ""
    frame: Path | None = None
    fault: str | None = None
    mark: str = ""


# (open the message into a folder, the node's config) -> the answer
Answering = Callable[[Callable[[Path, int], Incoming], Mapping[str, Any]], Answer]


def make_client_app(answer: Answering) -> ClientApp:
    """Return an app that has every message answered by `answer`, in the process that Flower started for it."""
    app = ClientApp()

    def handle(message: Message, context: Context) -> Message:
        def opened(folder: Path, max_bytes: int) -> Incoming:
            envelope = open_records(message.content, folder / f"frame-{message.metadata.message_id[:16]}", max_bytes)
            return Incoming(envelope, read_words(message.content).get("welcome", ""))

        given = answer(opened, dict(context.node_config))
        if given.fault is not None:
            return Message(Error(code=0, reason=given.fault), reply_to=message)
        words = {"kind": given.kind, "words": given.words, "mark": given.mark}
        frame = None
        if given.frame is not None:
            frame = given.frame.read_bytes()
            with suppress(OSError):
                given.frame.unlink()
        content: RecordDict = fill_records(words, frame)
        return Message(content, reply_to=message)

    for register in (app.train, app.evaluate, app.query):
        register()(handle)
    return app


def make_server_app(lead: Callable[[Grid, Mapping[str, Any]], None]) -> ServerApp:
    """Return an app that has a run led by `lead`, which is given the Grid and the run's config of Flower."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        lead(grid, dict(context.run_config))

    return app
