"""The server's port: the calls of Flower's fleet protocol that a site makes, and nothing else.

Flower's SuperLink also serves an API that enrols nodes and starts runs, to whoever can reach its port. A site must not
enrol itself, so neither that API nor Flower's web application is here. A request is checked in this order: route,
length, signature, its body under that length, the body's hash, and only then what it asks.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError, Message

from fedmtl.engines.flower.addresses import Address
from fedmtl.engines.flower.certificates import ServerCertificate
from fedmtl.engines.flower.connections import Connection, Listener, Visitors, server_context
from fedmtl.engines.flower.enrolment import Enrolments
from fedmtl.engines.flower.link import Link
from fedmtl.engines.flower.private import (
    ActivateNodeRequest,
    ActivateNodeResponse,
    ConfirmMessageReceivedRequest,
    ConfirmMessageReceivedResponse,
    DeactivateNodeRequest,
    DeactivateNodeResponse,
    PullMessagesRequest,
    PullMessagesResponse,
    PullObjectRequest,
    PullObjectResponse,
    PushMessagesRequest,
    PushMessagesResponse,
    PushObjectRequest,
    PushObjectResponse,
    SendNodeHeartbeatRequest,
    SendNodeHeartbeatResponse,
)
from fedmtl.engines.flower.quiet import silence_flower
from fedmtl.engines.flower.signing import Caller, Guard, Refused
from fedmtl.errors import FedmtlError

# A chunk of Flower's has 5 MB; nothing larger is ever sent.
MAX_BODY = 8 << 20
# The names of the chunks of an answer.
MAX_NAMES = 1 << 20
SMALL_BODY = 1 << 16
# A question for messages waits this long for one, so that sites need not ask often and still hear at once.
LONG_POLL = 2.0
GLANCE = 0.02
THREADS = 8
# A certificate that was renewed is used without a restart.
RELOAD = 5.0

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
# (link, the request, who sent it) -> the answer
Handler = Callable[[Link, Any, bytes], Message]


@dataclass(frozen=True)
class Route:
    """A call: what its body is, how long that may be, and what serves it."""

    request: type[Message]
    handle: Handler
    most_bytes: int = SMALL_BODY
    waits: bool = False


def _node(link: Link, key: bytes, node_id: int) -> int:
    """A node speaks for itself alone."""
    if link.node_of(key) != node_id:
        raise Refused(401, "not-joined")
    return node_id


def _join(link: Link, request: ActivateNodeRequest, key: bytes) -> Message:
    if request.public_key != key:
        raise Refused(401, "signature")
    return ActivateNodeResponse(node_id=link.join(key))


def _leave(link: Link, request: DeactivateNodeRequest, key: bytes) -> Message:
    link.deactivate_node(_node(link, key, request.node_id))
    return DeactivateNodeResponse()


def _live(link: Link, request: SendNodeHeartbeatRequest, key: bytes) -> Message:
    link.note(_node(link, key, request.node.node_id))
    return SendNodeHeartbeatResponse(success=True)


def _pull(link: Link, request: PullMessagesRequest, key: bytes) -> Message:
    messages, trees = link.next_message(_node(link, key, request.node.node_id))
    return PullMessagesResponse(messages_list=messages, message_object_trees=trees)


def _push(link: Link, request: PushMessagesRequest, key: bytes) -> Message:
    node_id = _node(link, key, request.node.node_id)
    if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
        raise Refused(400, "malformed")
    metadata = request.messages_list[0].metadata
    if metadata.src_node_id != node_id:
        raise Refused(403, "sender")
    session, missing = link.announce(node_id, metadata.reply_to_message_id, request.message_object_trees[0])
    return PushMessagesResponse(results={metadata.message_id: 0}, objects_to_push=missing, session_id=session)


def _push_object(link: Link, request: PushObjectRequest, key: bytes) -> Message:
    node_id = _node(link, key, request.node.node_id)
    stored = link.take_object(node_id, request.session_id, request.object_id, request.object_content)
    return PushObjectResponse(stored=stored)


def _pull_object(link: Link, request: PullObjectRequest, key: bytes) -> Message:
    content = link.object_for(_node(link, key, request.node.node_id), request.object_id)
    if content is None:
        return PullObjectResponse(object_found=False, object_available=False)
    return PullObjectResponse(object_found=True, object_available=True, object_content=content)


def _confirm(link: Link, request: ConfirmMessageReceivedRequest, key: bytes) -> Message:
    link.confirm(_node(link, key, request.node.node_id), request.message_object_id)
    return ConfirmMessageReceivedResponse()


JOIN, PULL = "/v1/fleet/activate-node", "/v1/fleet/pull-messages"
ROUTES = {
    JOIN: Route(ActivateNodeRequest, _join),
    "/v1/fleet/deactivate-node": Route(DeactivateNodeRequest, _leave),
    "/v1/fleet/send-node-heartbeat": Route(SendNodeHeartbeatRequest, _live),
    PULL: Route(PullMessagesRequest, _pull, waits=True),
    "/v1/fleet/push-messages": Route(PushMessagesRequest, _push, MAX_NAMES),
    "/v1/fleet/push-object": Route(PushObjectRequest, _push_object, MAX_BODY),
    "/v1/fleet/pull-object": Route(PullObjectRequest, _pull_object),
    "/v1/fleet/confirm-message-received": Route(ConfirmMessageReceivedRequest, _confirm),
}


class FleetApp:
    """An ASGI application. `is_enrolled` says of a key whether it may join now; None takes any, on loopback."""

    def __init__(self, link: Link, is_enrolled: Callable[[bytes], bool] | None) -> None:
        self._link, self._is_enrolled = link, is_enrolled
        self.guard = Guard(self._is_known)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="fleet")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            answer = await self._serve(scope, receive)
        except Refused as refused:
            content = json.dumps({"code": refused.code, **refused.details}).encode()
            await _reply(send, refused.status, b"application/json", content, is_last=True)
        else:
            await _reply(send, 200, b"application/x-protobuf", answer)

    async def _serve(self, scope: Scope, receive: Receive) -> bytes:
        route = ROUTES.get(scope["path"])
        if route is None or scope["query_string"]:
            raise Refused(404, "route")
        if scope["method"] != "POST":
            raise Refused(405, "method")
        length = _length(scope["headers"], route.most_bytes)
        caller = self.guard.check("POST", scope["path"], scope["headers"])
        self.guard.open(caller)
        try:
            connection: Connection | None = scope.get("fedmtl.connection")
            if connection is not None:
                connection.signed_by(caller.key)
            body = await _body(receive, length, caller)
            if connection is not None:
                connection.read()
            if route.waits:
                await self._wait(caller.key)
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._call, route, body, caller)
        finally:
            self.guard.close(caller)

    def _call(self, route: Route, body: bytes, caller: Caller) -> bytes:
        request = route.request()
        try:
            request.ParseFromString(body)
        except DecodeError:
            raise Refused(400, "malformed") from None
        try:
            answer: bytes = route.handle(self._link, request, caller.key).SerializeToString()
        except (ValueError, TypeError, KeyError, IndexError) as error:
            # Values that a message of ours never has.
            raise Refused(400, "malformed") from error
        return answer

    def _is_known(self, key: bytes, path: str) -> bool:
        if self._is_enrolled is not None:
            return self._is_enrolled(key)
        return path == JOIN or self._link.node_of(key) is not None

    async def _wait(self, key: bytes) -> None:
        end = time.monotonic() + LONG_POLL
        while time.monotonic() < end and not self._link.is_waiting_for(key):
            await asyncio.sleep(GLANCE)
            if not self._is_known(key, PULL):
                raise Refused(401, "unknown-key")


def _length(headers: Iterable[tuple[bytes, bytes]], most: int) -> int:
    """What the request says its body has; one that does not say, or says too much, is not read."""
    lengths = [value for name, value in headers if name == b"content-length"]
    if len(lengths) != 1 or not lengths[0].isdigit() or len(lengths[0]) > 20:
        raise Refused(411, "length")
    if int(lengths[0]) > most:
        raise Refused(413, "length")
    return int(lengths[0])


async def _body(receive: Receive, length: int, caller: Caller) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise Refused(400, "gone")
        body += message.get("body", b"")
        if len(body) > length:
            raise Refused(413, "length")
        if not message.get("more_body", False):
            break
    if len(body) != length or hashlib.sha256(body).hexdigest() != caller.digest:
        raise Refused(401, "body")
    return bytes(body)


async def _reply(send: Send, status: int, kind: bytes, content: bytes, *, is_last: bool = False) -> None:
    headers = [(b"content-type", kind), (b"content-length", str(len(content)).encode())]
    if is_last:
        # What else a refused connection sends is not read.
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content, "more_body": False})


class FleetApi:
    """Serves the link in a thread until it is closed."""

    def __init__(
        self,
        link: Link,
        address: Address,
        certificate: ServerCertificate | None,
        is_enrolled: Callable[[bytes], bool] | None,
    ) -> None:
        silence_flower()
        self._certificate = certificate
        self._stamp = None if certificate is None else certificate.stamp()
        self._context = None if certificate is None else _context(certificate)
        # Known before a thread starts: an address that is taken is one line for the user.
        self._socket = _listen(address)
        self.address = Address(address.host, self._socket.getsockname()[1])
        self._app = FleetApp(link, is_enrolled)
        self.visitors = Visitors()
        self._listener = Listener(self._app, self._socket, self._context, self.visitors)
        self._stop: Callable[[], object] = lambda: None
        self._has_started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleet", daemon=True)
        self._thread.start()
        self._has_started.wait()

    def close(self) -> None:
        self._stop()
        self._thread.join(5)
        self._app.close()
        self._socket.close()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=self._listener.loop_factory()) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(self._listener.serve()), loop.create_task(self._renew())]

        def stop() -> None:
            for task in tasks:
                task.cancel()

        self._stop = lambda: loop.is_closed() or loop.call_soon_threadsafe(stop)
        self._has_started.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        # A moment for connections to be closed, so that no file is left open.
        await asyncio.sleep(0.05)

    async def _renew(self) -> None:
        """Take up a renewed certificate; one that cannot be read leaves the old one in use."""
        if self._certificate is None or self._context is None:
            return
        while True:
            await asyncio.sleep(RELOAD)
            now = self._certificate.stamp()
            if now != self._stamp and now is not None:
                try:
                    self._context.load_cert_chain(
                        self._certificate.certificate, self._certificate.key, password=lambda: ""
                    )
                except (OSError, ssl.SSLError, ValueError):
                    continue
                self._stamp = now


def _context(certificate: ServerCertificate) -> ssl.SSLContext:
    try:
        return server_context(str(certificate.certificate), str(certificate.key))
    except (OSError, ValueError) as error:
        raise FedmtlError(
            f"{certificate.certificate}: it or its key cannot be used ({error}); make both with `fedmtl certs`"
        ) from error


def _listen(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server((address.host, address.port), family=family, backlog=1024)
    except OSError as error:
        raise FedmtlError(f"{address}: cannot be listened on ({error.strerror}); choose another --listen") from error


class FleetPort:
    """This project's port, to which `fedmtl client` comes: the link with its messages, and the API that serves it."""

    stay = False

    def __init__(self, spool: Path, address: Address, enrolments: Enrolments) -> None:
        # Before anything starts: a list or a certificate that cannot be read is one line for the user.
        enrolments.tasks()
        certificate = enrolments.certificate()
        self.nodes = Link(spool)
        is_enrolled = None if certificate is None else (lambda key: bool(enrolments.name_of(key)))
        self._api = FleetApi(self.nodes, address, certificate, is_enrolled)

    @property
    def address(self) -> str:
        return str(self._api.address)

    def close(self) -> None:
        self._api.close()
