"""The process of a site that has the text, and what a site's owner says of it.

Only this file is imported where the line to the server is; the rest loads in the worker, which ends with the process
that started it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedmtl.federation.policy import Policy

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the system to kill this process when its parent is gone; where it cannot, closed pipes end it later."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass(frozen=True)
class SiteSettings:
    """A site as its owner describes it: which tasks, from which files, with which encoder, and where it keeps things.

    `files` are given per task; `root` is a folder of the built-in tasks. Without either, a task's examples are those
    in the package that the server's config deals to this client. `policy` is what the server may have of all this;
    `save_model` is the folder that gets the finished model. `key` is the file of the private key that the site is
    enrolled with; on loopback there is none.
    """

    client: str
    tasks: tuple[str, ...]
    folder: Path
    spool: Path
    files: Mapping[str, str] = field(default_factory=dict)
    root: str | None = None
    model: str | None = None
    device: str = "auto"
    policy: Policy = field(default_factory=Policy)
    save_model: Path | None = None
    key: Path | None = None


def start_site(settings: SiteSettings) -> Callable[[Any], Any]:
    """What the worker does with its calls."""
    from fedmtl.deploy.site_client import JoinedSite

    if multiprocessing.parent_process() is not None:
        die_with_parent()
    return JoinedSite(settings)
