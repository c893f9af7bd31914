"""All that a site sends, to hostile servers and in every way of failing, is searched for its texts, labels and paths.

One run: its server changes welcomes and jobs on their way to the sites, and every site stands behind a wire that keeps
what it sends. All of the sites' secrets have `zqxjwk` or another word of SECRETS in them.
"""

from __future__ import annotations

import json
import os
import queue
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.flower.deployment import Server, Site, of_kind
from engines.flower.tap import Tap, leaks
from fedmtl.config.file import load_config
from fedmtl.deploy.site_worker import SiteSettings, start_site
from fedmtl.engines.flower.audit import NAME, entries, verify
from fedmtl.engines.flower.calls import SiteJob
from fedmtl.engines.flower.link import Link
from fedmtl.engines.flower.site_service import CannotJoin
from fedmtl.engines.processes import Answer, WorkerPool
from fedmtl.federation import client as client_module
from fedmtl.federation.dispatch import Dispatch
from fedmtl.federation.faults import SENTENCES, UNREADABLE, Fault
from fedmtl.federation.messages import Job
from fedmtl.runs.events import FailureEvent, RemarkEvent
from fedmtl.runs.folder import RunFolder

SECRETS = ("zqxjwk", "haemoglobin", "unremarkable")
TASK = "tasks.notes={kind: classification, text: [message], label: topic, labels: [keep, drop]}"
# Sites that join, and what the server makes of their jobs.
JOINING = ("good", "steps", "pairs", "digest", "extra", "oom", "boom", "killed")
NUM_HOSTILE = 11
ENCODED = "model.server_model=random-1x32"


def write_notes(path: Path, header: str = "message\ttopic", **odd: str) -> Path:
    """Forty-eight notes, of which line 7 is as `odd` says."""
    lines = [header]
    for number in range(48):
        text = f"zqxjwk{number:02} haemoglobin {number} unremarkable zqxjwkword{number % 7}"
        lines.append(f"{text}\t{('keep', 'drop')[number % 2]}")
    if odd:
        text, label = lines[6].split("\t")
        lines[6] = f"{odd.get('text', text)}\t{odd.get('label', label)}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def told(words: str, change: Callable[[dict[str, Any]], None]) -> str:
    welcome = json.loads(words)
    change(welcome)
    return json.dumps(welcome)


def hostile_welcomes(elsewhere: Path) -> dict[str, tuple[str, Callable[[dict[str, Any]], None]]]:
    """By the name of the site that is sent it: the code it must answer with, and what the server changes."""

    def texts_as_labels(welcome: dict[str, Any]) -> None:
        welcome["config"]["tasks"]["notes"] |= {"label": "message", "labels": None}
        welcome["terms"]["labels"] = {}

    def texts_against_the_list(welcome: dict[str, Any]) -> None:
        welcome["config"]["tasks"]["notes"] |= {"text": ["topic"], "label": "message"}

    def text_as_both(welcome: dict[str, Any]) -> None:
        welcome["config"]["tasks"]["notes"] |= {"label": "message"}

    def source(welcome: dict[str, Any]) -> None:
        welcome["config"]["tasks"]["notes"]["source"] = {"train": str(elsewhere)}
        welcome["config"]["clients"]["source"] = {"tasks": ["notes"]}

    def client_source(welcome: dict[str, Any]) -> None:
        welcome["config"]["clients"]["client_source"] = {"tasks": ["notes"], "source": {"notes": str(elsewhere)}}

    def dataset(welcome: dict[str, Any]) -> None:
        welcome["config"]["tasks"]["notes"]["source"] = {"hub": str(elsewhere.parent)}
        welcome["config"]["clients"]["dataset"] = {"tasks": ["notes"]}

    def encoder(welcome: dict[str, Any]) -> None:
        welcome["config"]["model"] |= {"server_model": str(elsewhere.parent), "start_from": str(elsewhere.parent)}

    def teacher(welcome: dict[str, Any]) -> None:
        welcome["config"]["training"]["distillation"] = {"teacher": str(elsewhere.parent)}

    def run(welcome: dict[str, Any]) -> None:
        welcome["run"] = "../../zqxjwk-run"

    def rate(welcome: dict[str, Any]) -> None:
        welcome["config"]["training"]["learning_rate"] = 1e9

    def garbage(welcome: dict[str, Any]) -> None:
        welcome.clear()

    return {
        "texts_as_labels": ("labels_missing", texts_as_labels),
        "texts_against_the_list": ("label_unknown", texts_against_the_list),
        "text_as_both": ("policy_columns", text_as_both),
        "source": ("policy_source", source),
        "client_source": ("policy_source", client_source),
        "dataset": ("policy_source", dataset),
        "encoder": ("policy_encoder", encoder),
        "teacher": ("policy_teacher", teacher),
        "run": ("message_unreadable", run),
        "rate": ("policy_bounds", rate),
        "garbage": ("message_unreadable", garbage),
    }


def hostile_job(job: Job) -> Job:
    """What the server makes of the job of the site that is called so."""
    if job.client == "steps" and job.kind == "train":
        return replace(job, settings={**job.settings, "steps": 1, "batch_size": 1})
    if job.client == "pairs" and job.kind == "evaluate":
        return replace(job, settings={**job.settings, "share_pairs": True})
    if job.client == "digest":
        key = next(iter(job.weights))
        return replace(job, fixed={key.name: "../../zqxjwk-digest"})
    if job.client == "extra" and job.kind == "train":
        key = next(iter(job.weights))
        return replace(job, weights={**job.weights, key._replace(name="heads.notes.more"): torch.zeros(2)})
    return job


class Pool:
    """A site's worker; that of `killed` is gone when it comes to a job, and says so in words that quote a text."""

    def __init__(self, pool: WorkerPool, client: str) -> None:
        self._pool, self._client = pool, client

    def map(self, calls: list[Any], seconds: float) -> list[Answer]:
        if self._client == "killed" and isinstance(calls[0], SiteJob):
            return [Answer(0, error="its process ended with code -9 at zqxjwk00 haemoglobin")]
        return list(self._pool.map(calls, seconds))


class Private(Site):
    def pool(self) -> Any:
        return Pool(super().pool(), self.client)


@dataclass
class Harm:
    """A run and what was seen of it: outcomes by site, the codes each sent, and all bytes."""

    folder: Path
    run: RunFolder
    server: Server
    tap: Tap
    control: Tap
    elsewhere: Path
    outcomes: dict[str, Any] = field(default_factory=dict)
    said: dict[str, list[str]] = field(default_factory=dict)

    def reasons(self) -> list[str]:
        """All that the server says of its sites: failures, and of those that never joined remarks."""
        return [event.reason for event in self.server.events if isinstance(event, FailureEvent | RemarkEvent)]

    def decisions(self, client: str) -> list[str]:
        return [entry["decision"] for entry in entries(self.folder / client) if "decision" in entry]


def failing_files(folder: Path) -> dict[str, tuple[str, Path]]:
    """Sites whose own data is not what it should be: the code and the file."""
    swapped = write_notes(folder / "swapped.tsv", header="topic\tmessage")
    return {
        "swapped": ("label_unknown", swapped),
        "unknown": ("label_unknown", write_notes(folder / "unknown.tsv", label="zqxjwk-label")),
        "empty": ("text_empty", write_notes(folder / "empty.tsv", text=" ")),
        "columns": ("column_missing", write_notes(folder / "columns.tsv", header="zqxjwka\tzqxjwkb")),
        "missing": ("data_unusable", folder / "zqxjwk-missing.tsv"),
        "broken": ("data_unusable", folder / "broken.jsonl"),
    }


@pytest.fixture(scope="module")
def harm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zqxjwk-private")
    notes = write_notes(folder / "notes.tsv")
    elsewhere = write_notes(folder / "elsewhere" / "train.tsv")
    (folder / "broken.jsonl").write_text('{"message": "zqxjwk haemoglobin", "topic": \n')
    assert len(hostile_welcomes(elsewhere)) == NUM_HOSTILE
    clients = ", ".join(f"{name}: {{tasks: [notes]}}" for name in JOINING)
    config = load_config(
        None,
        [ENCODED, TASK, f"clients={{{clients}}}", f"output={folder / 'runs'}", "training.num_rounds=2",
         "model.pool=cls", "training.batch_size=8", "compute.device=cpu", "compute.workers=0",
         "federation.join_timeout=120", "federation.round_timeout=40"],
    )  # fmt: skip
    hostile = Hostile()
    with pytest.MonkeyPatch.context() as patch:
        hostile.take_over(patch)
        server = Server(config)
        tap, control = Tap(server.address), Tap(server.address)
        found = Harm(folder, RunFolder(folder), server, tap, control, elsewhere)

        def start(name: str, files: dict[str, str], through: Tap = tap) -> Private:
            behind = Server.__new__(Server)
            behind.address = through.address
            return Private(behind, folder / name, name, ("notes",), files=files)

        def finish(sites: list[Private]) -> None:
            for site in sites:
                found.outcomes[site.client], found.said[site.client] = site.finish(), site.said

        refusing = []
        for name, (_, change) in hostile_welcomes(elsewhere).items():
            is_without_file = name in ("source", "client_source", "dataset")
            refusing.append(start(name, {} if is_without_file else {"notes": str(notes)}))
            hostile.greet(change)
        finish([*refusing, *(start(name, {"notes": str(path)}) for name, (_, path) in failing_files(folder).items())])
        with pytest.MonkeyPatch.context() as leak:
            words = '{"code": "label_unknown", "words": "line 7: zqxjwk-label"}'
            leak.setattr(Fault, "model_dump_json", lambda self, **options: words)
            finish([start("control", {"notes": str(folder / "unknown.tsv")}, control)])
        joining = [start(name, {"notes": str(notes)}) for name in JOINING]
        try:
            found.run = server.finish()
        except queue.Empty:
            raise AssertionError([(site.client, site.outcome, site.said) for site in joining]) from None
        finish(joining)
    yield found
    tap.close()
    control.close()


class Hostile:
    """Changes what a server sends on its way: the welcome of a node, and every job."""

    def __init__(self) -> None:
        self._changes: dict[int, Callable[[dict[str, Any]], None]] = {}
        self._next: queue.Queue[Callable[[dict[str, Any]], None]] = queue.Queue()

    def greet(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Let the node that was started last have this welcome; returns when it was sent."""
        self._next.put(change)
        self._next.join()

    def take_over(self, patch: pytest.MonkeyPatch) -> None:
        send, make_job = Link.send, Dispatch.job

        def sent(link: Link, node_id: int, kind: str, words: str = "", **rest: Any) -> str:
            return send(link, node_id, kind, self._changed(node_id, words) if kind == "welcome" else words, **rest)

        patch.setattr(Link, "send", sent)
        patch.setattr(Dispatch, "job", lambda dispatch, *told: hostile_job(make_job(dispatch, *told)))
        patch.setattr(client_module, "_train", failing_training(client_module._train))

    def _changed(self, node_id: int, words: str) -> str:
        if node_id not in self._changes and len(self._changes) < NUM_HOSTILE:
            self._changes[node_id] = self._next.get(timeout=60)
            self._next.task_done()
        return told(words, self._changes.get(node_id, lambda welcome: None))


def failing_training(train: Callable[..., Any]) -> Callable[..., Any]:
    def failing(job: Job, site: Any) -> Any:
        if job.client == "oom":
            raise torch.OutOfMemoryError("tried to allocate zqxjwk03 haemoglobin")
        if job.client == "boom":
            raise KeyError("zqxjwk05 haemoglobin", str(site.folder))
        return train(job, site)

    return failing


def test_no_secret_of_a_site_is_on_the_line(harm):
    assert len(harm.tap.sent) > 100_000, "updates went through"
    assert b"label_unknown" in harm.tap.sent, "it is not encrypted, and can be searched"
    assert leaks(harm.tap.streams, [*SECRETS, str(harm.folder), "elsewhere/train.tsv"]) == []


def test_no_secret_of_a_site_reaches_what_the_server_shows(harm):
    folder, private = str(harm.folder), [secret for secret in SECRETS if secret != "zqxjwk"]
    for path in (harm.run.events, harm.run.report):
        # The run's own folder stands there, so the sites' names in it are looked for with what follows.
        assert leaks([path.read_bytes()], [*private, "zqxjwk0", f"{folder}/notes", f"{folder}/good"]) == [], path.name
    reasons = harm.reasons()
    assert reasons
    known = (*SENTENCES.values(), UNREADABLE)
    assert all(reason.endswith(known) for reason in reasons), reasons


def test_every_hostile_welcome_is_refused_with_its_code(harm):
    for name, (code, _) in hostile_welcomes(harm.elsewhere).items():
        assert isinstance(harm.outcomes[name], CannotJoin), (name, harm.outcomes[name])
        assert harm.decisions(name) == [f"refused: {code}"], name


def test_every_mistake_in_the_data_is_a_code_for_the_server_and_words_for_the_site(harm):
    for name, (code, path) in failing_files(harm.folder).items():
        assert harm.decisions(name) == [f"refused: {code}"], name
        assert str(path) in str(harm.outcomes[name]), "the site's own terminal says which file"
    assert "zqxjwk-label" in str(harm.outcomes["unknown"])
    reasons = harm.reasons()
    assert "left: notes, line 7: a label is not in the agreed list" in reasons
    assert "left: notes, line 7: a text is empty" in reasons


@pytest.mark.parametrize(
    ("client", "code"),
    [
        ("steps", "job_settings"),
        ("digest", "message_unreadable"),
        ("extra", "job_weights"),
        ("oom", "out_of_memory"),
        ("boom", "internal"),
        ("killed", "worker_ended"),
    ],
)
def test_a_job_that_is_not_done_is_a_code_at_the_server_and_the_site_goes_on(harm, client, code):
    assert harm.outcomes[client] == f"{harm.run.name} is done"
    assert f"refused: {code}" in harm.decisions(client)
    assert set(harm.server.failures()[client]) == {SENTENCES[code]}
    assert any(line.startswith("a job was not done: ") for line in harm.said[client])
    assert client not in {event["client"] for event in of_kind(harm.run, "update")}


def test_pairs_that_only_a_job_demands_do_not_leave(harm):
    assert "refused: policy_pairs" in harm.decisions("pairs")
    assert [event["round"] for event in of_kind(harm.run, "update") if event["client"] == "pairs"] == [1, 2]
    assert b'"pairs":[' not in harm.tap.sent
    assert leaks(harm.tap.streams, ['"pairs":[[']) == []


def test_no_file_is_written_outside_the_sites_folders(harm):
    assert not list(harm.folder.rglob("*zqxjwk-run*"))
    assert not list(harm.folder.rglob("*zqxjwk-digest*"))
    assert not list(harm.folder.parent.glob("zqxjwk-run*"))
    assert not list(harm.folder.parent.glob("zqxjwk-digest*"))


def test_the_records_are_whole_private_and_hold_no_secret(harm):
    for name in ("good", "swapped", "boom"):
        path = harm.folder / name / NAME
        assert verify(path).broken is None
        assert path.stat().st_mode & 0o077 == 0
        assert (harm.folder / name).stat().st_mode & 0o077 == 0
        assert leaks([path.read_bytes()], [*SECRETS, str(harm.folder)]) == []
    kinds = [(entry["way"], entry["kind"]) for entry in entries(harm.folder / "good")]
    assert kinds[:2] == [("in", "welcome"), ("out", "hello")]
    assert {("in", "job"), ("out", "update"), ("in", "end")} <= set(kinds)
    trained = [entry for entry in entries(harm.folder / "good") if entry.get("job") == "train"]
    assert [(entry["round"], entry["tasks"]) for entry in trained] == [(1, ["notes"]), (2, ["notes"])]
    assert all(entry["tensors"] > 3 and entry["values"] > 100 for entry in trained)


def test_the_search_finds_what_is_planted():
    import base64
    import zlib

    secret = b"a zqxJWK17 text"
    nested = json.dumps({"words": json.dumps({"text": secret.decode()})}).encode()
    twice = zlib.compress(b"head" + zlib.compress(nested) + b"tail")
    for planted in (secret, nested, twice, base64.b64encode(b"x" + secret.lower()), secret.lower().hex().encode(),
                    secret.decode().lower().encode("utf-16-le")):  # fmt: skip
        assert leaks([bytes(100) + planted + bytes(100)], SECRETS) == ["zqxjwk"], planted
    assert leaks([bytes(100) + b"zqxjw" + bytes(100)], SECRETS) == []


def test_a_site_that_sent_the_words_of_an_error_would_be_found(harm):
    """The control: a site behind a wire of its own, with a leak."""
    assert isinstance(harm.outcomes["control"], CannotJoin)
    assert leaks(harm.control.streams, SECRETS) == ["zqxjwk"]
    # And what is not exactly a record of ours never stands in the server's words.
    reasons = harm.reasons()
    assert reasons.count(f"left: {UNREADABLE}") == 1


def start_and_die(settings: SiteSettings) -> Callable[[Any], Any]:
    handle = start_site(settings)

    def handler(call: Any) -> Any:
        if isinstance(call, SiteJob):
            os.kill(os.getpid(), signal.SIGKILL)
        return handle(call)

    return handler


class Mortal(Site):
    """A site whose worker is a process that is killed at every job."""

    def pool(self) -> WorkerPool:
        settings = SiteSettings(
            self.client, self.tasks, self.folder, self.folder / "spool", self.files, device="cpu", policy=self.policy
        )
        return WorkerPool(start_and_die, settings, 1)


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_its_jobs_and_nothing_leaves(tmp_path):
    folder = tmp_path / "zqxjwk-private"
    notes = write_notes(folder / "notes.tsv")
    config = load_config(None, [ENCODED, TASK, "clients={a: {tasks: [notes]}, b: {tasks: [notes]}}", "model.pool=cls",
                                f"output={tmp_path / 'runs'}", "training.num_rounds=1", "compute.device=cpu",
                                "compute.workers=0"])  # fmt: skip
    server = Server(config)
    tap = Tap(server.address)
    behind = Server.__new__(Server)
    behind.address = tap.address
    sites = [kind(behind, folder / name, name, ("notes",), files={"notes": str(notes)})
             for kind, name in ((Site, "a"), (Mortal, "b"))]  # fmt: skip
    run = server.finish()
    assert [site.finish() for site in sites] == [f"{run.name} is done"] * 2
    tap.close()
    assert set(server.failures()["b"]) == {SENTENCES["worker_ended"]}
    assert leaks(tap.streams, [*SECRETS, str(folder)]) == []
