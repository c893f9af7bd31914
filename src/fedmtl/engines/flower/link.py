"""The server's end of the line: Flower's link state, with our limits on messages and their answers."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Message, MessageType

from fedmtl.engines.flower.envelope import fill_envelope, open_envelope
from fedmtl.engines.flower.object_files import ObjectFiles, Upload
from fedmtl.engines.flower.private import (
    FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE,
    NOOP_FEDERATION_ID,
    NOOP_FLWR_AID,
    SUPERLINK_NODE_ID,
    InMemoryLinkState,
    NodeStatus,
    NoOpFederationManager,
    ObjectTree,
    TaskIdentity,
    TaskType,
    get_all_nested_objects,
    get_object_tree,
    message_to_proto,
    no_object_id_recompute,
    remove_content_from_message,
)
from fedmtl.engines.flower.private import (
    Message as ProtoMessage,
)
from fedmtl.engines.flower.records import Envelope
from fedmtl.engines.flower.signing import Refused
from fedmtl.errors import WireError

# The round's deadline is ours; Flower only drops what nobody requested for days.
TTL = 30 * 24 * 3600.0
# Of a hello: its token rows, as text.
MOST_WORDS = 40 << 20
MOST_REMARKS = 100
# Closed messages whose late answer can still be named.
MOST_CLOSED = 1000
# On loopback any process may join.
MOST_NODES = 1000
HEARTBEAT = 1800.0


@dataclass
class _Sent:
    """A message to a node: what it is about, the objects the node may fetch, and what its answer may have."""

    node_id: int
    about: str
    objects: frozenset[str]
    most_bytes: int
    upload: Upload | None = None
    failure: str = ""


class Link(InMemoryLinkState):
    """Messages to nodes and what they answered.

    `activations` counts how often each node has come, `seen` and `fetched` say when it last lived and took an object.
    """

    def __init__(self, folder: Path) -> None:
        self._files = ObjectFiles(folder / "objects")
        super().__init__(NoOpFederationManager(), self._files)
        self._folder = folder
        self._sent: dict[str, _Sent] = {}
        self._sessions: dict[str, Upload] = {}
        self._closed: OrderedDict[str, str] = OrderedDict()
        self.activations: Counter[int] = Counter()
        self.seen: dict[int, float] = {}
        self.fetched: dict[int, float] = {}
        self.remarks: list[tuple[int, str]] = []
        self.news = threading.Event()
        self._run_id = self._start()

    def _start(self) -> int:
        run_id = self.create_run("", "", "", {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP)
        (task_id,) = (task.task_id for task in self.task_store.values() if task.run_id == run_id)
        self.claim_task(task_id)
        self.activate_task(task_id)
        # Without a token the run never expires: who runs it lives in this process.
        self.task_token_store.clear()
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = run_id, task_id, SUPERLINK_NODE_ID
        return run_id

    # What the server does.

    def send(
        self,
        node_id: int,
        kind: str,
        words: str = "",
        frame: bytes | Path | None = None,
        most_bytes: int = MOST_WORDS,
        about: str = "",
    ) -> str:
        """Leave a message for a node; its objects are there before it can be fetched.

        Its answer may have `most_bytes`; `about` names the message where an answer comes too late. A node that is gone
        is a KeyError.
        """
        message = Message(fill_envelope(kind, words, frame), node_id, MessageType.QUERY, ttl=TTL)
        with no_object_id_recompute():
            message.metadata.__dict__["_message_id"] = message.object_id
            self._files.preregister(self._run_id, get_object_tree(message))
            objects = get_all_nested_objects(message)
            for object_id, each in objects.items():
                self._files.put(object_id, each.deflate())
        message_id: str = message.metadata.message_id
        with self.lock:
            self._sent[message_id] = _Sent(node_id, about or kind, frozenset(objects), most_bytes)
            is_stored = self.store_message_ins(remove_content_from_message(message)) is not None
        if not is_stored:
            self.close_message(message_id)
            raise KeyError(node_id)
        return message_id

    def is_fetched(self, message_id: str) -> bool:
        """Whether a node has a message whole; it says so, and its objects go."""
        return not self._files.has(message_id)

    def has_left(self, node_id: int) -> bool:
        with self.lock:
            node = self.nodes.get(node_id)
            return node is None or bool(node.status != NodeStatus.ONLINE)

    def is_waiting_for(self, public_key: bytes) -> bool:
        """Whether there is a message that the node of this key has not fetched."""
        with self.lock:
            node_id = self.node_public_key_to_node_id.get(public_key)
            return any(
                message.metadata.dst_node_id == node_id and not message.metadata.delivered_at
                for message in self.message_ins_store.values()
            )

    def take_answer(self, message_id: str, name: str) -> Envelope | None:
        """The answer once all of it has come, its frame in a file of that name; then the message is closed.

        An answer that breaks a limit, or that cannot be read, is a WireError.
        """
        with self.lock:
            sent = self._sent.get(message_id)
            upload = None if sent is None else sent.upload
        if sent is None or (upload is None and not sent.failure):
            return None
        failure = sent.failure or (upload.failure if upload is not None else "")
        if not failure and upload is not None and not upload.is_whole():
            return None
        try:
            if failure or upload is None:
                raise WireError(failure)
            return open_envelope(upload.root, upload.take, self._folder / name, sent.most_bytes)
        finally:
            self.close_message(message_id)

    def close_message(self, message_id: str) -> None:
        """Forget a message; an answer that still comes is refused."""
        with self.lock:
            sent = self._sent.pop(message_id, None)
            self.delete_messages({message_id})
            if sent is not None:
                self._closed[message_id] = sent.about
                if len(self._closed) > MOST_CLOSED:
                    self._closed.popitem(last=False)
                if sent.upload is not None:
                    self._sessions.pop(sent.upload.session, None)
        self._files.delete(message_id)
        if sent is not None and sent.upload is not None:
            sent.upload.delete()

    def take_remarks(self) -> list[tuple[int, str]]:
        """What nodes did that was refused, since this was last called."""
        with self.lock:
            taken, self.remarks = self.remarks, []
        return taken

    def remove_node(self, node_id: int) -> None:
        """Forget what was said to a node that may not take part any more."""
        with self.lock:
            messages = [message_id for message_id, sent in self._sent.items() if sent.node_id == node_id]
            self.deactivate_node(node_id)
        for message_id in messages:
            self.close_message(message_id)

    def public_key(self, node_id: int) -> bytes:
        key: bytes = self.nodes[node_id].public_key
        return key

    # What a site's requests do; who sent them is known here.

    def node_of(self, public_key: bytes) -> int | None:
        found: int | None = self.get_node_id_by_public_key(public_key)
        return found

    def join(self, public_key: bytes) -> int:
        """Let the node of a key in, again if it was here before; whoever used the key until now is gone."""
        with self.lock:
            node_id = self.get_node_id_by_public_key(public_key)
            if node_id is None:
                if len(self.nodes) >= MOST_NODES:
                    raise Refused(429, "busy")
                node_id = self.create_node(NOOP_FLWR_AID, "", public_key, 0)
            # Killed and started again before anybody noticed.
            if self.nodes[node_id].status == NodeStatus.ONLINE:
                self.deactivate_node(node_id)
            if not self.activate_node(node_id, HEARTBEAT):
                raise Refused(401, "not-joined")
            # What was said to the one before is not for this one.
            messages = [message_id for message_id, sent in self._sent.items() if sent.node_id == node_id]
            for message_id in messages:
                self.close_message(message_id)
            self.note(node_id)
            self.activations[node_id] += 1
        self.news.set()
        found: int = node_id
        return found

    def note(self, node_id: int) -> None:
        """The node lives."""
        self.seen[node_id] = time.monotonic()

    def next_message(self, node_id: int) -> tuple[list[ProtoMessage], list[ObjectTree]]:
        """A message that the node has not fetched, with the names of its objects; or none."""
        self.note(node_id)
        with self.lock:
            for message in self.get_message_ins(node_id, 1):
                if self.is_fetched(message.metadata.message_id):
                    # It said that it has what it never fetched.
                    continue
                return [message_to_proto(message)], [self._files.get_object_tree(message.metadata.message_id)]
        return [], []

    def object_for(self, node_id: int, object_id: str) -> bytes | None:
        """An object of a message to this node; None for any other."""
        with self.lock:
            if not any(sent.node_id == node_id and object_id in sent.objects for sent in self._sent.values()):
                return None
        self.fetched[node_id] = time.monotonic()
        return self._files.get(object_id)

    def confirm(self, node_id: int, message_id: str) -> None:
        """The node has a message whole."""
        with self.lock:
            sent = self._sent.get(message_id)
            if sent is not None and sent.node_id == node_id:
                self._files.delete(message_id)

    def announce(self, node_id: int, message_id: str, tree: ObjectTree) -> tuple[str, list[str]]:
        """A node has an answer: the session to send its objects in, and which; none where nobody waits for it."""
        with self.lock:
            sent = self._sent.get(message_id)
            if sent is None or sent.node_id != node_id:
                about = self._closed.get(message_id, "something that it was not sent")
                self._remark(node_id, f"answered {about}, which is closed")
                return "", []
            if sent.upload is None and not sent.failure:
                try:
                    sent.upload = Upload(
                        self._folder / "objects", node_id, tree, sent.most_bytes, FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
                    )
                    self._sessions[sent.upload.session] = sent.upload
                except WireError as error:
                    sent.failure = str(error)
            upload = sent.upload
        self.news.set()
        if upload is None:
            return "", []
        if upload.root != tree.object_id:
            self._remark(node_id, f"answered {sent.about} twice")
            return "", []
        return upload.session, upload.missing()

    def take_object(self, node_id: int, session: str, object_id: str, content: bytes) -> bool:
        """Whether an announced object was stored; a session belongs to the node that began it."""
        with self.lock:
            upload = self._sessions.get(session)
        if upload is None or upload.node_id != node_id:
            return False
        self.note(node_id)
        is_stored = upload.put(object_id, content)
        self.news.set()
        return is_stored

    def _remark(self, node_id: int, reason: str) -> None:
        with self.lock:
            if len(self.remarks) < MOST_REMARKS:
                self.remarks.append((node_id, reason))
