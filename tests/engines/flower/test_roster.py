"""Who is there: the thread that welcomes survives everything, and a name belongs to whoever took it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from flwr.common.constant import NOOP_FLWR_AID
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

from fedmtl.engines.flower import roster as roster_module
from fedmtl.engines.flower.certificates import CURVE
from fedmtl.engines.flower.engine import client_info
from fedmtl.engines.flower.enrolment import BOOK, Enrolments, KeyBook, NoKeys, enroll, unenroll
from fedmtl.engines.flower.envelope import fill_envelope
from fedmtl.engines.flower.link import Link
from fedmtl.engines.flower.roster import UNKNOWN, Allowance, Note, Roster
from fedmtl.engines.flower.signing import Signer
from fedmtl.federation.handshake import Hello, TaskCounts, Terms

PATIENCE = 60.0


class Hall:
    """A roster over a link, and nodes that answer its welcome."""

    def __init__(self, folder: Path, enrolments: Enrolments, judge=lambda hello, key: None) -> None:
        self.link = Link(folder / "spool")
        self.roster = Roster(self.link, "{}", judge, enrolments)
        self.notes: list[Note] = []

    def come(
        self,
        key: bytes,
        client: str,
        tasks: tuple[str, ...] = ("t",),
        examples: int = 10,
        *,
        wants_model: bool = False,
    ) -> int:
        """A node joins and says hello."""
        node_id = self.link.join(key)
        self.wait(lambda: self.link.is_waiting_for(key))
        ((message,), _) = self.link.next_message(node_id)
        counts = TaskCounts(examples=examples, validation=1, tokens=1, truncated=0, labels=[], label_list="")
        hello = Hello(
            client=client, terms=Terms(version="1"), tasks=dict.fromkeys(tasks, counts), wants_model=wants_model
        )
        answer = Message(fill_envelope("hello", hello.model_dump_json()), node_id, "query")
        tree = get_object_tree(answer)
        session, missing = self.link.announce(node_id, message.metadata.message_id, tree)
        objects = get_all_nested_objects(answer)
        for object_id in missing:
            assert self.link.take_object(node_id, session, object_id, objects[object_id].deflate())
        return node_id

    def wait(self, is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not is_so():
            self.notes += self.roster.take_notes()
            assert time.monotonic() < end, self.notes
            time.sleep(0.02)
        self.notes += self.roster.take_notes()

    def remarks(self) -> list[tuple[str, str]]:
        return [(note.client, note.reason) for note in self.notes if note.kind == "remark"]


def new_key() -> bytes:
    return Signer(ec.generate_private_key(CURVE())).public_key


@pytest.fixture
def open_hall(tmp_path) -> Iterator[Callable[..., Hall]]:
    opened: list[Hall] = []

    def make(*arguments) -> Hall:
        opened.append(Hall(tmp_path, *arguments))
        return opened[-1]

    yield make
    for hall in opened:
        hall.roster.close()


def put_in_place(path: Path, text: str) -> None:
    """Replace a file at once, as `enroll` does: the roster must not read it while it is empty."""
    path.with_name("new").write_text(text)
    path.with_name("new").replace(path)


def test_a_broken_list_leaves_the_last_good_one_in_force_and_is_said_once(tmp_path, open_hall):
    keys = {name: new_key() for name in ("a", "b")}
    for name, key in keys.items():
        enroll(tmp_path, name, key, ["t"])
    hall = open_hall(KeyBook(tmp_path))
    hall.come(keys["a"], "a")
    good = (tmp_path / BOOK).read_text()
    put_in_place(tmp_path / BOOK, good[:-3])
    hall.wait(lambda: bool(hall.remarks()))
    hall.come(keys["b"], "b")
    hall.wait(lambda: set(hall.roster.present()) == {"a", "b"})
    time.sleep(0.3)
    hall.wait(lambda: True)
    ((client, reason),) = hall.remarks()
    assert client == ""
    assert "enrolled.json: bad JSON" in reason
    assert "who was enrolled before still is" in reason
    put_in_place(tmp_path / BOOK, good)
    hall.wait(lambda: len(hall.remarks()) == 2)
    assert hall.remarks()[1] == ("", "the list of enrolled sites can be read again")
    (tmp_path / BOOK).unlink()
    hall.wait(lambda: len(hall.remarks()) == 3)
    assert "is gone" in hall.remarks()[2][1]
    assert set(hall.roster.present()) == {"a", "b"}


def test_a_hello_that_breaks_the_judge_costs_itself_alone(open_hall):
    def judge(hello: Hello, key: bytes) -> str | None:
        return {"good": None}[hello.client]

    hall = open_hall(NoKeys({"bad": ["t"], "good": ["t"]}), judge)
    hall.come(new_key(), "bad")
    hall.wait(lambda: bool(hall.remarks()))
    hall.come(new_key(), "good")
    hall.wait(lambda: set(hall.roster.present()) == {"good"})
    assert hall.remarks() == [(UNKNOWN, "KeyError: 'bad'")]


def test_a_node_that_is_gone_is_not_there_and_others_still_come(open_hall):
    hall = open_hall(NoKeys({"a": ["t"], "b": ["t"]}))
    node_id = hall.come(new_key(), "a")
    hall.wait(lambda: set(hall.roster.present()) == {"a"})
    hall.link.delete_node(NOOP_FLWR_AID, node_id)
    assert hall.roster.present() == {}
    with hall.link.lock:
        del hall.link.nodes[node_id]
    assert hall.roster.present() == {}
    with pytest.raises(KeyError):
        hall.link.send(node_id, "job")
    hall.come(new_key(), "b")
    hall.wait(lambda: set(hall.roster.present()) == {"b"})


def test_without_keys_a_name_belongs_to_the_node_that_took_it_while_it_lives(open_hall, monkeypatch):
    hall = open_hall(NoKeys({"a": ["t"]}))
    first, second = new_key(), new_key()
    node_id = hall.come(first, "a")
    hall.wait(lambda: "a" in hall.roster.present())
    for _ in range(4):
        hall.come(second, "a")
        count = len(hall.remarks())
        hall.wait(lambda count=count: len(hall.remarks()) > count)
        assert hall.roster.present()["a"].node_id == node_id
    assert [note for note in hall.notes if note.kind == "refused"] == []
    assert {client for client, _ in hall.remarks()} == {UNKNOWN}
    assert "another process is here as a" in hall.remarks()[0][1]
    # The one that took it comes again at once; another one when the first has been silent.
    assert hall.come(first, "a") == node_id
    hall.wait(lambda: hall.roster.present()["a"].coming == 2)
    monkeypatch.setattr(roster_module, "SILENCE", 0.0)
    other = hall.come(second, "a")
    hall.wait(lambda: (found := hall.roster.find("a")) is not None and found.node_id == other)


def test_a_site_that_is_struck_off_is_not_there_and_is_named(tmp_path, open_hall):
    keys = {name: new_key() for name in ("a", "b")}
    for name, key in keys.items():
        enroll(tmp_path, name, key, ["t"])
    hall = open_hall(KeyBook(tmp_path))
    nodes = {name: hall.come(key, name) for name, key in keys.items()}
    hall.wait(lambda: set(hall.roster.present()) == {"a", "b"})
    message_id = hall.link.send(nodes["b"], "job", frame=b"job")
    unenroll(tmp_path, "b")
    assert set(hall.roster.present()) == {"a"}
    hall.wait(lambda: bool(hall.remarks()))
    assert hall.remarks() == [("b", "is not enrolled any more, or not for what it brought")]
    hall.wait(lambda: hall.link.is_fetched(message_id))


def test_a_site_enrolled_for_fewer_tasks_than_it_brought_is_not_there(tmp_path, open_hall):
    key = new_key()
    enroll(tmp_path, "a", key, ["t", "u"])
    hall = open_hall(KeyBook(tmp_path))
    hall.come(key, "a", ("t", "u"))
    hall.wait(lambda: set(hall.roster.present()) == {"a"})
    enroll(tmp_path, "a", key, ["t"], replace=True)
    assert hall.roster.present() == {}


def test_a_refusal_is_the_failure_of_the_key_it_came_with(tmp_path, open_hall):
    key = new_key()
    enroll(tmp_path, "bad", key, ["t"])
    enroll(tmp_path, "good", new_key(), ["t"])
    hall = open_hall(KeyBook(tmp_path), lambda hello, key: f"says it is {hello.client}\x1b[2J\nround 9 done")
    hall.come(key, "good")
    hall.wait(lambda: any(note.kind == "refused" for note in hall.notes))
    (note,) = [note for note in hall.notes if note.kind == "refused"]
    assert (note.client, note.reason) == ("bad", r"says it is good\x1b[2J\nround 9 done")


def test_a_late_answer_is_a_remark_about_its_site(tmp_path, open_hall):
    key = new_key()
    enroll(tmp_path, "a", key, ["t"])
    hall = open_hall(KeyBook(tmp_path))
    node_id = hall.come(key, "a")
    hall.wait(lambda: "a" in hall.roster.present())
    message_id = hall.link.send(node_id, "job", frame=b"job", about="the job of round 1")
    hall.link.close_message(message_id)
    hall.link.announce(node_id, message_id, get_object_tree(Message(fill_envelope("update"), node_id, "query")))
    hall.wait(lambda: bool(hall.remarks()))
    assert hall.remarks() == [("a", "answered the job of round 1, which is closed")]


def test_a_site_counts_for_no_more_examples_than_it_was_enrolled_with(tmp_path):
    counts = TaskCounts(examples=1_000_000, validation=1, tokens=1, truncated=0, labels=[], label_list="")
    hello = Hello(client="a", terms=Terms(version="1"), tasks={"t": counts, "u": counts, "v": counts})
    info = client_info(hello, {"t": 500, "u": 2_000_000})
    assert info.num_examples == {"t": 500, "u": 1_000_000, "v": 1_000_000}
    enroll(tmp_path, "a", new_key(), ["t", "u", "v"], {"*": 7, "u": 9})
    book = KeyBook(tmp_path)
    assert [book.most_examples("a", task) for task in ("t", "u", "v")] == [7, 9, 7]
    assert json.loads((tmp_path / BOOK).read_text())["a"]["examples"] == {"*": 7, "u": 9}


def test_counts_of_labels_and_of_scored_examples_are_bounded_with_the_examples():
    counts = {"labels": [2**51, 2**50], "label_list": "", "tokens": 1, "truncated": 0, "validation": 2**53 - 1}
    hello = Hello(client="a", terms=Terms(version="1"), tasks={"t": TaskCounts(examples=2**53 - 1, **counts)})
    info = client_info(hello, {"t": 300})
    # Two thirds and one third of 300.
    assert (info.num_examples, info.label_counts, info.num_validation) == ({"t": 300}, {"t": [200, 100]}, {"t": 300})
    few = Hello(client="a", terms=Terms(version="1"), tasks={"t": TaskCounts(examples=9, **counts)})
    assert client_info(few, {}).label_counts == {"t": [6, 3]}


def test_a_client_that_makes_events_without_end_is_written_down_twenty_times_a_minute():
    now = [0.0]
    allowance = Allowance(now=lambda: now[0])
    assert sum(allowance.takes("loud") for _ in range(1000)) == 20
    assert allowance.takes("other")
    now[0] = 60.0
    assert allowance.takes("loud")
