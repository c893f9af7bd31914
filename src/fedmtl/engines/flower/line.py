"""A site's end of the line: Flower's fleet protocol over signed requests, with a line that breaks taken up again."""

from __future__ import annotations

import datetime
import json
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import TypeVar

import httpx
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from flwr.app import Error, Message
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as Proto

from fedmtl.engines.flower.addresses import Address
from fedmtl.engines.flower.certificates import expiry_warning, loopback_key
from fedmtl.engines.flower.envelope import fill_envelope, open_envelope
from fedmtl.engines.flower.private import (
    ActivateNodeRequest,
    ActivateNodeResponse,
    ConfirmMessageReceivedRequest,
    ConfirmMessageReceivedResponse,
    DeactivateNodeRequest,
    DeactivateNodeResponse,
    Node,
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
    get_all_nested_objects,
    get_object_tree,
    message_from_proto,
    message_to_proto,
    no_object_id_recompute,
    remove_content_from_message,
)
from fedmtl.engines.flower.quiet import silence_flower
from fedmtl.engines.flower.records import MOST_LETTERS, Envelope
from fedmtl.engines.flower.signing import Signer
from fedmtl.errors import FedmtlError, WireError
from fedmtl.foreign import printable

# Longer than any silence that the server's deadline has to notice.
HEARTBEAT = 1800.0
SIGN_OF_LIFE = 2.0
FIRST_WAIT, LONGEST_WAIT = 0.2, 2.0
# An answer has cost more than a question: the line may be away this long before it is given up.
PATIENCE = 60.0
TIMEOUT = 30.0
OBJECT_ID = re.compile(r"[0-9a-f]{64}")
# A chunk has 5 MB, a list of messages less.
MAX_ANSWER = 8 << 20
# Of the request that only wants the server's time.
GLANCE_TIMEOUT, MAX_REFUSAL = 5.0, 10_000

R = TypeVar("R", bound=Proto)
T = TypeVar("T")


class LineRefused(FedmtlError):
    """The server, or what answers at its address, will not have this site; trying again would not help."""


class LineLost(Exception):
    """The server does not answer, or not to this node (any more)."""


class NotAccepted(LineLost):
    """The server understood and said no."""


class Busy(LineLost):
    """The server has too much to do for this site just now."""


class ClocksDiffer(LineLost):
    """The server does not take requests that were signed so much earlier or later; it will when the clocks agree."""


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
    """One node's calls to the server; each fails as `LineLost` or `LineRefused`.

    Without keys the site signs with a generated one that lies beside its `spool`. `say` gets what its operator should
    know: that the server's certificate ends soon.
    """

    def __init__(
        self,
        address: Address,
        keys: SiteKeys | None,
        spool: Path,
        max_bytes: int,
        say: Callable[[str], None] = lambda words: None,
    ) -> None:
        silence_flower()
        self._keys, self._spool, self._max_bytes, self._say = keys, spool, max_bytes, say
        self._signer = Signer(loopback_key(spool.parent) if keys is None else keys.key)
        self._url = f"{'http' if keys is None else 'https'}://{address}"
        # What follows a redirect would carry a signed update to wherever it points.
        self._client = httpx.Client(
            verify=False if keys is None else _trusting(keys.ca), timeout=TIMEOUT, follow_redirects=False
        )
        self._is_looked_at = keys is None
        self._address = address
        self._node = Node()

    def join(self) -> None:
        """Say that this node is here."""
        request = ActivateNodeRequest(public_key=self._signer.public_key, heartbeat_interval=HEARTBEAT)
        answer = self._call(lambda: self._post("activate-node", request, ActivateNodeResponse))
        self._node = Node(node_id=answer.node_id)

    def receive(self) -> Received | None:
        """Return the next whole message, or None where none comes for some seconds."""
        found = self._call(
            lambda: self._post("pull-messages", PullMessagesRequest(node=self._node), PullMessagesResponse)
        )
        if not found.messages_list:
            return None
        try:
            message = message_from_proto(found.messages_list[0])
        except Exception as error:
            # Flower's decoder raises what it meets in a message that is none.
            raise WireError(f"the message cannot be read: {printable(repr(error), MOST_LETTERS)}") from error
        run_id, message_id = message.metadata.run_id, message.metadata.message_id
        if not OBJECT_ID.fullmatch(message_id):
            raise WireError("the message's id is not a hash")

        def pull(object_id: str) -> bytes:
            request = PullObjectRequest(node=self._node, run_id=run_id, object_id=object_id)
            answer = self._call(lambda: self._post("pull-object", request, PullObjectResponse))
            if not answer.object_available:
                raise LineLost(f"object {object_id} is gone")
            content: bytes = answer.object_content
            return content

        # A name that the site generates: nothing that a server sends becomes part of a path.
        envelope = open_envelope(message_id, pull, self._spool / f"{token_hex(8)}.job", self._max_bytes)
        confirm = ConfirmMessageReceivedRequest(node=self._node, run_id=run_id, message_object_id=message_id)
        self._call(lambda: self._post("confirm-message-received", confirm, ConfirmMessageReceivedResponse))
        return Received(message, envelope)

    def answer(self, message: Message, kind: str, words: str = "", frame: bytes | Path | None = None) -> None:
        self._push(Message(fill_envelope(kind, words, frame), reply_to=message))

    def fail(self, message: Message, reason: str) -> None:
        self._push(Message(Error(0, reason), reply_to=message))

    def leave(self) -> None:
        request = DeactivateNodeRequest(node_id=self._node.node_id)
        self._call(lambda: self._post("deactivate-node", request, DeactivateNodeResponse))

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
                    self._post("send-node-heartbeat", request, SendNodeHeartbeatResponse)
                except (httpx.HTTPError, RuntimeError, LineLost, FedmtlError):
                    # Whoever asks for the next message meets it too, and says so.
                    continue

        thread = threading.Thread(target=tell, daemon=True, name="sign-of-life")
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _push(self, reply: Message) -> None:
        # Only now: the site may have joined again, under another node id, since the message came.
        reply.metadata.__dict__["_src_node_id"] = self._node.node_id
        with no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            tree, objects = get_object_tree(reply), get_all_nested_objects(reply)
            request = PushMessagesRequest(
                node=self._node,
                messages_list=[message_to_proto(remove_content_from_message(reply))],
                message_object_trees=[tree],
            )
            response = self._call(lambda: self._post("push-messages", request, PushMessagesResponse), PATIENCE)
            wanted = set(response.objects_to_push)
            for object_id, each in objects.items():
                if object_id in wanted:
                    self._push_object(reply.metadata.run_id, response.session_id, object_id, each.deflate())

    def _push_object(self, run_id: int, session_id: str, object_id: str, content: bytes) -> None:
        request = PushObjectRequest(
            node=self._node, run_id=run_id, session_id=session_id, object_id=object_id, object_content=content
        )
        self._call(lambda: self._post("push-object", request, PushObjectResponse), PATIENCE)

    def _post(self, route: str, request: Proto, kind: type[R]) -> R:
        """Send one request, signed now, and return the whole response."""
        path = f"/v1/fleet/{route}"
        body: bytes = request.SerializeToString(deterministic=True)
        content_headers = {"content-type": "application/x-protobuf", "accept-encoding": "identity"}
        headers = {**content_headers, **self._signer.headers("POST", path, body)}
        content = bytearray()
        with self._client.stream("POST", self._url + path, content=body, headers=headers) as response:
            self._look_at_certificate(response)
            for piece in response.iter_raw():
                content += piece
                if len(content) > MAX_ANSWER:
                    raise LineLost(f"the server answered with more than {MAX_ANSWER} bytes")
        if response.status_code != 200:
            self._refuse(response.status_code, bytes(content))
        answer: R = kind()
        try:
            answer.ParseFromString(bytes(content))
        except DecodeError as error:
            raise LineLost("the server answered what is no message") from error
        return answer

    def _refuse(self, status: int, content: bytes) -> None:
        """Raise what a refused request means for the site."""
        try:
            found = json.loads(content[:10_000])
            code = str(found["code"])[:40]
        except (ValueError, TypeError, KeyError, RecursionError):
            found, code = {}, ""
        if code == "clock":
            raise ClocksDiffer(_clock_words(found))
        if code == "unknown-key" and self._keys is not None:
            raise LineRefused(
                f"{self._address}: this key is not enrolled there; the server's keeper runs"
                " `fedmtl enroll NAME --key NAME.pub --tasks TASKS`"
            )
        words = printable(code or content[:200].decode(errors="replace"), 200)
        kind = Busy if status == 429 else LineLost if status >= 500 else NotAccepted
        raise kind(f"the server answered {status}: {words}")

    def _look_at_certificate(self, response: httpx.Response) -> None:
        """Once per line: a certificate that ends soon ends the run of every site that trusts it."""
        if self._is_looked_at:
            return
        self._is_looked_at = True
        stream = response.extensions.get("network_stream")
        secured = None if stream is None else stream.get_extra_info("ssl_object")
        shown = secured.getpeercert() if secured is not None else None
        if shown and "notAfter" in shown:
            end = datetime.datetime.fromtimestamp(ssl.cert_time_to_seconds(str(shown["notAfter"])), datetime.UTC)
            warning = expiry_warning(end, "the server's keeper renews it with `fedmtl certs renew`")
            if warning is not None:
                self._say(warning)

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
            except (Busy, ClocksDiffer):
                # Over in a moment, or when somebody has set a clock; an answer is worth some waiting.
                if time.monotonic() > end:
                    raise
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


def _trusting(ca: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(cadata=ca.read_text(encoding="ascii"))
    except (OSError, ValueError) as error:
        raise FedmtlError(f"{ca}: is no certificate ({error}); copy the server's ca.crt here") from error
    return context


def server_time_difference(address: Address, keys: SiteKeys | None) -> float:
    """Return by how many seconds this machine's clock is ahead of the server's; a FedmtlError where nobody can say.

    The one request is signed for 1970: a server that knows the key refuses it and says its time, and nobody joins.
    """
    path = "/v1/fleet/activate-node"
    content = bytearray()
    with TemporaryDirectory() as folder:
        signer = Signer(loopback_key(Path(folder)) if keys is None else keys.key)
    url = f"{'http' if keys is None else 'https'}://{address}{path}"
    headers = {"accept-encoding": "identity", **signer.headers("POST", path, b"", at=0.0)}
    verify = False if keys is None else _trusting(keys.ca)
    before = time.time()
    try:
        with (
            httpx.Client(verify=verify, timeout=GLANCE_TIMEOUT, follow_redirects=False) as client,
            client.stream("POST", url, content=b"", headers=headers) as response,
        ):
            middle = (before + time.time()) / 2
            for piece in response.iter_raw():
                content += piece
                if len(content) > MAX_REFUSAL:
                    break
        found = json.loads(bytes(content[:MAX_REFUSAL]))
        if found.get("code") == "unknown-key":
            raise FedmtlError(f"{address}: this key is not enrolled there, so the server's time is not known")
        return middle - float(found["server_time"])
    except httpx.TransportError as error:
        raise FedmtlError(
            f"{address}: does not answer ({printable(str(error), 200) or type(error).__name__})"
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise FedmtlError(f"{address}: what answers there is no server of fedmtl") from error


def _clock_words(found: dict[str, object]) -> str:
    server, site = found.get("server_time"), found.get("site_time")
    if not isinstance(server, int | float) or not isinstance(site, int | float):
        return "this machine's clock and the server's differ too much; set them"
    ahead = site - server
    side = "ahead of" if ahead > 0 else "behind"
    return f"this machine's clock is {abs(ahead):.0f} s {side} the server's; set them, they may differ by 300 s"
