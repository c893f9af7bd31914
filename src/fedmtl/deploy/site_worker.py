"""The process of a site that has the text, and what a site's owner says of it.

Only this file is imported where the line to the server is; the rest loads in the worker, which ends with the process
that started it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedmtl.errors import FedmtlError
from fedmtl.federation.faults import is_safe_name
from fedmtl.federation.policy import Policy, read_policy

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


def describe_site(
    client: str,
    tasks: str,
    data: Sequence[str],
    policy: Path | None,
    *,
    folder: Path | None = None,
    model: str | None = None,
    device: str = "auto",
    save_model: Path | None = None,
    key: Path | None = None,
) -> SiteSettings:
    """Return the site of these options, which are those of `fedmtl client`, with what its policy says of its files."""
    names = tuple(dict.fromkeys(name.strip() for name in tasks.split(",") if name.strip()))
    for name in (client, *names):
        if not is_safe_name(name):
            raise FedmtlError(f"{name!r}: no name of a site or a task; use up to 64 letters, digits, `.`, `_` and `-`")
    rules = Policy() if policy is None else read_policy(policy)
    files, root = site_data(data, names)
    files |= policy_files(rules, names, files)
    site_folder = folder or Path("sites") / client
    absolute = None if key is None else key.absolute()
    return SiteSettings(
        client, names, site_folder, site_folder / "spool", files, root, model, device, rules, save_model, absolute
    )


def site_data(data: Sequence[str], tasks: tuple[str, ...]) -> tuple[dict[str, str], str | None]:
    """The site's files per task, or the folder of the built-in tasks."""
    files: dict[str, str] = {}
    root: str | None = None
    for entry in data:
        task, equals, path = entry.rpartition("=")
        if not Path(path).exists():
            raise FedmtlError(f"--data: {path}: no such file or folder")
        absolute = str(Path(path).absolute())
        if equals:
            files[task] = absolute
        elif Path(path).is_dir():
            root = absolute
        elif len(tasks) == 1:
            files[tasks[0]] = absolute
        else:
            raise FedmtlError(f"--data: {path} is of which task? write TASK={path}")
    for task in files:
        if task not in tasks:
            raise FedmtlError(f"--data: found a file for {task}; --tasks has {', '.join(tasks)}")
    return files, root


def policy_files(policy: Policy, tasks: tuple[str, ...], given: Mapping[str, str]) -> dict[str, str]:
    """The files that the policy names; --tasks and --data may not go beyond it."""
    for task in tasks:
        if policy.tasks and task not in policy.tasks:
            raise FedmtlError(f"--tasks: found {task}, the policy has {', '.join(policy.tasks)}")
    named = {task: entry.file for task, entry in policy.tasks.items() if task in tasks and entry.file is not None}
    for task, path in named.items():
        if task in given and Path(given[task]).resolve() != Path(path).resolve():
            raise FedmtlError(f"--data: {given[task]} is not the file that the policy names for {task}, {path}")
        if not Path(path).is_file():
            raise FedmtlError(f"{path}: no such file; the policy names it for {task}")
    return named
