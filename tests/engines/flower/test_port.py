"""The server's port against those who are not sites, and against sites that send what they should not."""

from __future__ import annotations

import json
import random
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    ActivateNodeResponse,
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesRequest,
    PushMessagesResponse,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree, PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_id

from fedmtl.engines.flower import certificates, connections, fleet_api, signing
from fedmtl.engines.flower.addresses import Address
from fedmtl.engines.flower.certificates import CA, CURVE, ServerCertificate, make_authority
from fedmtl.engines.flower.connections import Visitors
from fedmtl.engines.flower.envelope import fill_envelope
from fedmtl.engines.flower.fleet_api import FleetApi
from fedmtl.engines.flower.line import ClocksDiffer, Line, LineRefused, SiteKeys
from fedmtl.engines.flower.link import Link
from fedmtl.engines.flower.signing import Caller, Guard, Refused, Signer
from fedmtl.errors import WireError

HEARTBEAT, PULL, JOIN = (f"/v1/fleet/{name}" for name in ("send-node-heartbeat", "pull-messages", "activate-node"))
PUSH, PUSH_OBJECT = "/v1/fleet/push-messages", "/v1/fleet/push-object"


@dataclass
class Port:
    """A port with TLS and a set of enrolled keys, and one site's requests to it."""

    api: FleetApi
    link: Link
    folder: Path
    key: ec.EllipticCurvePrivateKey
    enrolled: set[bytes]

    def __post_init__(self) -> None:
        self.signer = Signer(self.key)
        context = ssl.create_default_context(cafile=str(self.folder / CA))
        self.client = httpx.Client(base_url=f"https://{self.api.address}", verify=context, timeout=60)

    def post(self, path: str, body: bytes, headers: dict[str, str] | None = None) -> httpx.Response:
        return self.client.post(path, content=body, headers=headers or self.signer.headers("POST", path, body))

    def join(self) -> int:
        body = ActivateNodeRequest(public_key=self.signer.public_key, heartbeat_interval=100).SerializeToString()
        answer = self.post(JOIN, body)
        assert answer.status_code == 200, answer.text
        node_id: int = ActivateNodeResponse.FromString(answer.content).node_id
        return node_id

    def line(self, spool: Path) -> Line:
        return Line(self.api.address, SiteKeys(self.key, self.folder / CA), spool, 1 << 30)

    def stranger(self) -> ssl.SSLSocket:
        context = ssl.create_default_context(cafile=str(self.folder / CA))
        plain = socket.create_connection((self.api.address.host, self.api.address.port), 60)
        return context.wrap_socket(plain, server_hostname="127.0.0.1")


@pytest.fixture
def port(tmp_path) -> Iterator[Port]:
    make_authority(tmp_path / "certs", ["127.0.0.1"])
    certificate = ServerCertificate(tmp_path / "certs/server.crt", tmp_path / "certs/server.key")
    key = ec.generate_private_key(CURVE())
    enrolled = {Signer(key).public_key}
    link = Link(tmp_path / "spool")
    api = FleetApi(link, Address("127.0.0.1", 0), certificate, enrolled.__contains__)
    made = Port(api, link, tmp_path / "certs", key, enrolled)
    yield made
    made.client.close()
    api.close()


def refusal(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["code"]


def heartbeat(node_id: int) -> bytes:
    body: bytes = SendNodeHeartbeatRequest(node=Node(node_id=node_id), heartbeat_interval=100).SerializeToString()
    return body


def test_one_set_of_headers_serves_one_request(port):
    node_id = port.join()
    body = heartbeat(node_id)
    headers = port.signer.headers("POST", HEARTBEAT, body)
    assert port.post(HEARTBEAT, body, headers).status_code == 200
    assert refusal(port.post(HEARTBEAT, body, headers)) == (401, "replay")
    fresh = port.signer.headers("POST", HEARTBEAT, body)
    other = PullMessagesRequest(node=Node(node_id=node_id)).SerializeToString()
    assert refusal(port.post(PULL, body, fresh)) == (401, "signature")
    assert refusal(port.post(HEARTBEAT, other + b"\x10\x01", fresh)) == (401, "body")
    for name in (signing.TIME, signing.NONCE, signing.DIGEST, signing.SIGNATURE, signing.KEY):
        changed = {**port.signer.headers("POST", HEARTBEAT, body), name: "0" * 32}
        assert port.post(HEARTBEAT, body, changed).status_code == 401, name
        del changed[name]
        assert refusal(port.post(HEARTBEAT, body, changed)) == (401, "unsigned"), name


def test_a_key_that_is_struck_off_is_not_served_from_then_on(port, tmp_path):
    node_id = port.join()
    assert port.post(HEARTBEAT, heartbeat(node_id)).status_code == 200
    port.enrolled.clear()
    assert refusal(port.post(HEARTBEAT, heartbeat(node_id))) == (401, "unknown-key")
    line = port.line(tmp_path / "site/spool")
    with pytest.raises(LineRefused, match="this key is not enrolled there"):
        line.receive()
    line.close()


def test_a_node_speaks_for_itself_alone(port):
    first = port.join()
    other = ec.generate_private_key(CURVE())
    port.enrolled.add(Signer(other).public_key)
    port.signer = Signer(other)
    assert port.join() != first
    assert refusal(port.post(HEARTBEAT, heartbeat(first))) == (401, "not-joined")


def test_a_clock_that_is_wrong_is_told_apart_and_the_site_goes_on_when_it_is_right_again(port, tmp_path, monkeypatch):
    line = port.line(tmp_path / "site/spool")
    line.join()
    true_time = time.time
    monkeypatch.setattr(signing.time, "time", lambda: true_time() + 400)
    # The server's clock is the same function: its guard has the right one.
    monkeypatch.setattr(port.api._app.guard, "_clock", true_time)
    for _ in range(2):
        with pytest.raises(ClocksDiffer, match="clock is 400 s ahead of the server's"):
            line.join()
    monkeypatch.undo()
    line.join()
    line.close()


def test_a_body_is_not_read_before_its_sender_is_known(port, monkeypatch):
    read = []
    body = fleet_api._body

    async def watched(*arguments):
        read.append(arguments)
        return await body(*arguments)

    monkeypatch.setattr(fleet_api, "_body", watched)
    with port.stranger() as outsider:
        outsider.sendall(
            b"POST /v1/fleet/push-object HTTP/1.1\r\nHost: server\r\nContent-Length: 8000000\r\n\r\n" + bytes(20_000)
        )
        answer = outsider.recv(2000)
    assert b" 401 " in answer
    unknown = Signer(ec.generate_private_key(CURVE()))
    assert refusal(port.post(HEARTBEAT, b"", unknown.headers("POST", HEARTBEAT, b""))) == (401, "unknown-key")
    assert read == []
    port.join()
    assert len(read) == 1


def test_an_unsigned_question_for_messages_does_not_wait(port):
    started = time.monotonic()
    assert port.post(PULL, b"", {"content-type": "application/x-protobuf"}).status_code == 401
    assert time.monotonic() - started < fleet_api.LONG_POLL / 2


def test_silent_and_slow_connections_end_and_an_honest_site_comes_in_between(port, tmp_path, monkeypatch):
    monkeypatch.setattr(connections, "HEADERS", 1.0)
    monkeypatch.setattr(connections, "HANDSHAKE", 1.0)
    where = (port.api.address.host, port.api.address.port)
    with ExitStack() as outsiders:
        silent = [outsiders.enter_context(socket.create_connection(where, 60)) for _ in range(30)]
        slow = [outsiders.enter_context(port.stranger()) for _ in range(10)]
        for each in slow:
            each.sendall(b"POST / HTTP/1.1\r\nX")
        started = time.monotonic()
        line = port.line(tmp_path / "site/spool")
        line.join()
        assert time.monotonic() - started < 5
        line.close()
        end = time.monotonic() + 60
        while len(port.api.visitors) > 1 and time.monotonic() < end:
            for each in slow:
                # A byte now and then does not help.
                try:
                    each.sendall(b"x")
                except OSError:
                    continue
            time.sleep(0.1)
        assert len(port.api.visitors) <= 1
        for each in silent:
            assert each.recv(10) == b""


def test_when_there_is_no_place_the_oldest_stranger_goes(port, tmp_path, monkeypatch):
    monkeypatch.setattr(port.api.visitors, "_most", 8)
    where = (port.api.address.host, port.api.address.port)
    line = port.line(tmp_path / "site/spool")
    line.join()
    with ExitStack() as outsiders:
        silent = [outsiders.enter_context(socket.create_connection(where, 60)) for _ in range(20)]
        started = time.monotonic()
        for _ in range(3):
            line.join()
        other = port.line(tmp_path / "other/spool")
        other.join()
        assert time.monotonic() - started < 5
        assert len(port.api.visitors) <= 8
        # Half of the table is left to other addresses.
        assert [each for each in silent[:5] if each.recv(10) != b""] == []
        other.close()
    line.close()


def test_headers_that_never_end_are_cut_off(port):
    with port.stranger() as outsider:
        outsider.sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\n")
        started = time.monotonic()
        with pytest.raises(OSError):
            send_lines(outsider, 1000)
        assert time.monotonic() - started < connections.HEADERS


def send_lines(connection: ssl.SSLSocket, count: int) -> None:
    for _ in range(count):
        connection.sendall(b"X-A: " + b"a" * 1000 + b"\r\n")
        time.sleep(0.001)


def test_a_site_that_sends_too_much_at_once_waits(port, monkeypatch):
    node_id = port.join()
    monkeypatch.setattr(signing, "RATE", 0.0)
    answers = [port.post(HEARTBEAT, heartbeat(node_id)).status_code for _ in range(3)]
    assert answers == [200] * 3
    (account,) = port.api._app.guard._accounts.values()
    account.allowance = 1.5
    assert [port.post(HEARTBEAT, heartbeat(node_id)).status_code for _ in range(2)] == [200, 429]


def test_a_nonce_is_remembered_while_its_time_is_good_and_no_longer(monkeypatch):
    signer = Signer(ec.generate_private_key(CURVE()))
    now = [1000.0]
    monkeypatch.setattr(signing.time, "monotonic", lambda: now[0])
    guard = Guard(lambda key, path: True)
    for _ in range(5):
        headers = signer.headers("POST", PULL, b"")
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        guard.check("POST", PULL, raw)
        with pytest.raises(Refused, match="replay"):
            guard.check("POST", PULL, raw)
        now[0] += 2 * signing.WINDOW + 1
    (account,) = guard._accounts.values()
    assert len(account.nonces) == len(account.order) == 1


def test_mutated_signed_bodies_are_never_a_mistake_of_the_server(port, monkeypatch):
    """Two thousand bodies over every route: each is served, or refused with a 4xx."""
    monkeypatch.setattr(fleet_api, "LONG_POLL", 0.0)
    chance = random.Random(0)
    node_id = port.join()
    message_id = port.link.send(node_id, "job", frame=bytes(100), most_bytes=1000)
    node = Node(node_id=node_id)
    reply = PushMessagesRequest(node=node, message_object_trees=[ObjectTree(object_id="a" * 64)])
    reply.messages_list.add().metadata.src_node_id = node_id
    reply.messages_list[0].metadata.reply_to_message_id = message_id
    bodies = {
        JOIN: ActivateNodeRequest(public_key=port.signer.public_key, heartbeat_interval=100),
        HEARTBEAT: SendNodeHeartbeatRequest(node=node, heartbeat_interval=100),
        PULL: PullMessagesRequest(node=node),
        PUSH: reply,
        PUSH_OBJECT: PushObjectRequest(node=node, object_id="a" * 64, session_id="s", object_content=b"x"),
        "/v1/fleet/pull-object": PullObjectRequest(node=node, object_id=message_id),
        "/v1/fleet/confirm-message-received": ConfirmMessageReceivedRequest(node=node, message_object_id=message_id),
    }
    seen = set()
    caller = Caller(port.signer.public_key, "")
    for number in range(2000):
        path = list(bodies)[number % len(bodies)]
        body = mutated(bodies[path].SerializeToString(), chance)
        try:
            port.api._app._call(fleet_api.ROUTES[path], body, caller)
            seen.add(200)
        except Refused as refused:
            seen.add(refused.status)
        if number % 100 == 0:
            seen.add(port.post(path, body).status_code)
    assert seen <= {200, 400, 401, 403}
    assert {200, 400, 401} <= seen
    assert port.post(HEARTBEAT, heartbeat(port.join())).status_code == 200


def test_a_node_that_confirms_what_it_did_not_fetch_is_given_nothing(port, monkeypatch):
    monkeypatch.setattr(fleet_api, "LONG_POLL", 0.0)
    node_id = port.join()
    port.link.confirm(node_id, port.link.send(node_id, "job"))
    answer = port.post(PULL, PullMessagesRequest(node=Node(node_id=node_id)).SerializeToString())
    assert answer.status_code == 200
    assert list(PullMessagesResponse.FromString(answer.content).messages_list) == []


def mutated(body: bytes, chance: random.Random) -> bytes:
    data = bytearray(body)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        change: Callable[[], None] = chance.choice(
            [
                lambda at=at: data.__setitem__(slice(at, at + 1), bytes([chance.randrange(256)])),
                lambda at=at: data.__delitem__(slice(at, at + chance.randint(1, 8))),
                lambda at=at: data.__setitem__(slice(at, at), bytes(data[: chance.randint(0, 40)])),
                lambda at=at: data.__setitem__(slice(at, at), chance.randbytes(3)),
            ]
        )
        change()
    return bytes(data)


def announced(port: Port, node_id: int, message_id: str, tree: ObjectTree) -> PushMessagesResponse:
    request = PushMessagesRequest(node=Node(node_id=node_id), message_object_trees=[tree])
    metadata = request.messages_list.add().metadata
    metadata.src_node_id, metadata.reply_to_message_id = node_id, message_id
    answer = port.post(PUSH, request.SerializeToString())
    assert answer.status_code == 200
    return PushMessagesResponse.FromString(answer.content)


def test_an_answer_brings_no_object_twice(port, tmp_path):
    """An answer whose chunks repeat wrote sixty times what it brought."""
    node_id = port.join()
    message_id = port.link.send(node_id, "job", frame=b"job", most_bytes=1 << 30)
    chunk = ObjectTree(object_id="b" * 64)
    tree = ObjectTree(object_id="a" * 64, children=[chunk] * 60)
    assert announced(port, node_id, message_id, tree).objects_to_push == []
    with pytest.raises(WireError, match="names an object twice"):
        port.link.take_answer(message_id, "update")


def test_an_answer_whose_array_names_a_chunk_twice_writes_nothing(port, tmp_path):
    node_id = port.join()
    message_id = port.link.send(node_id, "job", frame=b"job", most_bytes=1 << 30)
    content = fill_envelope("update", frame=bytes(100_000))
    objects = get_all_nested_objects(Message(content, node_id, "query"))
    (array_id,) = [name for name, each in objects.items() if type(each).__name__ == "Array"]
    array = objects[array_id].deflate()
    head, _, body = array.partition(b"\x00")
    (chunk_id,) = [name for name, each in objects.items() if type(each).__name__ == "ArrayChunk"]
    repeated = json.loads(body)
    repeated["arraychunk_ids"] = [0] * 60
    forged = json.dumps(repeated).encode()
    parts = head.split()
    parts[-1] = str(len(forged)).encode()
    changed = {objects_name: each.deflate() for objects_name, each in objects.items()}
    forged_array = b" ".join(parts) + b"\x00" + forged
    changed = replaced(changed, array_id, forged_array)
    root = list(changed)[-1]
    tree = ObjectTree(object_id=root, children=[ObjectTree(object_id=name) for name in changed if name != root])
    told = announced(port, node_id, message_id, tree)
    for name, each in changed.items():
        request = PushObjectRequest(
            node=Node(node_id=node_id), session_id=told.session_id, object_id=name, object_content=each
        )
        assert port.post(PUSH_OBJECT, request.SerializeToString()).status_code == 200
    with pytest.raises(WireError, match="not in order, each once"):
        port.link.take_answer(message_id, "update")
    assert not (tmp_path / "spool/update").exists()
    assert chunk_id in changed


def replaced(objects: dict[str, bytes], name: str, content: bytes) -> dict[str, bytes]:
    """The objects of a message with one changed, under new names up to its root."""
    found: dict[str, bytes] = {}
    names = {name: get_object_id(content)}
    for old, each in objects.items():
        body = content if old == name else each
        for before, after in names.items():
            body = body.replace(before.encode(), after.encode())
        names[old] = get_object_id(body)
        found[names[old]] = body
    return found


def test_an_answer_has_no_more_bytes_than_its_job_allows(port):
    node_id = port.join()
    message_id = port.link.send(node_id, "job", frame=b"job", most_bytes=10_000)
    contents = [bytes([number]) * 5_000 for number in range(4)]
    names = [get_object_id(content) for content in contents]
    tree = ObjectTree(object_id=names[0], children=[ObjectTree(object_id=name) for name in names[1:]])
    told = announced(port, node_id, message_id, tree)
    assert sorted(told.objects_to_push) == sorted(names)
    stored = [port.link.take_object(node_id, told.session_id, *pair) for pair in zip(names, contents, strict=True)]
    assert stored == [True, True, False, False]
    with pytest.raises(WireError, match="more than"):
        port.link.take_answer(message_id, "update")
    assert list((port.folder.parent / "spool/objects").glob("up-*")) == []


def test_a_late_answer_is_a_remark_that_names_its_round(port):
    node_id = port.join()
    message_id = port.link.send(node_id, "job", frame=b"job", about="the job of round 1")
    port.link.close_message(message_id)
    announced(port, node_id, message_id, ObjectTree(object_id="a" * 64))
    assert port.link.take_remarks() == [(node_id, "answered the job of round 1, which is closed")]


def test_a_node_fetches_its_own_messages_alone(port, monkeypatch):
    monkeypatch.setattr(fleet_api, "LONG_POLL", 0.1)
    first = port.join()
    message_id = port.link.send(first, "job", frame=b"job")
    assert port.link.object_for(first, message_id) is not None
    other = ec.generate_private_key(CURVE())
    port.enrolled.add(Signer(other).public_key)
    port.signer = Signer(other)
    second = port.join()
    assert port.link.object_for(second, message_id) is None
    port.link.confirm(second, message_id)
    assert not port.link.is_fetched(message_id)
    answer = port.post(PULL, PullMessagesRequest(node=Node(node_id=second)).SerializeToString())
    assert list(PullMessagesResponse.FromString(answer.content).messages_list) == []


def test_what_is_no_call_of_a_site_is_not_there(port):
    for path in ("/", "/docs", "/v1/fleet/register-node", "/v1/fleet/unregister-node", "/v1/control/start-run"):
        assert refusal(port.post(path, b"")) == (404, "route")
    assert port.client.get(PULL).status_code == 405
    assert port.post(PULL + "?a=b", b"").status_code == 404


def test_a_network_of_version_6_is_one_neighbour():
    one, other = (connections.neighbourhood(f"2001:db8:1:{net}::{host}") for net, host in (("2", "3"), ("2", "ffff")))
    assert one == other != connections.neighbourhood("2001:db8:1:3::3")
    assert connections.neighbourhood("10.0.0.1") != connections.neighbourhood("10.0.0.2")


def test_connections_fit_into_the_files_a_process_may_open():
    files = connections.resource.getrlimit(connections.resource.RLIMIT_NOFILE)[0]
    assert 16 <= connections.most_connections() <= min(512, files // 2)
    assert len(Visitors(10)) == 0


@pytest.mark.slow
def test_a_site_hears_that_the_certificate_ends_and_a_renewed_one_is_taken_up(port, tmp_path, monkeypatch):
    monkeypatch.setattr(fleet_api, "RELOAD", 0.1)
    monkeypatch.setattr(certificates, "SERVER_DAYS", 10)
    certificates.renew(port.folder, [])
    end = time.monotonic() + 60
    said: list[str] = []
    while not said and time.monotonic() < end:
        keys = SiteKeys(port.key, port.folder / CA)
        line = Line(port.api.address, keys, tmp_path / "site/spool", 1 << 30, said.append)
        line.join()
        line.close()
        time.sleep(0.2)
    assert said[0].startswith("the server's certificate ends in 9 days")


def test_a_busy_server_is_asked_again(port, tmp_path, monkeypatch):
    line = port.line(tmp_path / "site/spool")
    line.join()
    (account,) = port.api._app.guard._accounts.values()
    account.allowance = -0.5 * signing.RATE
    line.join()
    line.close()


def test_what_reads_bytes_of_others_is_pinned():
    root = Path(__file__).parents[3]
    pinned = dict(line.split("==") for line in (root / "constraints.txt").read_text().splitlines() if "==" in line)
    bounded = (root / "pyproject.toml").read_text()
    for name in ("fastapi", "starlette", "uvicorn", "httpx", "cryptography", "protobuf", "safetensors"):
        assert name in pinned
        assert re.search(rf'"{name}(\[standard\])?>=', bounded), name
