"""The engine between machines: Jobs to sites and Updates back, over Flower."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import numpy as np

from fedmtl.engines.flower.enrolment import Enrolments
from fedmtl.engines.flower.roster import Judge, Nodes, Note, Present, Roster
from fedmtl.engines.local import OpenJob, map_message, write_message
from fedmtl.engines.processes import too_late
from fedmtl.errors import WireError
from fedmtl.federation.handshake import Hello
from fedmtl.federation.messages import ClientId, ClientInfo, Failure, Job, Scorer, State, Update
from fedmtl.federation.wire import encode_job
from fedmtl.federation.wire.codecs import Bytes
from fedmtl.federation.wire.frame import MAX_HEADER

GLANCE = 0.2
# How long sites are given to hear that the run is over.
FAREWELL = 10.0
LEAVE = 1.0
# A site that lives and fetches no part of the finished model for so many seconds does not get it.
MODEL_STALLS = 60.0
GONE = "it was not there when the run ended"
# What an answer has beside its tensors: a table of them, counts and losses.
MARGIN = 4 << 20

Enough = Callable[[Mapping[ClientId, ClientInfo]], bool]


@dataclass
class _SentJob:
    """A job on its way; its frame stays in a file until the update comes, for a site that connects again."""

    open_job: OpenJob
    kind: str
    path: Path
    most_bytes: int
    coming: tuple[int, int] = (0, 0)
    message_id: str = ""


@dataclass(frozen=True)
class _SentModel:
    """The finished model on its way to a site."""

    site: Present
    message_id: str
    since: float


class Port(Protocol):
    """What sites come to; its nodes `stay` when a run is over, or end when they hear that it is."""

    @property
    def nodes(self) -> Nodes: ...

    @property
    def address(self) -> str: ...

    @property
    def stay(self) -> bool: ...

    def close(self) -> None: ...


class FlowerEngine:
    """Runs jobs at sites on other machines, which come to `port`; `scorer` scores on the server's examples."""

    def __init__(
        self,
        scorer: Scorer,
        spool: Path,
        max_bytes: int,
        port: Port,
        enrolments: Enrolments,
        welcome: str,
        judge: Judge,
        note: Callable[[Note], None],
    ) -> None:
        self._scorer, self._spool, self._max_bytes, self._note = scorer, spool, max_bytes, note
        self._enrolments = enrolments
        self._port, self.link = port, port.nodes
        self._roster = Roster(self.link, welcome, judge, enrolments)
        self._infos: dict[ClientId, tuple[Hello, dict[str, int], ClientInfo]] = {}
        self._is_enough: Enough = bool
        self._patience = 0.0

    @property
    def address(self) -> str:
        return self._port.address

    def clients(self) -> Mapping[ClientId, ClientInfo]:
        """The sites that are there now; waits for enough of them, as `before_a_round` says."""
        return self.wait_for(self._is_enough, self._patience)

    def before_a_round(self, is_enough: Enough, patience: float) -> None:
        """A round begins with enough sites, or after that many seconds."""
        self._is_enough, self._patience = is_enough, patience

    def wait_for(self, is_enough: Enough, patience: float) -> Mapping[ClientId, ClientInfo]:
        """The sites that are there, once they are enough or the seconds are over."""
        end = time.monotonic() + patience
        while True:
            self._pass_on_notes()
            there = {client: self._info(client, site) for client, site in self._roster.present().items()}
            if is_enough(there) or time.monotonic() >= end:
                return there
            self._wait(min(GLANCE, max(0.0, end - time.monotonic())))

    def left(self) -> Mapping[ClientId, str]:
        """The sites that cannot take part as they were started, with the reason; nobody has to wait for them."""
        return self._roster.left()

    def hellos(self) -> dict[ClientId, Hello]:
        """What every site that ever came last said."""
        return {client: site.hello for client, site in self._roster.everybody().items()}

    def run(self, jobs: Iterable[Job], deadline: float) -> Iterator[Update | Failure]:
        end = time.monotonic() + deadline
        open_jobs: dict[ClientId, _SentJob] = {}
        for job in jobs:
            open_jobs[job.client] = self._written(job)
            self._send(open_jobs[job.client])
            yield from self._answers(open_jobs)
        while open_jobs and time.monotonic() < end:
            for sent in open_jobs.values():
                self._send(sent)
            yield from self._answers(open_jobs)
            self._pass_on_notes()
            if open_jobs:
                self._wait(min(GLANCE, max(0.0, end - time.monotonic())))
        for client in sorted(open_jobs):
            yield self._late(open_jobs[client], deadline)

    def predict(self, state: State, batch_size: int) -> dict[str, tuple[np.ndarray, float]]:
        return self._scorer.predict(state, batch_size)

    def say_goodbye(self, words: str, unsent: Mapping[ClientId, str] = MappingProxyType({})) -> None:
        """Tell the sites that the run is over; those that are just away get a moment to come and hear it.

        `unsent` has the sites that wanted the finished model and do not get it, with the reason, which they hear too.
        """
        if self._port.stay:
            return
        sent: dict[ClientId, tuple[Present, str]] = {}
        end = time.monotonic() + FAREWELL
        while time.monotonic() < end:
            for client, site in self._roster.everybody().items():
                is_new = client not in sent or sent[client][0] != site
                if is_new and self._roster.may_take_part(client, site):
                    more = f"; the model was not sent to this site: {unsent[client]}" if client in unsent else ""
                    with suppress(KeyError):
                        sent[client] = (site, self.link.send(site.node_id, "end", words + more))
            if all(self.link.is_fetched(message_id) for _, message_id in sent.values()):
                break
            time.sleep(GLANCE / 4)
        # Who heard it takes leave; the port is open until then.
        end = time.monotonic() + LEAVE
        while time.monotonic() < end and not all(self.link.has_left(site.node_id) for site, _ in sent.values()):
            time.sleep(GLANCE / 20)

    def send_models(self, frame_of: Callable[[ClientId], tuple[str, Bytes]], patience: float) -> Mapping[ClientId, str]:
        """Send the finished model to the sites that requested it; return those that do not get it, with the reason.

        `frame_of` gives the words and the frame for a site. A site is waited for while it lives and fetches, and all of
        them together for `patience` seconds at most.
        """
        sent: dict[ClientId, _SentModel] = {}
        unsent: dict[ClientId, str] = {}
        for client, site in self._roster.everybody().items():
            if site.hello.wants_model and self._roster.may_take_part(client, site):
                try:
                    sent[client] = self._sent_model(client, site, frame_of)
                except Exception as error:
                    # The run is done: what is wrong with one message costs that message alone. The site hears why, and
                    # an error of another kind may name what is on this machine.
                    unsent[client] = (
                        str(error) if isinstance(error, WireError) else f"an error there ({type(error).__name__})"
                    )
        end = time.monotonic() + patience
        while sent:
            for client, model in list(sent.items()):
                why = self._why_not(client, model, end)
                if why is not None:
                    unsent[client] = why
                    self.link.close_message(model.message_id)
                if why is not None or self.link.is_fetched(model.message_id):
                    del sent[client]
            time.sleep(GLANCE / 4 if sent else 0)
        return unsent

    def _sent_model(
        self, client: ClientId, site: Present, frame_of: Callable[[ClientId], tuple[str, Bytes]]
    ) -> _SentModel:
        words, frame = frame_of(client)
        path = self._spool / f"model-{client}"
        write_message(path, frame)
        try:
            message_id = self.link.send(site.node_id, "model", words, path, about="the model")
        except KeyError:
            raise WireError(GONE) from None
        finally:
            path.unlink(missing_ok=True)
        return _SentModel(site, message_id, time.monotonic())

    def _why_not(self, client: ClientId, model: _SentModel, end: float) -> str | None:
        """Why a site does not get the model any more; None while it may, or when it has it."""
        node_id, now = model.site.node_id, time.monotonic()
        if self.link.activations[node_id] != model.site.coming:
            # What was on its way to the one before is not for this one.
            return "it connected again while the model was on its way"
        if self.link.is_fetched(model.message_id):
            return None
        if client not in self._roster.present():
            return GONE
        if now >= min(end, max(model.since, self.link.fetched.get(node_id, 0.0)) + MODEL_STALLS):
            return "it did not fetch it in time"
        return None

    def close(self) -> None:
        try:
            self._pass_on_notes()
        finally:
            self._roster.close()
            self._port.close()
            self._scorer.close()

    def _pass_on_notes(self) -> None:
        for note in self._roster.take_notes():
            self._note(note)

    def _wait(self, seconds: float) -> None:
        self.link.news.wait(seconds)
        self.link.news.clear()

    def _info(self, client: ClientId, site: Present) -> ClientInfo:
        bounds = {task: self._enrolments.most_examples(client, task) for task in site.hello.tasks}
        most = {task: bound for task, bound in bounds.items() if bound is not None}
        known = self._infos.get(client)
        if known is None or known[0] is not site.hello or known[1] != most:
            known = (site.hello, most, client_info(site.hello, most))
            self._infos[client] = known
        return known[2]

    def _written(self, job: Job) -> _SentJob:
        encoded = encode_job(job, self._max_bytes)
        path = self._spool / f"job-{job.kind}-{job.round:04d}-{job.client}"
        write_message(path, encoded)
        open_job = OpenJob.of(job, len(encoded))
        return _SentJob(open_job, job.kind, path, min(self._max_bytes, most_answer_bytes(job, open_job)))

    def _send(self, sent: _SentJob) -> None:
        """Send a job to the node of its site, once for every time the site connects."""
        site = self._roster.find(sent.open_job.client)
        if site is None or sent.coming == (site.node_id, site.coming):
            return
        if sent.message_id:
            self.link.close_message(sent.message_id)
            sent.message_id = ""
        if not self._roster.may_take_part(sent.open_job.client, site):
            return
        sent.coming = (site.node_id, site.coming)
        about = f"the job of round {sent.open_job.round}"
        with suppress(KeyError):
            # Else it has just gone, and gets the job when it comes again.
            sent.message_id = self.link.send(
                site.node_id, "job", frame=sent.path, most_bytes=sent.most_bytes, about=about
            )

    def _answers(self, open_jobs: dict[ClientId, _SentJob]) -> Iterator[Update | Failure]:
        for client in list(open_jobs):
            sent = open_jobs[client]
            answer = self._struck_off(sent) or (self._answer(sent) if sent.message_id else None)
            if answer is not None:
                del open_jobs[client]
                sent.path.unlink(missing_ok=True)
                yield answer

    def _struck_off(self, sent: _SentJob) -> Failure | None:
        """Fail the job of a site that is not enrolled any more, or that left, whatever it answered."""
        client = sent.open_job.client
        site, reason = self._roster.find(client), self._roster.left().get(client)
        if reason is None and (site is None or self._roster.may_take_part(client, site)):
            return None
        if sent.message_id:
            self.link.close_message(sent.message_id)
        return sent.open_job.failed("unenrolled" if reason is None else reason)

    def _answer(self, sent: _SentJob) -> Update | Failure | None:
        open_job = sent.open_job
        name = f"update-{sent.kind}-{open_job.round:04d}-{open_job.client}"
        try:
            envelope = self.link.take_answer(sent.message_id, name)
            if envelope is None:
                return None
            if envelope.error is not None:
                return open_job.failed(envelope.error)
            if envelope.frame is None:
                return open_job.failed("the message has no frame")
            return open_job.take(map_message(envelope.frame), self._max_bytes)
        except (WireError, OSError, ValueError) as error:
            return open_job.failed(str(error))
        finally:
            (self._spool / name).unlink(missing_ok=True)

    def _late(self, sent: _SentJob, deadline: float) -> Failure:
        if sent.message_id:
            self.link.close_message(sent.message_id)
        sent.path.unlink(missing_ok=True)
        return sent.open_job.failed(too_late(deadline))


def most_answer_bytes(job: Job, open_job: OpenJob) -> int:
    """Return the most bytes of a job's answer: its tensors as they are encoded, or a client's sums."""
    if job.kind == "evaluate":
        return MAX_HEADER + MARGIN
    # The entries of topk come with their indices.
    return open_job.most_bytes_up * (2 if job.codecs.up == "topk" else 1) + MARGIN


def client_info(hello: Hello, most: Mapping[str, int]) -> ClientInfo:
    """Return a site's counts from its hello, each cut to at most `most` examples of the task."""
    examples = {task: min(counts.examples, most.get(task, counts.examples)) for task, counts in hello.tasks.items()}
    return ClientInfo(
        examples,
        _rows(hello.rows),
        _rows(hello.evaluation_rows),
        {task: counts.tokens for task, counts in hello.tasks.items()},
        # Ranges of scores are counted for the record only.
        {
            task: _within(counts.labels, examples[task]) if counts.has_labels else []
            for task, counts in hello.tasks.items()
        },
        {task: min(counts.validation, most.get(task, counts.validation)) for task, counts in hello.tasks.items()},
    )


def _within(counts: list[int], most: int) -> list[int]:
    """Counts of labels that add up to no more than the examples they are of; their shares stay."""
    total = sum(counts)
    return counts if total <= most else [count * most // total for count in counts]


def _rows(rows: list[int] | None) -> np.ndarray | None:
    return None if rows is None else np.asarray(rows, dtype=np.int64)
