"""What `fedmtl status` tells of a run."""

from __future__ import annotations

from fedmtl.runs.event_lines import from_json
from fedmtl.runs.folder import is_busy, locked
from fedmtl.runs.summary import ClientFailure, RunStatus, run_status

START = {"event": "start", "num_rounds": 3}


def status_of(*events: dict) -> RunStatus:
    return run_status([from_json(event) for event in events], "x")


def update(number: int, client: str) -> dict:
    return {"event": "update", "round": number, "client": client, "tasks": {"sst2": {}}, "seconds": 1.5,
            "bytes_up": 10, "bytes_down": 20}  # fmt: skip


def test_sites_are_counted_by_their_updates_and_failures():
    events = [
        START,
        {"event": "site", "round": 0, "client": "a", "tasks": {"sst2": 4}},
        {"event": "round", "round": 0},
        update(1, "a"),
        {"event": "failure", "round": 1, "client": "b", "reason": "late"},
        {"event": "round", "round": 1},
        update(2, "a"),
        {"event": "site", "round": 2, "client": "a", "tasks": {"qqp": 4}},
    ]
    told = status_of(*events)
    assert (told.status, told.rounds, told.num_rounds) == ("running", 1, 3)
    a = told.sites["a"]
    # Two updates of 10 bytes up, 20 down and 1.5 s each; it brings qqp now.
    assert (a.tasks, a.updates, a.last_round, a.bytes_up, a.bytes_down, a.seconds) == (("qqp",), 2, 2, 20, 40, 3.0)
    assert told.sites["b"].failures == 1
    assert told.last_failure == ClientFailure(1, "b", "late")
    assert told.to_json()["last_failure"] == {"round": 1, "client": "b", "reason": "late"}


def test_a_run_before_its_first_round_waits_and_an_ended_one_says_how():
    assert status_of(START).status == "waiting"
    assert status_of(START, {"event": "end", "status": "failed"}).status == "failed"
    assert status_of(START).last_failure is None


def test_a_run_without_a_process_was_killed_unless_it_ended():
    events = [from_json(event) for event in (START, {"event": "round", "round": 1})]
    assert run_status(events, "x", is_busy=False).status == "killed"
    assert run_status(events, "x", is_busy=True).status == "running"
    ended = [*events, from_json({"event": "end", "status": "interrupted"})]
    assert run_status(ended, "x", is_busy=False).status == "interrupted"


def test_a_folder_is_busy_while_somebody_has_its_lock(tmp_path):
    assert not is_busy(tmp_path)
    with locked(tmp_path):
        assert is_busy(tmp_path)
    assert not is_busy(tmp_path)


def test_who_has_not_come_and_who_was_not_in_the_last_round_is_named():
    expected = {"event": "expected", "round": 0, "clients": ["a", "b", "c"]}
    came = [{"event": "site", "round": 0, "client": client, "tasks": {"sst2": 4}} for client in "ab"]
    assert status_of(START, expected, came[0]).missing == {"b": None, "c": None}
    rounds = [{"event": "round", "round": 0}, update(1, "a"), update(1, "b"), {"event": "round", "round": 1}]
    assert status_of(START, expected, *came, *rounds).missing == {"c": None}
    later = [*rounds, update(2, "a"), {"event": "round", "round": 2}]
    assert status_of(START, expected, *came, *later).missing == {"b": 1, "c": None}
    assert status_of(START, expected, *came, *later, {"event": "end", "status": "done"}).missing == {}
    # Clients of one machine are not sites.
    assert (
        status_of(START, update(1, "a"), {"event": "round", "round": 1}, {"event": "round", "round": 2}).missing == {}
    )
