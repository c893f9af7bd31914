"""Targets that a stranger reaches over the network: frames, envelopes, hellos, welcomes, evaluation sums, requests."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from fedmtl import __version__
from fedmtl.errors import FedmtlError, WireError
from fuzz.formats import Bundle, Frame, Json, Raw, unbundle
from fuzz.mutate import mutate_bytes, mutate_json
from fuzz.targets import MEBIBYTE, Run, Target

LIMIT = MEBIBYTE
VERSION = b"@version@"
NUM_ROWS = 30_522
HEADS = (b"", b"0", b"-1", b"<0>", b"<1>,<2>", b"x", b"9" * 5000)
EXCEPTION = re.compile(r"\b[A-Z]\w*(Error|Exception)\W*$")


class Reached(FedmtlError):
    """Everything before the data was checked and accepted."""


def open_job(folder: Path) -> Run:
    from fedmtl.federation.wire import decode_job

    def run(data: bytes) -> None:
        job = decode_job(data, LIMIT)
        # What a site does with a job before it trains: the views of its tasks, its settings and its fixed values.
        job.plan.keys([key.name for key in job.weights], job.tasks, job.client)
        dict(job.settings).get("batch_size")
        assert all(isinstance(text, str) for pair in job.fixed.items() for text in pair)
        for extra in job.extra.values():
            for values in extra.tensors.values():
                assert all(value.shape is not None for value in values.values())

    return run


def open_update(folder: Path) -> Run:
    from fedmtl.federation.validate import expect, refusal
    from fedmtl.federation.wire import decode_update
    from fedmtl.federation.wire.messages import answer_bytes
    from fuzz.seeds import wire_job

    job = wire_job()
    expected, most = expect(job), answer_bytes(job)

    def run(data: bytes) -> None:
        update, seconds = decode_update(data, LIMIT, most)
        for _ in update.delta.values():
            pass
        refused = refusal(update, expected, 1e6)
        if refused is not None:
            raise WireError(refused)
        assert seconds == seconds
        assert all(bool(value.isfinite().all()) for value in update.delta.values())

    return run


class Objects(Bundle):
    """Flower's objects, each `type children length NUL body`; `<n>` stands for the hash of the n-th of them."""

    def __init__(self) -> None:
        super().__init__({str(number): FlowerObject() for number in range(8)})


class FlowerObject(Raw):
    """One of them: its head is words, its body JSON or protobuf."""

    def mutate(self, data: bytes, random: Any, others: Any) -> bytes:
        head, divider, body = data.partition(b"\0")
        chance = random.random()
        if chance < 0.3:
            words = head.split(b" ")
            words[random.randrange(len(words))] = random.choice(
                (b"", b"0", b"-1", b"<0>", b"<1>,<2>", b"x", b"9" * 5000)
            )
            head = b" ".join(words)
        elif chance < 0.35:
            head = mutate_bytes(head, random)
        elif chance < 0.7 and body[:1] in (b"{", b"["):
            body = mutate_json(body, random)
        else:
            body = mutate_bytes(body, random)
        return head + divider + body


def open_envelope_target(folder: Path) -> Run:
    from fedmtl.engines.flower.envelope import open_envelope

    def run(data: bytes) -> None:
        store: dict[str, bytes] = {}
        root = ""
        names: list[str] = []
        for content in unbundle(data).values():
            for number, name in enumerate(names):
                content = content.replace(b"<%d>" % number, name.encode())
            root = hashlib.sha256(content).hexdigest()
            store[root] = content
            names.append(root)
        pulled = itertools.count()

        def pull(object_id: str) -> bytes:
            # A site's object store has nothing twice; whoever asks for this many parts is in a loop.
            assert next(pulled) < 100_000, "an envelope is read without end"
            return store[object_id]

        envelope = open_envelope(root, pull, folder / "frame", LIMIT)
        assert envelope.frame is None or envelope.frame.stat().st_size <= LIMIT

    return run


def open_hello(folder: Path) -> Run:
    from fedmtl.federation.handshake import Terms, read_hello, refusal

    ours = Terms(
        version=__version__,
        tokenizer="ab" * 8,
        encoder="cd" * 8,
        labels={"sst2": ["negative", "positive"], "stsb": []},
    )
    # One is enrolled for a task that the config does not have.
    enrolled = {"clinic": ("sst2", "stsb"), "bank": ("qqp",)}

    def run(data: bytes) -> None:
        hello = read_hello(_words(data))
        for shown in (None, "clinic"):
            reason = refusal(hello, ours, NUM_ROWS, enrolled, shown)
        if reason is not None:
            raise WireError(reason)

    return run


def open_welcome(folder: Path) -> Run:
    from fedmtl.deploy import site_client as joined_site
    from fedmtl.deploy.site_worker import SiteSettings

    def reached(*given: Any, **options: Any) -> Any:
        raise Reached("data")

    settings = SiteSettings("clinic", ("sst2",), folder / "site", folder / "spool", {"sst2": str(folder / "mine.tsv")})

    def run(data: bytes) -> None:
        # What follows reads the site's data and builds its model: not the server's words any more.
        with patch.object(joined_site, "load_tasks", reached):
            # Not by calling the site, which answers whatever was raised.
            joined_site.JoinedSite(settings)._welcomed(_words(data))

    return run


def open_sums(folder: Path) -> Run:
    from fedmtl.runs.event_lines import to_line
    from fedmtl.tasks.metrics import evaluation_event, score, sums_from_dict
    from fuzz.seeds import evaluated_tasks, honest_sums

    tasks = evaluated_tasks()
    honest = {name: sums_from_dict(task, honest_sums()[name]) for name, task in tasks.items()}

    def run(data: bytes) -> None:
        answers = _header(data)
        if not isinstance(answers, Mapping):
            raise WireError("not a message")
        for name, values in answers.items():
            if name not in tasks:
                raise WireError("a task that there is not")
            decoded: Any = sums_from_dict(tasks[name], values)
            for sums in (decoded, honest[name] + decoded, decoded + honest[name], decoded + decoded):
                score(tasks[name], sums)
                to_line(evaluation_event(1, tasks[name], sums))

    return run


def open_evaluation(folder: Path) -> Run:
    from fedmtl.federation.client_evaluation import client_evaluator
    from fedmtl.federation.messages import ClientInfo, Failure, Job, Update
    from fedmtl.federation.wire import decode_update
    from fedmtl.runs.event_lines import to_line
    from fedmtl.tasks.metrics import evaluation_event
    from fuzz.seeds import NUM_EXAMPLES, evaluated_state, evaluating_server, honest_sums

    server, state = evaluating_server(), evaluated_state()
    given: dict[str, Update] = {}

    class Engine:
        """One honest client, and one that answers with the input."""

        def clients(self) -> dict[str, ClientInfo]:
            return {name: ClientInfo(NUM_EXAMPLES, num_validation=NUM_EXAMPLES) for name in ("honest", "other")}

        def run(self, jobs: Iterable[Job], deadline: float) -> Iterator[Update | Failure]:
            for job in jobs:
                honest = Update(job.round, job.client, job.tasks, {}, job.rows, NUM_EXAMPLES, {}, honest_sums())
                yield honest if job.client == "honest" else given["answer"]

    evaluate: Callable[..., Any] = client_evaluator(server, Engine())

    def run(data: bytes) -> None:
        given["answer"] = decode_update(data, LIMIT, LIMIT)[0]
        evaluation = evaluate(state)
        for name, sums in evaluation.sums.items():
            to_line(evaluation_event(1, server.tasks[name], sums, evaluation.clients[name]))
            assert "honest" in evaluation.clients[name]
            value = evaluation.scores[name].metrics[server.tasks[name].metric]
            assert value is None or -1.0 <= value <= 1.0, f"{name}: a score of {value}"
        for failure in evaluation.failures:
            # Any exception costs its client alone; that there was one is still a fault of ours.
            assert not EXCEPTION.search(failure.reason), failure.reason
            raise WireError(failure.reason)

    return run


def open_exchange(folder: Path) -> Run:
    """A client of a session with two others; `@a@` in an input is the advert of a, `@sealed a@` its share."""
    from fedmtl.federation.filters.protocol import ExchangeClient
    from fedmtl.methods.secure_client import answer_exchange
    from fedmtl.methods.secure_protocol import FILE, NAME
    from fedmtl.sharing.plan import Extra
    from fuzz.seeds import exchange_job

    def ask(client: str, values: Any) -> Any:
        job = exchange_job(client, values)
        return answer_exchange(job.extra[NAME], ExchangeClient(job, folder / client, ("layer",))).values

    session = "0" * 32
    adverts = {name: ask(name, {"step": "advertise", "session": session, "purpose": "train"}) for name in "abc"}
    before = (folder / "a" / FILE).read_bytes()
    units = {"all": 16.0}
    request = {"step": "share", "session": session, "roster": adverts, "task_weights": {"sst2": 1.0}, "units": units}
    sealed = {name: ask(name, request)["sealed"]["a"] for name in "abc"}
    shared = json.loads((folder / "a" / FILE).read_bytes())
    contribute = {"session": session, "sharers": ["a", "b", "c"]}
    after = json.dumps({**shared, "work": "0" * 64, "contribute": contribute}).encode()

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: filled(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [filled(inner) for inner in value]
        if isinstance(value, str) and value[:1] == "@":
            return adverts.get(value.strip("@"), sealed.get(value.strip("@").removeprefix("sealed "), value))
        return value

    def run(data: bytes) -> None:
        values = filled(_header(data))
        if not isinstance(values, dict):
            raise WireError("not the values of an exchange")
        (folder / "a" / FILE).write_bytes(after if values.get("step") == "unmask" else before)
        job = exchange_job("a", values)
        found = answer_exchange(Extra(values), ExchangeClient(job, folder / "a", ("layer",)))
        json.dumps(dict(found.values))

    return run


def _words(data: bytes) -> str:
    """Words as protobuf carries them: it refuses what is not UTF-8."""
    try:
        return data.replace(VERSION, __version__.encode()).decode()
    except UnicodeDecodeError as error:
        raise WireError("not text") from error


def _header(data: bytes) -> Any:
    """A value as a frame's header gives it: what is not JSON never comes this far."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise WireError("not a header") from error


TARGETS = (
    Target("wire-job", open_job, "a job's frame, then its plan, settings and masks", Frame(), share=14),
    Target("wire-update", open_update, "an update's frame, its tensors, the server's checks", Frame(), share=22),
    Target("envelope", open_envelope_target, "a Flower message, object by object", Objects(), share=12),
    Target("hello", open_hello, "a site's hello, then the server's judgement", Json(), share=12),
    Target("welcome", open_welcome, "the server's welcome at a site, up to its data", Json(), share=1),
    Target("exchange", open_exchange, "an exchange of secure aggregation at a client", Json(), share=2),
    Target("sums", open_sums, "evaluation sums, merged and scored", Json(), share=12),
    Target(
        "evaluation",
        open_evaluation,
        "an evaluation's frame, checked, merged and scored",
        Frame(),
        share=5,
    ),
)
