"""The server's end of the line: Flower's link state, with the few things asked of it that its grid does not say."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path

from flwr.app import Message, MessageType
from flwr.app.message import remove_content_from_message
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE, NOOP_FLWR_AID, SUPERLINK_NODE_ID
from flwr.proto.message_pb2 import ObjectTree
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
from flwr.supercore.constant import NOOP_FEDERATION_ID, NodeStatus, TaskType
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager

from fedmtl.engines.flower.envelope import Envelope, fill_envelope, open_envelope
from fedmtl.engines.flower.object_files import ObjectFiles

# The round's deadline is ours; Flower only drops what nobody asked about for days.
TTL = 30 * 24 * 3600.0
# Of a message, besides the chunks of its frame.
MOST_OBJECTS = 64
MOST_REMARKS = 100


class Link(InMemoryLinkState):
    """Messages to nodes and what they answered; `activations` counts how often each node has come."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._files = ObjectFiles(folder / "objects")
        super().__init__(NoOpFederationManager(), self._files)
        self._folder = folder
        self._max_bytes = max_bytes
        self.activations: Counter[int] = Counter()
        self.seen: dict[int, float] = {}
        self.remarks: list[tuple[int, str]] = []
        self.news = threading.Event()
        self._run_id = self._start()

    def state(self) -> Link:
        """Flower asks a factory for its state; this is both."""
        return self

    def _start(self) -> int:
        run_id = self.create_run("", "", "", {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP)
        (task_id,) = (task.task_id for task in self.task_store.values() if task.run_id == run_id)
        self.claim_task(task_id)
        self.activate_task(task_id)
        # Without a token the run never expires: who runs it lives in this process.
        self.task_token_store.clear()
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = run_id, task_id, SUPERLINK_NODE_ID
        return run_id

    def send(self, node_id: int, kind: str, words: str = "", frame: bytes | None = None) -> str:
        """Leave a message for a node; its objects are there before it can be asked for."""
        message = Message(fill_envelope(kind, words, frame), node_id, MessageType.QUERY, ttl=TTL)
        with no_object_id_recompute():
            message.metadata.__dict__["_message_id"] = message.object_id
            self._files.preregister(self._run_id, get_object_tree(message))
            for object_id, each in get_all_nested_objects(message).items():
                self._files.put(object_id, each.deflate())
        message_id: str = message.metadata.message_id
        if self.store_message_ins(remove_content_from_message(message)) is None:
            self._files.delete(message_id)
            raise KeyError(node_id)
        return message_id

    def is_fetched(self, message_id: str) -> bool:
        """Whether a node has a message whole; it says so, and its objects go."""
        return not self._files.has(message_id)

    def has_left(self, node_id: int) -> bool:
        with self.lock:
            return bool(self.nodes[node_id].status != NodeStatus.ONLINE)

    def is_waiting_for(self, public_key: bytes) -> bool:
        """Whether there is a message that the node of this key has not fetched."""
        with self.lock:
            node_id = self.node_public_key_to_node_id.get(public_key)
            return any(
                message.metadata.dst_node_id == node_id and not message.metadata.delivered_at
                for message in self.message_ins_store.values()
            )

    def take_answer(self, message_id: str, name: str) -> Envelope | None:
        """The answer once all of it has come, its frame in a file of that name; then the message is closed."""
        with self.lock:
            answer_id = self.message_ins_id_to_message_res_id.get(message_id)
        if answer_id is None or not self._files.is_whole(answer_id):
            return None
        try:
            return open_envelope(answer_id, self._pull, self._folder / name, self._max_bytes)
        finally:
            self.close_message(message_id)

    def close_message(self, message_id: str) -> None:
        """Forget a message; an answer that still comes is refused."""
        with self.lock:
            answer_id = self.message_ins_id_to_message_res_id.get(message_id)
            self.delete_messages({message_id})
        for root in (message_id, answer_id):
            if root is not None:
                self._files.delete(root)

    def add_node(self, public_key: bytes) -> int:
        """Let the holder of a key in; nodes without one are refused where keys are asked for."""
        known = self.get_node_id_by_public_key(public_key)
        return known if known is not None else self.create_node(NOOP_FLWR_AID, "", public_key, 0)

    def public_key(self, node_id: int) -> bytes:
        key: bytes = self.nodes[node_id].public_key
        return key

    def activate_node(self, node_id: int, heartbeat_interval: float) -> bool:
        with self.lock:
            node = self.nodes.get(node_id)
            # Killed and started again before Flower noticed.
            if node is not None and node.status == NodeStatus.ONLINE:
                self.deactivate_node(node_id)
            is_active = super().activate_node(node_id, heartbeat_interval)
            if is_active:
                # Whoever was there before is gone, and what was said to it is not for this one.
                for message_id in self._messages_to(node_id):
                    self.close_message(message_id)
                self._note(node_id)
                self.activations[node_id] += 1
                self.news.set()
        return is_active

    def acknowledge_node_heartbeat(self, node_id: int, heartbeat_interval: float) -> bool:
        self._note(node_id)
        return super().acknowledge_node_heartbeat(node_id, heartbeat_interval)

    def get_message_ins(self, node_id: int, limit: int | None, *, run_id: int | None = None) -> list[Message]:
        self._note(node_id)
        found: list[Message] = super().get_message_ins(node_id, limit, run_id=run_id)
        return found

    def store_message_and_object_tree(
        self, message: Message, object_tree: ObjectTree, session_id: str
    ) -> tuple[bool, list[str]]:
        num_objects = sum(1 for _ in iterate_object_tree(object_tree))
        if num_objects > self._max_bytes // FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE + MOST_OBJECTS:
            self._remark(message, f"its answer of {num_objects} parts is over wire.max_bytes, {self._max_bytes}")
            return False, []
        stored, missing = super().store_message_and_object_tree(message, object_tree, session_id)
        if not stored:
            self._remark(message, "answered twice, or what is no longer asked")
        self.news.set()
        return stored, missing

    def store_object(self, run_id: int, session_id: str, object_id: str, object_content: bytes) -> bool:
        stored: bool = super().store_object(run_id, session_id, object_id, object_content)
        self.news.set()
        return stored

    def take_remarks(self) -> list[tuple[int, str]]:
        """What nodes did that was refused, since this was last asked."""
        with self.lock:
            taken, self.remarks = self.remarks, []
        return taken

    def _messages_to(self, node_id: int) -> list[str]:
        return [key for key, message in self.message_ins_store.items() if message.metadata.dst_node_id == node_id]

    def _remark(self, message: Message, reason: str) -> None:
        with self.lock:
            if len(self.remarks) < MOST_REMARKS:
                self.remarks.append((message.metadata.src_node_id, reason))

    def _note(self, node_id: int) -> None:
        self.seen[node_id] = time.monotonic()

    def _pull(self, object_id: str) -> bytes:
        content = self._files.get(object_id)
        if content is None:
            raise KeyError(object_id)
        return content
