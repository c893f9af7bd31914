"""The end of a deployed run at sites that want its model: whatever becomes of a model, the run is done and saved."""

from __future__ import annotations

import time

import numpy as np
import pytest

from engines.flower.deployment import Server, Site, of_kind
from engines.flower.test_roster import Hall, new_key
from fedmtl import Run
from fedmtl.engines.flower import engine as engine_module
from fedmtl.engines.flower import roster as roster_module
from fedmtl.engines.flower.addresses import Address
from fedmtl.engines.flower.engine import FlowerEngine
from fedmtl.engines.flower.enrolment import NoKeys
from fedmtl.engines.flower.fleet_api import FleetPort
from fedmtl.engines.flower.site_service import ModelNotSaved
from fedmtl.errors import WireError

LONG = 3600.0
FRAME = np.frombuffer(b"frame", np.uint8)


class End(Hall):
    """An engine at the end of a run, with nodes that want its model."""

    def __init__(self, folder, names) -> None:
        (folder / "spool").mkdir()
        enrolments = NoKeys(dict.fromkeys(names, ("t",)))
        self.engine = FlowerEngine(
            scorer=self, spool=folder / "spool", max_bytes=1 << 20,
            port=FleetPort(folder / "spool", Address("127.0.0.1", 0), enrolments),
            enrolments=enrolments, welcome="{}", judge=lambda hello, key: None,
            note=lambda note: None,
        )  # fmt: skip
        self.link, self.roster, self.notes = self.engine.link, self.engine._roster, []
        self.keys = {name: new_key() for name in names}
        self.nodes = {name: self.come(key, name, wants_model=True) for name, key in self.keys.items()}
        self.wait(lambda: set(self.roster.present()) == set(names))

    def close(self) -> None:
        """As a scorer."""

    def fetch(self, name: str) -> str:
        ((message,), _) = self.link.next_message(self.nodes[name])
        self.link.confirm(self.nodes[name], message.metadata.message_id)
        return message.metadata.message_id


@pytest.fixture
def open_end(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_module, "FAREWELL", 0.1)
    monkeypatch.setattr(engine_module, "LEAVE", 0.0)
    opened = []

    def make(*names) -> End:
        opened.append(End(tmp_path, names))
        return opened[-1]

    yield make
    for end in opened:
        end.engine.close()


def test_a_model_that_cannot_be_sent_costs_its_site_alone(open_end, monkeypatch):
    end = open_end("a", "b", "c")
    said: dict[int, list[str]] = {}
    send = end.link.send

    def noted(node_id, kind, words="", *more, **options):
        said.setdefault(node_id, []).append(f"{kind} {words}")
        message_id = send(node_id, kind, words, *more, **options)
        end.link.confirm(node_id, message_id)
        return message_id

    monkeypatch.setattr(end.link, "send", noted)

    def frame_of(client):
        if client == "a":
            raise WireError("a message of 9 bytes is over wire.max_bytes")
        if client == "b":
            raise OSError("/home/keeper/secret")
        return "words", FRAME

    unsent = end.engine.send_models(frame_of, LONG)
    assert unsent == {"a": "a message of 9 bytes is over wire.max_bytes", "b": "an error there (OSError)"}
    end.engine.say_goodbye("run is done", unsent)
    why = "; the model was not sent to this site: "
    assert [said[end.nodes[name]] for name in "abc"] == [
        [f"end run is done{why}a message of 9 bytes is over wire.max_bytes"],
        [f"end run is done{why}an error there (OSError)"],
        ["model words", "end run is done"],
    ]


@pytest.mark.parametrize(
    ("silence", "stalls", "patience", "why"),
    [
        (0.05, LONG, LONG, "it was not there when the run ended"),
        (LONG, 0.05, LONG, "it did not fetch it in time"),
        (LONG, LONG, 0.05, "it did not fetch it in time"),
    ],
)
def test_a_site_that_is_silent_or_stalls_does_not_hold_the_server(
    open_end, monkeypatch, silence, stalls, patience, why
):
    end = open_end("a")
    monkeypatch.setattr(roster_module, "SILENCE", silence)
    monkeypatch.setattr(engine_module, "MODEL_STALLS", stalls)
    began = time.monotonic()
    assert end.engine.send_models(lambda client: ("words", FRAME), patience) == {"a": why}
    assert time.monotonic() - began < 5
    assert end.link.next_message(end.nodes["a"]) == ([], []), "what it is said not to get must not come later"


@pytest.mark.parametrize("leaves", [False, True])
def test_a_site_that_leaves_or_comes_anew_is_not_taken_for_one_that_has_the_model(open_end, monkeypatch, leaves):
    end = open_end("a")
    send = end.link.send

    def sent(node_id, *arguments, **options):
        message_id = send(node_id, *arguments, **options)
        if leaves:
            end.link.deactivate_node(node_id)
        else:
            end.link.join(end.keys["a"])
        return message_id

    monkeypatch.setattr(end.link, "send", sent)
    why = "it was not there when the run ended" if leaves else "it connected again while the model was on its way"
    assert end.engine.send_models(lambda client: ("words", FRAME), LONG) == {"a": why}


@pytest.mark.slow
def test_a_run_is_done_where_its_model_is_larger_than_a_message_may_be(make_config, tmp_path):
    config = make_config(
        "tasks={sentiment: {train_samples: 40, val_samples: 24}}",
        "federation.clients_per_task=1",
        "training.num_rounds=1",
        "wire.max_bytes=100000",
    )
    server = Server(config)
    site = Site(server, tmp_path / "site", "sentiment_client", ("sentiment",), save_model=tmp_path / "saved")
    run = server.finish()
    outcome = site.finish()
    assert isinstance(outcome, ModelNotSaved)
    assert f"{run.name} is done; the model was not sent to this site: a message of" in str(outcome)
    assert not (tmp_path / "saved").exists()
    (end,) = of_kind(run, "end")
    assert end["status"] == "done"
    assert run.report.exists()
    assert Run(run.path).model().tasks == ("sentiment",)
    (remark,) = of_kind(run, "remark")
    assert remark["client"] == "sentiment_client"
    assert "the finished model was not sent to it: a message of" in remark["reason"]
