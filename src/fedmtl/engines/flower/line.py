"""A site's end of the line: Flower's fleet protocol, with a line that breaks taken up again."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from flwr.app import Error, Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedmtl.engines.flower.addresses import Address
from fedmtl.engines.flower.envelope import Envelope, fill_envelope, open_envelope
from fedmtl.engines.flower.quiet import silence_flower
from fedmtl.errors import FedmtlError

# Longer than any silence that the server's own deadline has to notice.
HEARTBEAT = 1800.0
SIGN_OF_LIFE = 2.0
FIRST_WAIT, LONGEST_WAIT = 0.2, 2.0
# An answer has cost more than a question: the line may be away this long before it is given up.
PATIENCE = 60.0

T = TypeVar("T")


class LineRefused(FedmtlError):
    """The server, or what answers at its address, will not have this site; trying again would not help."""


class LineLost(Exception):
    """The server does not answer, or not to this node (any more)."""


class NotAccepted(LineLost):
    """The server understood and said no."""


@dataclass(frozen=True)
class SiteKeys:
    """What a site shows and what it trusts; on loopback it has neither."""

    key: EllipticCurvePrivateKey
    ca: Path


@dataclass(frozen=True)
class Received:
    """A message with its metadata, to answer it, and what was in it."""

    message: Message
    envelope: Envelope


class Line:
    """One node's calls to the server; each fails as `LineLost` or `LineRefused`."""

    def __init__(self, address: Address, keys: SiteKeys | None, spool: Path, max_bytes: int) -> None:
        silence_flower()
        self._keys, self._spool, self._max_bytes = keys, spool, max_bytes
        key = generate_key_pairs()[0] if keys is None else keys.key
        self._public_key = public_key_to_bytes(key.public_key())
        self._client = FleetHttpClient.from_server_address(
            str(address),
            keys is None,
            None if keys is None else keys.ca.read_bytes(),
            [RuntimeVersionHttpInterceptor("SuperNode"), NodeAuthHttpInterceptor(key, key.public_key())],
        )
        self._address = address
        self._node = Node()

    def join(self) -> None:
        """Say that this node is here; without keys it introduces itself first."""
        if self._keys is None:
            with suppress(NotAccepted):
                self._call(lambda: self._client.RegisterNode(RegisterNodeFleetRequest(public_key=self._public_key)))
        request = ActivateNodeRequest(public_key=self._public_key, heartbeat_interval=HEARTBEAT)
        try:
            self._node = Node(node_id=self._call(lambda: self._client.ActivateNode(request)).node_id)
        except NotAccepted as error:
            if self._keys is None:
                raise
            raise LineRefused(
                f"{self._address}: this key is not enrolled there; the server's keeper runs"
                " `fedmtl enroll NAME --key NAME.pub --tasks TASKS`"
            ) from error

    def receive(self) -> Received | None:
        """The next message, all of it; None where there is none for some seconds."""
        found = self._call(lambda: self._client.PullMessages(PullMessagesRequest(node=self._node)))
        if not found.messages_list:
            return None
        message = message_from_proto(found.messages_list[0])
        run_id, message_id = message.metadata.run_id, message.metadata.message_id

        def pull(object_id: str) -> bytes:
            request = PullObjectRequest(node=self._node, run_id=run_id, object_id=object_id)
            answer = self._call(lambda: self._client.PullObject(request))
            if not answer.object_available:
                raise LineLost(f"object {object_id} is gone")
            content: bytes = answer.object_content
            return content

        envelope = open_envelope(message_id, pull, self._spool / f"{message_id[:16]}.job", self._max_bytes)
        confirm = ConfirmMessageReceivedRequest(node=self._node, run_id=run_id, message_object_id=message_id)
        self._call(lambda: self._client.ConfirmMessageReceived(confirm))
        return Received(message, envelope)

    def answer(self, message: Message, kind: str, words: str = "", frame: bytes | None = None) -> None:
        self._push(Message(fill_envelope(kind, words, frame), reply_to=message))

    def fail(self, message: Message, reason: str) -> None:
        self._push(Message(Error(0, reason), reply_to=message))

    def leave(self) -> None:
        self._call(lambda: self._client.DeactivateNode(DeactivateNodeRequest(node_id=self._node.node_id)))

    def close(self) -> None:
        self._client.close()

    @contextmanager
    def alive(self) -> Iterator[None]:
        """The server hears of this node as long as this lasts, whatever else it does."""
        done = threading.Event()

        def tell() -> None:
            while not done.wait(SIGN_OF_LIFE):
                request = SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=HEARTBEAT)
                try:
                    self._client.SendNodeHeartbeat(request)
                except (httpx.HTTPError, RuntimeError):
                    continue

        thread = threading.Thread(target=tell, daemon=True, name="sign-of-life")
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _push(self, reply: Message) -> None:
        # Only now: what was asked before is what the answer is about.
        reply.metadata.__dict__["_src_node_id"] = self._node.node_id
        with no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            tree, objects = get_object_tree(reply), get_all_nested_objects(reply)
            request = PushMessagesRequest(
                node=self._node,
                messages_list=[message_to_proto(remove_content_from_message(reply))],
                message_object_trees=[tree],
            )
            asked = self._call(lambda: self._client.PushMessages(request), PATIENCE)
            wanted = set(asked.objects_to_push)
            for object_id, each in objects.items():
                if object_id in wanted:
                    self._push_object(reply.metadata.run_id, asked.session_id, object_id, each.deflate())

    def _push_object(self, run_id: int, session_id: str, object_id: str, content: bytes) -> None:
        request = PushObjectRequest(
            node=self._node, run_id=run_id, session_id=session_id, object_id=object_id, object_content=content
        )
        self._call(lambda: self._client.PushObject(request), PATIENCE)

    def _call(self, call: Callable[[], T], patience: float = 1.0) -> T:
        """Try again for some seconds: each call may be repeated without harm."""
        wait, end = FIRST_WAIT, time.monotonic() + patience
        while True:
            try:
                return call()
            except httpx.TransportError as error:
                self._refuse_if_untrusted(error)
                if time.monotonic() > end:
                    raise LineLost(str(error) or type(error).__name__) from error
            except httpx.HTTPStatusError as error:
                kind = LineLost if error.response.status_code >= 500 else NotAccepted
                raise kind(f"the server answered {error.response.status_code}: {error.response.text[:200]}") from error
            time.sleep(wait)
            wait = min(LONGEST_WAIT, 2 * wait)

    def _refuse_if_untrusted(self, error: httpx.TransportError) -> None:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ssl.SSLCertVerificationError):
                raise LineRefused(
                    f"{self._address}: its certificate is not to be trusted ({cause.verify_message}); "
                    "give the --ca of the server's `fedmtl certs init`"
                ) from error
            if isinstance(cause, ssl.SSLError) and "WRONG_VERSION_NUMBER" in str(cause):
                raise LineRefused(f"{self._address}: speaks no TLS; leave --ca and --key out") from error
            cause = cause.__cause__ or cause.__context__
