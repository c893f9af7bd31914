"""A Flower app's two ends over a Grid in this process: what a stock SuperLink does is done by `SmallLink`."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Error, Message, RecordDict

from engines.flower.deployment import of_kind
from fedmtl.config.file import dump_config, load_config
from fedmtl.deploy.flower_app import NodeConfig, answer, client_app, lead, node_numbers
from fedmtl.deploy.flower_project import write_project
from fedmtl.deploy.server import saved_endpoint
from fedmtl.engines.flower import grid as grid_module
from fedmtl.engines.flower.audit import verify
from fedmtl.engines.flower.private import TaskIdentity
from fedmtl.errors import FedmtlError
from fedmtl.experiment.run import start_run
from fedmtl.federation.server import RoundFailed
from fedmtl.runs.folder import RunFolder

SUPERLINK = 1
TWO = "clients={a: {tasks: [sentiment]}, b: {tasks: [sentiment]}}"


@dataclass
class SmallLink:
    """Nodes with their configs, whose ClientApp runs when a reply is pulled; `before` may do away with a node first."""

    nodes: dict[int, dict[str, Any]]
    before: Callable[[SmallLink, Message], bool] = lambda link, message: False
    crashed: tuple[int, str] = (0, "")
    pushed: dict[str, Message] = field(default_factory=dict)
    answered: list[tuple[int, str]] = field(default_factory=list)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = []
        for message in messages:
            name = f"message-{len(self.pushed)}"
            message.metadata.__dict__["_message_id"] = name
            self.pushed[name] = message
            names.append(name)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [reply for name in sorted(message_ids) if (reply := self._reply(self.pushed[name])) is not None]

    def _reply(self, message: Message) -> Message | None:
        node_id = message.metadata.dst_node_id
        if self.before(self, message):
            return None
        if node_id not in self.nodes:
            return self._from(SUPERLINK, Message(Error(code=3, reason="Node unavailable"), reply_to=message))
        if (node_id, message.metadata.group_id) == self.crashed:
            return self._from(node_id, Message(Error(code=1, reason="<class 'X'>:<'a text'>"), reply_to=message))
        self.answered.append((node_id, message.metadata.message_type))
        context = Context(1, node_id, self.nodes[node_id], RecordDict(), {})
        return self._from(node_id, client_app()(message, context))

    @staticmethod
    def _from(node_id: int, reply: Message) -> Message:
        reply.metadata.__dict__["_src_node_id"] = node_id
        return reply


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(grid_module, "GLANCE", 0.01)
    monkeypatch.setattr(grid_module, "NODES_EVERY", 0.01)
    # Flower's process of an app says it; messages have it.
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, SUPERLINK
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def config(make_config, tmp_path):
    small = make_config(TWO, "training.num_rounds=2", "compute.workers=0", "model.server_model=random-1x16",
                        "federation.round_timeout=20", "federation.join_timeout=20", "evaluation.every=2")  # fmt: skip
    small = small.model_copy(update={"tasks": {"sentiment": small.tasks["sentiment"]}})
    (tmp_path / "config.yaml").write_text(dump_config(small))
    return small


@pytest.fixture
def node(tmp_path):
    def make(client: str, **more: str) -> dict[str, str]:
        return {"client": client, "tasks": "sentiment", "folder": str(tmp_path / client), "device": "cpu", **more}

    return make


def led(tmp_path: Path, link: SmallLink, **given: str) -> RunFolder:
    lead(tmp_path / "config.yaml", link, {"name": "app", "set": "", "resume": "", "output": "", "nodes": ""} | given)
    return RunFolder(tmp_path / "runs/app")


def digest(run: RunFolder) -> str:
    (end,) = of_kind(run, "end")[-1:]
    sha: str = end["weights_sha256"]
    return sha


@pytest.fixture
def alone(config):
    return digest(start_run(config, "alone"))


def test_an_app_gives_the_weights_of_one_machine_and_sites_keep_their_records(alone, node, tmp_path):
    link = SmallLink({7: node("a"), 8: node("b")})
    run = led(tmp_path, link)
    assert digest(run) == alone
    assert of_kind(run, "failure") == []
    # A hello and a job for each of two rounds; the run is over without a word more.
    assert sorted(link.answered) == [(7, "query"), (7, "train"), (7, "train"), (8, "query"), (8, "train"), (8, "train")]
    for name in ("a", "b"):
        found = verify(tmp_path / name)
        # The hello's two lines, and two for each round.
        assert (found.lines, found.broken) == (6, None)
    with pytest.raises(FedmtlError, match="was led by a Flower app; go on with flwr run"):
        saved_endpoint(run)


@pytest.mark.slow
@pytest.mark.parametrize("comes_back_as", [7, 9])
def test_a_node_that_dies_with_a_job_and_comes_back_gets_it_again(comes_back_as, alone, node, tmp_path):
    """As the same node (Flower's keys), or as another one that shows that its folder is the same."""
    died = []

    def dies(link: SmallLink, message: Message) -> bool:
        if died == [] and message.metadata.message_type == "train" and message.metadata.dst_node_id == 7:
            died.append(link.nodes.pop(7))
            threading.Timer(0.2, link.nodes.__setitem__, (comes_back_as, died[0])).start()
        return False

    link = SmallLink({7: node("a"), 8: node("b")}, dies)
    run = led(tmp_path, link)
    assert digest(run) == alone
    assert of_kind(run, "failure") == []
    assert link.answered.count((comes_back_as, "train")) == 2


def test_a_node_that_comes_anew_while_the_old_one_is_listed_is_known_by_its_folder(alone, node, tmp_path):
    """A killed SuperNode is listed for a minute, and gets no answer; its next one has another number."""

    def silent(link: SmallLink, message: Message) -> bool:
        if message.metadata.dst_node_id == 7 and message.metadata.message_type == "train":
            link.nodes[9] = link.nodes[7]
            return True
        return False

    run = led(tmp_path, SmallLink({7: node("a"), 8: node("b")}, silent))
    assert digest(run) == alone
    assert of_kind(run, "failure") == []


def test_another_folder_does_not_take_a_name(alone, node, tmp_path):
    """A node that says it is a, with another folder, while a is there."""
    link = SmallLink({7: node("a"), 8: node("b")})

    def comes(link: SmallLink, message: Message) -> bool:
        if message.metadata.message_type == "train":
            link.nodes[9] = node("a", folder=str(tmp_path / "false"))
            # Jobs are answered once the newcomer has said its name: the run is not over before.
            return (9, "query") not in link.answered
        return False

    link.before = comes
    run = led(tmp_path, link)
    assert digest(run) == alone
    reasons = [event["reason"] for event in of_kind(run, "remark")]
    assert [reason for reason in reasons if "another process is here as a" in reason]
    assert (9, "train") not in link.answered


# Values and states that stay at a site lie in its folder between the processes; exchanges of masks too.
STAYS = {
    "kept": [
        "sharing.rules=[{heads.*: client}, {'*': all}]",
        "evaluation.where=clients",
        "wire.up=topk",
        "wire.topk_share=0.2",
        "training.keep_optimizer=true",
    ],
    "masked": ["privacy.secure_aggregation={}", "federation.vocabulary_slices=false", "evaluation.where=clients"],
}


@pytest.mark.slow
@pytest.mark.parametrize("what", STAYS)
def test_what_a_site_keeps_between_messages_is_in_its_folder(what, make_config, node, tmp_path):
    clients = ", ".join(f"{name}: {{tasks: [sentiment]}}" for name in "abcd")
    config = make_config(f"clients={{{clients}}}", "tasks={sentiment: {train_samples: 160, val_samples: 24}}",
                         "compute.workers=0", "training.num_rounds=2", *STAYS[what])  # fmt: skip
    config = config.model_copy(update={"tasks": {"sentiment": config.tasks["sentiment"]}})
    (tmp_path / "config.yaml").write_text(dump_config(config))
    wanted = digest(start_run(config, "alone"))
    run = led(tmp_path, SmallLink({number: node(name) for number, name in enumerate("abcd", start=7)}))
    assert digest(run) == wanted
    assert of_kind(run, "failure") == []


def test_numbers_say_which_node_may_join_as_whom(node, tmp_path, config):
    link = SmallLink({7: node("b"), 8: node("b", folder=str(tmp_path / "other"))})
    with pytest.raises(RoundFailed):
        led(tmp_path, link, nodes="a=7,b=9", set="federation.join_timeout=1")
    said = [json.dumps(event) for event in of_kind(RunFolder(tmp_path / "runs/app"), "failure")]
    assert [words for words in said if "says it is b, its key is a's" in words]


def test_a_policy_is_in_force_and_a_crash_costs_its_contribution(node, tmp_path, config):
    policy = tmp_path / "policy.yaml"
    policy.write_text("max_rounds: 1\n")

    link = SmallLink({7: node("a", policy=str(policy)), 8: node("b"), 9: node("c")}, crashed=(8, "2"))
    with pytest.raises(RoundFailed):
        led(tmp_path, link)
    failures = [(event["round"], event["client"], event["reason"]) for event in
                of_kind(RunFolder(tmp_path / "runs/app"), "failure")]  # fmt: skip
    assert (2, "a", "the site has done as many rounds or jobs as its policy allows") in failures
    assert (2, "b", grid_module.CRASHED) in failures


@pytest.mark.slow
def test_a_run_that_failed_is_resumed_by_a_new_flwr_run(alone, node, tmp_path):
    def all_go(link: SmallLink, message: Message) -> bool:
        if message.metadata.group_id == "2":
            link.nodes.clear()
        return False

    short = "federation.round_timeout=2 federation.join_timeout=2"
    with pytest.raises(RoundFailed):
        led(tmp_path, SmallLink({7: node("a"), 8: node("b")}, all_go), set=short)
    lead(tmp_path / "config.yaml", SmallLink({17: node("a"), 18: node("b")}), {"resume": str(tmp_path / "runs/app")})
    assert digest(RunFolder(tmp_path / "runs/app")) == alone
    with pytest.raises(FedmtlError, match="resume takes no set and no name"):
        lead(tmp_path / "config.yaml", SmallLink({}), {"resume": "app", "name": "other"})


def test_keys_that_flower_passes_on_are_checked(tmp_path):
    with pytest.raises(FedmtlError, match=r"--run-config: rounds: .*the keys are output, name, set, resume, nodes"):
        lead(tmp_path / "config.yaml", SmallLink({}), {"rounds": 3})
    with pytest.raises(FedmtlError, match=r"--node-config: tasks: Field required"):
        NodeConfig.read({"client": "a"}, "--node-config")
    # At a site it is an answer: nothing is opened, and what leaves is a code.
    found = answer(lambda folder, most: pytest.fail("opened"), {"client": "a", "save_model": "x"})
    assert json.loads(found.fault or "") == {"code": "failed", "client": "a"}
    found = answer(lambda folder, most: pytest.fail("opened"), {"client": "../a", "tasks": "x"})
    assert json.loads(found.fault or "") == {"code": "failed"}
    assert node_numbers("a=7, b=8") == {"a": 7, "b": 8}
    for wrong in ("a", "a=x", "a=\u00b2", "a=" + "1" * 5000, "a=1,a=2", "a=1,b=1"):
        with pytest.raises(FedmtlError, match="write NAME=NUMBER"):
            node_numbers(wrong)


@pytest.mark.parametrize(
    ("error", "code"), [(OSError("no space for /home/a/private"), "internal"), (MemoryError(), "out_of_memory")]
)
def test_no_word_of_an_unexpected_error_leaves_a_site(error, code, node, capsys):
    """Flower would send the words of an exception that comes out of the app."""

    def opened(folder: Path, most: int) -> Any:
        raise error

    found = answer(opened, node("a"))
    assert json.loads(found.fault or "") == {"code": code, "client": "a"}
    assert type(error).__name__ in capsys.readouterr().out


def test_a_project_is_a_few_lines_and_its_config_is_the_given_one(config, tmp_path):
    assert write_project(tmp_path / "my_app", tmp_path / "config.yaml") == ["a", "b"]
    assert load_config(tmp_path / "my_app/config.yaml") == config
    assert sum(len(path.read_text().splitlines()) for path in (tmp_path / "my_app").glob("*.py")) < 20
    assert '--port 9101 --node-config \'client="b" tasks="sentiment"\'' in (tmp_path / "my_app/README.md").read_text()
    assert len(write_project(tmp_path / "demo", None)) == 6
    with pytest.raises(FedmtlError, match="is there already"):
        write_project(tmp_path / "demo", None)
