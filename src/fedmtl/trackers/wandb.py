"""Weights & Biases (wandb.ai): a run of a project, sent to its server or written to files on this machine.

What the library collects by itself is switched off: code, commit, host, user, command line, packages, console output
and the machine's load. Of an offline run the library's own files are read back before more is written, since it writes
a new one in every session; a server says itself at which step a run goes on.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from fedmtl.runs.folder import RunFolder
from fedmtl.trackers.points import StoredOptions, without_secret

# LevelDB's log format: blocks of this size, in which a record has this header and is whole, first, middle or last.
BLOCK, HEADER = 32768, struct.Struct("<IHB")
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4
LABEL = 7


class Options(StoredOptions):
    project: str = Field("fedmtl", description="The project, which is made where it is missing.")
    entity: str | None = Field(None, description="The team or account; empty is your account's default.")
    address: str | None = Field(None, description="The server; empty is WANDB_BASE_URL, and without that wandb.ai.")
    mode: Literal["online", "offline"] = Field(
        "online", description="Send to the server, or write files that `wandb sync` sends later."
    )
    folder: str | None = Field(
        None, description="Where the library gets its folder `wandb`; empty is `trackers` in the run's folder."
    )

    @field_validator("address")
    @classmethod
    def _has_no_password(cls, address: str | None) -> str | None:
        return without_secret(address, "WANDB_API_KEY")


class WeightsAndBiases:
    def __init__(self, options: Options, run: RunFolder, id: str) -> None:
        os.environ["WANDB_ERROR_REPORTING"] = "false"
        import wandb

        folder = Path(options.folder).expanduser() if options.folder else run.path / "trackers"
        folder.mkdir(parents=True, exist_ok=True)
        self._before = _logged_offline(folder, id) if options.mode == "offline" else {}
        address = {"base_url": options.address} if options.address else {}
        settings = wandb.Settings(
            mode=options.mode,
            root_dir=str(folder.absolute()),
            run_id=id,
            # Offline, every session is a file of its own of the same run.
            resume="allow",
            silent=True,
            console="off",
            save_code=False,
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
            host="",
            program="",
            x_executable="",
            x_save_requirements=False,
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_transaction_log_flush_interval=0.5,
            **address,
        )
        self._run = wandb.init(project=options.project, entity=options.entity, name=run.name, settings=settings)
        self._artifact: Any = wandb.Artifact
        if options.mode == "online":
            self._before = {step: _Every() for step in range(self._run.starting_step)}

    def logged(self) -> Mapping[int, set[str]]:
        return self._before

    def describe(self, facts: Mapping[str, Any]) -> None:
        self._run.config.update(dict(facts), allow_val_change=True)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step, commit=True)

    def store(self, name: str, path: Path) -> None:
        artifact = self._artifact(f"{self._run.name}-{name}", type=name)
        if path.is_dir():
            artifact.add_dir(str(path))
        else:
            artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def finish(self, status: str, summary: Mapping[str, float | str], step: int) -> None:
        self._run.summary.update({**summary, "status": status})

    def close(self) -> None:
        self._run.finish()


class _Every(set[str]):
    """The metrics of a step of which only is known that it is there."""

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __contains__(self, name: object) -> bool:
        return True


def _logged_offline(folder: Path, id: str) -> dict[int, set[str]]:
    """The names of the metrics by step in all files that the library has written of a run."""
    found: dict[int, set[str]] = {}
    for path in sorted(folder.glob(f"wandb/*run-*-{id}/run-{id}.wandb")):
        for record in records_of(path):
            if record.WhichOneof("record_type") != "history":
                continue
            names = {item.key or ".".join(item.nested_key) for item in record.history.item}
            found.setdefault(record.history.step.num, set()).update(names)
    return found


def records_of(path: Path) -> Iterator[Any]:
    """The records of a file of the library, as its protocol buffers; one that was cut off by a kill ends it."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    position, parts = LABEL, b""
    while position + HEADER.size <= len(data):
        left = BLOCK - position % BLOCK
        if left < HEADER.size:
            position += left
            continue
        _, length, kind = HEADER.unpack_from(data, position)
        position += HEADER.size
        part = data[position : position + length]
        position += length
        if kind not in (WHOLE, FIRST, MIDDLE, LAST) or len(part) < length:
            return
        parts = part if kind in (WHOLE, FIRST) else parts + part
        if kind in (WHOLE, LAST):
            record = Record()
            record.ParseFromString(parts)
            yield record
