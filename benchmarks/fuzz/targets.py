"""Every decoder and reader as a function of bytes that may only raise a `FedmtlError`.

A target is what a stranger can reach: bytes from the network, or a file that somebody else wrote. Its function does
with what was accepted what the program goes on to do with it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedmtl.errors import FedmtlError
from fuzz.formats import Format, Raw

CORPUS = Path(__file__).parent / "corpus"
FOUND = "found-"
MEBIBYTE = 1 << 20

LOADED = (
    "fuzz.seeds",
    "pyarrow.parquet",
    "fedmtl.engines.flower.enrolment",
    "fedmtl.engines.flower.envelope",
    "fedmtl.engines.flower.fleet_api",
    "fedmtl.deploy.site_client",
    "fedmtl.federation.checkpoint",
    "fedmtl.federation.client_evaluation",
    "fedmtl.model.saved",
    "fedmtl.report.page",
    "fedmtl.runs.summary",
    "fedmtl.tasks.tokens",
    "transformers.models.bert.modeling_bert",
)

Run = Callable[[bytes], None]


@dataclass(frozen=True)
class Target:
    """`open` prepares whatever is needed once and gives the function that takes inputs.

    `expected` are the errors that an input may raise. `share` is its part of a total number of inputs. An input is a
    hang if it takes longer than `seconds`, a bomb if the process's peak grows by more than `memory` bytes over it, and
    a hundred for each byte of the input.
    """

    name: str
    open: Callable[[Path], Run]
    what: str
    format: Format = field(default_factory=Raw)
    expected: tuple[type[BaseException], ...] = (FedmtlError,)
    share: float = 1.0
    seconds: float = 5.0
    memory: int = 64 * MEBIBYTE

    def seeds(self) -> list[bytes]:
        """The whole and valid inputs in the repository, in the order of their names."""
        paths = sorted((CORPUS / self.name).glob("*"))
        return [path.read_bytes() for path in paths if not path.name.startswith(FOUND)]

    def corpus(self) -> list[bytes]:
        """The seeds, and inputs that failed once."""
        return [*self.seeds(), *(path.read_bytes() for path in sorted((CORPUS / self.name).glob(f"{FOUND}*")))]


def all_targets() -> dict[str, Target]:
    """Every target by name; what loads slowly is loaded by `open`."""
    from fuzz import from_files, from_network, from_tables, port

    targets = (*from_network.TARGETS, *port.TARGETS, *from_files.TARGETS, *from_tables.TARGETS)
    return {target.name: target for target in targets}


def load_everything() -> None:
    """Import what targets use, once, before processes are forked."""
    for name in LOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def choose(names: Sequence[str]) -> list[Target]:
    """The targets of these names, or of these first words of names; all for none."""
    known = all_targets()
    chosen = [target for name, target in known.items() if not names or name in names or name.split("-")[0] in names]
    unknown = [name for name in names if not any(name in (t.name, t.name.split("-")[0]) for t in chosen)]
    if unknown:
        raise SystemExit(f"--targets: no {', '.join(unknown)}; there are {', '.join(known)}")
    return chosen


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder in memory where the machine has one: inputs become files thousands of times a second."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="fedmtl-fuzz-", dir=memory if os.access(memory, os.W_OK) else None
    ) as folder:
        yield Path(folder)


def put_files(folder: Path, files: dict[str, bytes], allowed: Sequence[str]) -> None:
    """Write those files of an input that a reader looks for; the others are removed."""
    for name in allowed:
        path = folder / name
        if name in files:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(files[name])
        else:
            path.unlink(missing_ok=True)
