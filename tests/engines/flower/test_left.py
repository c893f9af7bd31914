"""The guide's YAML with files: a site that was started without `--data` leaves, and the server says so at once."""

from __future__ import annotations

import json
import time
from typing import Any, cast

import pytest

from engines.flower.deployment import Server, Site, of_kind
from fedmtl.cli.display import PlainDisplay
from fedmtl.config.file import load_config
from fedmtl.engines.flower.site_service import CannotJoin
from fedmtl.federation.server import RoundFailed
from fedmtl.runs.events import FailureEvent, WaitingEvent

WHY = "left: sst2: the site was given no file of the task, and opens none that a server names; it needs --data"


@pytest.fixture
def serve(tmp_path):
    """A server with the guide's tasks sst2 and qqp, whose examples are files in a folder of its machine."""
    for task, header in (("sst2", "sentence\tlabel"), ("qqp", "sentence1\tsentence2\tlabel")):
        folder = tmp_path / "data" / task
        folder.mkdir(parents=True)
        texts = [f"text {number}" + (f"\tother {number}" if task == "qqp" else "") for number in range(40)]
        labels = ("negative", "positive") if task == "sst2" else ("not_duplicate", "duplicate")
        rows = "".join(f"{text}\t{labels[number % 2]}\n" for number, text in enumerate(texts))
        for name in ("train.tsv", "dev.tsv"):
            (folder / name).write_text(f"{header}\n{rows}")

    def serve(*overrides: str) -> Server:
        (tmp_path / "guide.yaml").write_text(
            "defaults: plain\nmodel: {server_model: random-1x32, client_model: random-1x32}\n"
            "data: {root: data}\n"
            "training: {num_rounds: 1, local_steps: 6, batch_size: 8, learning_rate: 2e-5}\n"
            "tasks:\n  sst2: {train_samples: 40, val_samples: 8}\n  qqp: {train_samples: 40, val_samples: 8}\n"
            "compute: {workers: 0, device: cpu}\n"
        )
        return Server(load_config(tmp_path / "guide.yaml", [f"output={tmp_path / 'runs'}", *overrides]))

    return serve


def qqp_site(server: Server, folder) -> Site:
    return Site(server, folder / "qqp", "qqp_client", ("qqp",), files={"qqp": str(folder / "data/qqp/train.tsv")})


def test_the_server_says_who_left_and_goes_on_with_the_others(serve, tmp_path):
    server = serve()
    began = time.monotonic()
    without = Site(server, tmp_path / "sst2", "sst2_client", ("sst2",))
    outcome = without.finish()
    assert isinstance(outcome, CannotJoin)
    assert "write `--data sst2=FILE`" in str(outcome)
    assert "data.root" not in str(outcome)
    other = qqp_site(server, tmp_path)
    run = server.finish()
    assert other.finish() == f"{run.name} is done"
    # federation.join_timeout is an hour.
    assert time.monotonic() - began < 50
    assert server.failures() == {"sst2_client": [WHY]}
    assert [event["client"] for event in of_kind(run, "update")] == ["qqp_client"]
    assert of_kind(run, "end")[0]["status"] == "done"
    (failure,) = (event for event in server.events if isinstance(event, FailureEvent))
    display = PlainDisplay(cast(Any, None))
    assert display.lines(failure) == [f"  sst2_client failed in round 0: {WHY}"]


def test_a_run_with_too_few_sites_waits_as_its_settings_say_and_ends(serve, tmp_path):
    server = serve("federation.min_clients=2", "federation.join_timeout=2")
    Site(server, tmp_path / "sst2", "sst2_client", ("sst2",)).finish()
    qqp_site(server, tmp_path)
    with pytest.raises(RoundFailed, match=r"round 1 got 1 updates, federation\.min_clients is 2"):
        server.finish()
    waiting = [event.clients for event in server.events if isinstance(event, WaitingEvent)]
    assert waiting == [["qqp_client", "sst2_client"], ["sst2_client"]]


def test_a_site_that_left_may_come_again(serve, tmp_path):
    server = serve("federation.min_clients=2")
    Site(server, tmp_path / "sst2", "sst2_client", ("sst2",)).finish()
    again = Site(
        server, tmp_path / "sst2", "sst2_client", ("sst2",), files={"sst2": str(tmp_path / "data/sst2/train.tsv")}
    )
    other = qqp_site(server, tmp_path)
    run = server.finish()
    assert {again.finish(), other.finish()} == {f"{run.name} is done"}
    assert {event["client"] for event in of_kind(run, "update")} == {"sst2_client", "qqp_client"}


def test_a_name_that_a_live_site_has_is_not_taken_by_a_fault(serve, tmp_path):
    server = serve("federation.min_clients=2")
    other = qqp_site(server, tmp_path)
    while not any(getattr(event, "client", "") == "qqp_client" for event in server.events):
        time.sleep(0.02)
    Site(server, tmp_path / "thief", "qqp_client", ("qqp",)).finish()
    last = Site(
        server, tmp_path / "sst2", "sst2_client", ("sst2",), files={"sst2": str(tmp_path / "data/sst2/train.tsv")}
    )
    run = server.finish()
    assert {last.finish(), other.finish()} == {f"{run.name} is done"}
    assert server.failures() == {}
    (remark,) = of_kind(run, "remark")
    assert (remark["client"], json.dumps(remark).count("needs --data")) == ("unknown", 1)
