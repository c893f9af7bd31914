"""A site looks over its files before it joins a run; the result is for its terminal and its record, and never leaves.

The worker, which has the text, does the looking (`check_site`); the process with the line to the server gets counts and
sentences without a word of the data, and does not connect where the policy forbids it (`check_files`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fedmtl.deploy.site_worker import SiteSettings
from fedmtl.engines.flower.audit import Audit
from fedmtl.engines.flower.calls import Refused
from fedmtl.engines.processes import WorkerPool
from fedmtl.errors import FedmtlError, PolicyError
from fedmtl.federation.policy import TaskPolicy

if TYPE_CHECKING:
    from fedmtl.tasks.parts import Part, Split

LONGEST_CHECK = 3600.0


@dataclass(frozen=True)
class CheckCall:
    """The worker is to look over the site's files."""


@dataclass(frozen=True)
class SiteCheck:
    """What the worker found: sentences for the terminal, counts for the record, or why it could not look."""

    lines: tuple[str, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)
    problem: str | None = None


def check_site(settings: SiteSettings) -> SiteCheck:
    """Look over the files that the site's owner named; examples of the package or of the hub are not looked over."""
    # Only the worker loads what reads texts.
    from fedmtl.tasks.check import check_parts

    try:
        found = check_parts(list(_parts(settings)))
    except FedmtlError as error:
        return SiteCheck(problem=str(error))
    counts = {
        "rows": sum(part.rows for part in found.parts),
        "empty_texts": sum(part.empty_texts for part in found.parts),
        "repeated": sum(part.repeated for part in found.parts),
        "personal": found.personal_rows,
        "warnings": len(found.warnings),
    }
    return SiteCheck(tuple(f"{warning.where}: {warning.words}" for warning in found.warnings), counts)


def _parts(settings: SiteSettings) -> Iterator[Part]:
    from fedmtl.tasks.parts import make_part
    from fedmtl.tasks.sources import find_table, read_table, validation_tables

    for task in settings.tasks:
        files: list[tuple[Split, Path | None]] = []
        if task in settings.files:
            files = [("train", Path(settings.files[task]))]
        elif settings.root is not None:
            folder = Path(settings.root) / task
            files = [
                ("train", find_table(folder, ["train"])),
                *(("validation", path) for path in validation_tables(folder)),
            ]
        named = settings.policy.tasks.get(task, TaskPolicy())
        for split, path in files:
            if path is not None:
                yield make_part(read_table(path), named.text or (), named.label, split=split, task=task)


def check_files(pool: WorkerPool, settings: SiteSettings, say: Callable[[str], None], audit: Audit) -> None:
    """Have the worker look, say and record what it found, and raise where the policy lets the site not start."""
    if not settings.files and settings.root is None:
        return
    (answer,) = pool.map([CheckCall()], LONGEST_CHECK)
    found = SiteCheck(problem=answer.error) if answer.error is not None else answer.result
    if isinstance(found, Refused):
        # The look itself failed, with an error that nobody expected.
        found = SiteCheck(problem=found.words)
    most = settings.policy.max_personal_data
    if found.problem is not None:
        say(f"the files could not be checked: {found.problem}")
        audit.record("here", "check", b"", decision="unreadable")
        if most is not None:
            raise PolicyError(f"the policy limits personal data (max_personal_data), and {found.problem}")
        return
    for line in found.lines:
        say(f"warning: {line}")
    personal = found.counts["personal"]
    is_refused = most is not None and personal > most
    audit.record("here", "check", b"", decision="refused" if is_refused else "accepted", **found.counts)
    if is_refused:
        raise PolicyError(
            f"{personal} examples here have what looks like personal data, the policy allows {most}"
            " (max_personal_data); remove it from the texts, or raise the limit after you looked at them"
        )
