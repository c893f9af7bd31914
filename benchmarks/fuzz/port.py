"""The target at the server's port: signed requests with mutated bodies, answered by the whole application.

An input is what a site sends in a row. Its requests are signed by its key, whatever their bodies are. Ids that the
server makes up are the same in every process, so that an input means the same when it is tried again.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from fedmtl.errors import FedmtlError
from fuzz.formats import Bundle, Protobuf, bundle, replace_fields, unbundle
from fuzz.targets import MEBIBYTE, Run, Target, scratch

# These stand for what differs between two processes.
SESSION, KEY = b"@session@", b"@key@"
FLEET = "/v1/fleet/"
LIMIT = MEBIBYTE
ROUTES = (
    "register-node", "activate-node", "deactivate-node", "unregister-node", "send-node-heartbeat", "pull-messages",
    "push-messages", "get-run", "get-fab", "push-object", "pull-object", "confirm-message-received",
)  # fmt: skip


class ServerError(Exception):
    """The application answered with 500 or more; the words are what it logged."""


class Requests(Bundle):
    """Bodies by `number-route`: one of them is changed, now and then the order or a route."""

    def __init__(self) -> None:
        super().__init__({})

    def mutate(self, data: bytes, random: Random, others: Sequence[bytes]) -> bytes:
        requests = list(unbundle(data).items())
        if not requests:
            return super().mutate(data, random, others)
        index = random.randrange(len(requests))
        name, body = requests[index]
        chance = random.random()
        if chance < 0.08:
            requests.insert(random.randrange(len(requests) + 1), requests.pop(index))
        elif chance < 0.14:
            requests[index:index] = [requests[index]] * random.choice((1, 2, 5))
        elif chance < 0.2:
            requests[index] = (f"x-{random.choice(ROUTES)}", body)
        else:
            requests[index] = (name, Protobuf().mutate(body, random, ()))
        return bundle({f"{number}-{name.partition('-')[2]}": body for number, (name, body) in enumerate(requests)})


class Server:
    """The application with one enrolled site that has come and was sent a message."""

    def __init__(self, folder: Path) -> None:
        from cryptography.hazmat.primitives.asymmetric import ec
        from flwr.supercore.primitives.asymmetric import public_key_to_bytes

        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP384R1())
        self.public_key = public_key_to_bytes(self._key.public_key())
        self._loop = asyncio.new_event_loop()
        self._app: Any = None
        self._session = b""
        self.start()

    def start(self) -> None:
        """A fresh server: what an input left behind does not matter to the next."""
        if hasattr(self._app, "close"):
            self._app.close()
        with known_ids():
            self.link = _make_link(self._folder / "link")
            self._app = _make_app(self.link)
            self.node_id = _join(self.link, self.public_key)
            self.message_id = self.link.send(self.node_id, "welcome", '{"run": "first"}', b"frame")
        self._session = b""

    def send(self, route: str, body: bytes) -> tuple[int, bytes]:
        """A signed request of the site with this body; the answer's status and body."""
        body = replace_fields(body, {SESSION: self._session or SESSION, KEY: self.public_key})
        path = FLEET + route
        headers = {
            "content-type": "application/protobuf",
            "content-length": str(len(body)),
            **_sign(self._key, path, body, self.public_key),
        }
        status, answer = self._loop.run_until_complete(_ask(self._app, path, headers, body))
        if status == 200 and route == "push-messages":
            from flwr.proto.fleet_pb2 import PushMessagesResponse

            self._session = PushMessagesResponse.FromString(answer).session_id.encode()
        return status, answer


def _make_link(folder: Path) -> Any:
    from fedmtl.engines.flower.link import Link

    given = {"folder": folder, "max_bytes": LIMIT}
    return Link(**{name: value for name, value in given.items() if name in inspect.signature(Link).parameters})


def _make_app(link: Any) -> Any:
    from fedmtl.engines.flower import fleet_api

    # Nobody waits here for a message.
    fleet_api.LONG_POLL = 0.0
    if hasattr(fleet_api, "FleetApp"):
        return fleet_api.FleetApp(link, lambda key: True)
    return fleet_api.make_app(link, keys_required=True)


def _join(link: Any, key: bytes) -> int:
    if hasattr(link, "join"):
        return int(link.join(key))
    node_id = int(link.add_node(key))
    link.activate_node(node_id, 1800.0)
    return node_id


def _sign(key: Any, path: str, body: bytes, public_key: bytes) -> dict[str, str]:
    try:
        from fedmtl.engines.flower.signing import Signer
    except ImportError:
        from flwr.common.constant import TIMESTAMP_HEADER
        from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
        from flwr.supercore.date import now
        from flwr.supercore.primitives.asymmetric import sign_message

        time = now().isoformat()
        return {
            FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public_key).decode(),
            TIMESTAMP_HEADER: time,
            FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(key, time.encode())).decode(),
        }
    headers: dict[str, str] = Signer(key).headers("POST", path, body)
    return headers


async def _ask(app: Any, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 5), "server": ("127.0.0.1", 1),
    }  # fmt: skip
    incoming = iter([{"type": "http.request", "body": body, "more_body": False}])
    sent: list[Any] = []

    async def receive() -> Any:
        message = next(incoming, None)
        return message if message is not None else await asyncio.sleep(3600)

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return int(sent[0]["status"]), b"".join(message.get("body", b"") for message in sent[1:])


@contextmanager
def known_ids() -> Iterator[None]:
    """Flower's random ids counted from 1001 on, and messages of one moment, which is in the hash that names them."""
    from flwr.app.message import message as messages
    from flwr.server.superlink.linkstate import in_memory_linkstate as states

    before = states.generate_rand_int_from_bytes, messages.now
    numbers = itertools.count(1001)
    moment = before[1]().replace(year=2100, month=1, day=1, hour=0, minute=0, second=0, microsecond=0)
    states.generate_rand_int_from_bytes = lambda *given, **options: next(numbers)
    messages.now = lambda: moment
    try:
        yield
    finally:
        states.generate_rand_int_from_bytes, messages.now = before


class _Log(logging.Handler):
    """What the application says of an error that it answers with 500."""

    def __init__(self) -> None:
        super().__init__()
        self.last = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()


def open_http(folder: Path) -> Run:
    server = Server(folder)
    log = _Log()
    logging.disable(logging.NOTSET)
    flower = logging.getLogger("flwr")
    flower.handlers, flower.propagate = [log], False
    flower.setLevel(logging.ERROR)

    def run(data: bytes) -> None:
        server.start()
        statuses = []
        for name, body in list(unbundle(data).items())[:12]:
            log.last = ""
            status, _ = server.send(name.partition("-")[2].encode("ascii", "replace").decode(), body)
            statuses.append(status)
            if status >= 500:
                raise ServerError(log.last or f"status {status}")
        # What the server does once the answer is there.
        server.link.take_answer(server.message_id, "answer")
        if any(status >= 400 for status in statuses):
            raise FedmtlError(f"answered with {max(statuses)}")

    return run


def recorded_requests() -> dict[str, bytes]:
    """What a site sends from its coming to its leaving, and every other route once."""
    from flwr.app import Message
    from flwr.app.message import remove_content_from_message
    from flwr.common.serde import message_from_proto, message_to_proto
    from flwr.proto import fleet_pb2, heartbeat_pb2, message_pb2
    from flwr.proto.node_pb2 import Node
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

    from fedmtl.engines.flower.envelope import fill_envelope

    with scratch() as folder:
        server = Server(folder)
        node = Node(node_id=server.node_id)
        pull = fleet_pb2.PullMessagesRequest(node=node).SerializeToString()
        found = fleet_pb2.PullMessagesResponse.FromString(server.send("pull-messages", pull)[1])
        request = message_from_proto(found.messages_list[0])
        run_id = request.metadata.run_id
        with known_ids():
            reply = Message(fill_envelope("hello", '{"client": "clinic"}', b"frame" * 20), reply_to=request)
        reply.metadata.__dict__["_src_node_id"] = server.node_id
        reply.metadata.__dict__["_message_id"] = reply.object_id
        push = fleet_pb2.PushMessagesRequest(
            node=node,
            messages_list=[message_to_proto(remove_content_from_message(reply))],
            message_object_trees=[get_object_tree(reply)],
        )
        key = {"public_key": KEY}
        same = {"node": node, "run_id": run_id}
        talk: list[tuple[str, Any]] = [("pull-messages", fleet_pb2.PullMessagesRequest(node=node))]
        objects = [each.object_id for each in get_object_trees(found.message_object_trees[0])]
        talk += [("pull-object", message_pb2.PullObjectRequest(**same, object_id=each)) for each in objects[:2]]
        confirm = message_pb2.ConfirmMessageReceivedRequest(**same, message_object_id=request.metadata.message_id)
        talk += [("confirm-message-received", confirm), ("push-messages", push)]
        answer = [
            ("push-object", message_pb2.PushObjectRequest(
                **same, session_id=SESSION.decode(), object_id=name, object_content=each.deflate()
            ))
            for name, each in get_all_nested_objects(reply).items()
        ]  # fmt: skip
        others = [
            ("register-node", fleet_pb2.RegisterNodeFleetRequest(**key)),
            ("activate-node", fleet_pb2.ActivateNodeRequest(**key, heartbeat_interval=1800)),
            ("send-node-heartbeat", heartbeat_pb2.SendNodeHeartbeatRequest(node=node, heartbeat_interval=1800)),
            ("deactivate-node", fleet_pb2.DeactivateNodeRequest(node_id=server.node_id)),
            ("unregister-node", fleet_pb2.UnregisterNodeFleetRequest(node_id=server.node_id)),
            ("get-run", message_pb2.PullObjectRequest(**same)),
            ("get-fab", message_pb2.PullObjectRequest(**same)),
        ]
        talks = {
            "answer": [talk[-1], *answer],
            "fetch": talk[:-1],
            **{route: [(route, body)] for route, body in others},
        }
        return {
            name: bundle(
                {f"{number}-{route}": body.SerializeToString() for number, (route, body) in enumerate(requests)}
            )
            for name, requests in talks.items()
        }


def get_object_trees(tree: Any) -> list[Any]:
    """A tree of objects and all below it."""
    return [tree, *(each for child in tree.children for each in get_object_trees(child))]


TARGETS = (
    Target(
        "http", open_http, "signed requests at the server's port, by any route, then the answer", Requests(), share=1.2,
        seconds=10, memory=128 * MEBIBYTE,
    ),
)  # fmt: skip
