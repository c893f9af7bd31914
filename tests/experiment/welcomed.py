"""A site and a server's welcome and jobs to it, without a line between them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedmtl.config.file import load_config
from fedmtl.deploy.server import _for_sites, _prepare
from fedmtl.deploy.site_client import JoinedSite
from fedmtl.deploy.site_worker import SiteSettings
from fedmtl.deploy.terms import server_terms
from fedmtl.engines.flower.calls import Refused, SiteJob, WelcomeCall
from fedmtl.federation.dispatch import Dispatch
from fedmtl.federation.handshake import Hello, Welcome, read_hello
from fedmtl.federation.messages import Job, Update
from fedmtl.federation.policy import Policy
from fedmtl.federation.wire import decode_update, encode_job

NOTES = "tasks.notes={kind: classification, text: [message], label: topic, labels: [keep, drop]}"
GRADES = "tasks.grades={kind: regression, text: [message], label: grade, score_range: [0, 5]}"
SMALL = ("defaults=plain", "model.server_model=random-1x32", "model.pool=cls",
         "training.num_rounds=3", "training.batch_size=8",
         "compute.device=cpu", "compute.workers=0")  # fmt: skip


def write_notes(path: Path, number: int = 48, distinct: int | None = None) -> str:
    lines = ["message\ttopic\tgrade"]
    for line in range(number):
        text = f"note number {line % (distinct or number)} about something"
        lines.append(f"{text}\t{('keep', 'drop')[line % 2]}\t{line % 6}")
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@dataclass
class Meeting:
    """A server of this config meets a site; `welcome` is what it says unless a test changes it."""

    folder: Path
    overrides: tuple[str, ...] = (NOTES,)
    files: dict[str, str] = field(default_factory=dict)
    policy: Policy = field(default_factory=Policy)
    tasks: tuple[str, ...] = ("notes",)
    root: str | None = None

    def __post_init__(self) -> None:
        clients = f"clients={{a: {{tasks: [{', '.join(self.tasks)}]}}}}"
        config = load_config(None, [*SMALL, *self.overrides, clients, f"output={self.folder / 'runs'}"])
        self.prepared, _ = _prepare(config, bytes(32), lambda event: None)
        terms = server_terms(self.prepared.model, self.prepared.encoder.tokenizer, self.prepared.tasks)
        at_clients = self.prepared.evaluates_at_clients
        told = Welcome(
            run="ab12", config=_for_sites(self.prepared.config), evaluated=at_clients, max_bytes=1 << 30, terms=terms
        )
        self.welcome: dict[str, Any] = json.loads(told.model_dump_json())
        self.restart()

    def restart(self) -> None:
        own = self.folder / "site"
        self.settings = SiteSettings(
            "a", self.tasks, own, self.folder, self.files, self.root, device="cpu", policy=self.policy
        )
        self.site = JoinedSite(self.settings)

    def hello(self) -> Hello | Refused:
        answer = self.site(WelcomeCall(json.dumps(self.welcome)))
        return answer if isinstance(answer, Refused) else read_hello(answer)

    def job(self, kind: str = "train", round_number: int = 1, tasks: tuple[str, ...] | None = None) -> Job:
        """The job of an honest server."""
        hello = self.hello()
        assert isinstance(hello, Hello), hello
        server, evaluation = self.prepared.server, self.prepared.config.evaluation
        rows = hello.rows if kind == "train" else hello.evaluation_rows
        settings = server.settings.to_dict() if kind == "train" else {
            "batch_size": evaluation.batch_size, "share_pairs": evaluation.share_pairs}  # fmt: skip
        made = Dispatch(server).job(
            kind,  # type: ignore[arg-type]
            self.prepared.state, "a", tasks or self.tasks, None if rows is None else np.asarray(rows, dtype=np.int64),
            round_number, settings,
        )  # fmt: skip
        return replace(made, state_round=0)

    def do(self, job: Job) -> Update | Refused:
        """What the site makes of a job."""
        frame = self.folder / "frame.job"
        frame.write_bytes(encode_job(job).tobytes())
        answer = self.site(SiteJob(json.dumps(self.welcome), frame))
        return answer if isinstance(answer, Refused) else decode_update(answer.update.read_bytes())[0]

    def code(self, job: Job) -> str:
        """The code of a refusal, or `done`."""
        answer = self.do(job)
        return answer.fault.code if isinstance(answer, Refused) else "done"
