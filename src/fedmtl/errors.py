"""The exceptions a user may meet; each message says what is wrong, where, and what to do.

A message may quote a text, a label or a path and stays on its machine. `code`, `task` and `line` say the same without
words of anybody's data, and are all that a site tells a server (`federation/faults.py`).
"""

from __future__ import annotations

from typing import Self


class FedmtlError(Exception):
    """The base of every error we raise on purpose. A user sees its message as one line."""

    exit_code = 2
    code = "failed"
    task: str | None = None
    line: int | None = None

    def coded(self, code: str, task: str | None = None, line: int | None = None) -> Self:
        """The same error with a code of `federation/faults.py`, and where it arose."""
        self.code, self.task, self.line = code, task, line
        return self


class ConfigError(FedmtlError):
    """A config key is unknown, has a wrong value, or does not fit another one."""

    code = "config_unusable"


class DataError(FedmtlError):
    """A file, a column, a label or a text is not what the task needs."""

    code = "data_unusable"


class HubUnreachable(DataError):
    """A dataset of the hub cannot be loaded; `found` says which and why, without what to do instead."""

    code = "hub_unreachable"

    def __init__(self, found: str, instead: str) -> None:
        super().__init__(f"{found}; {instead}")
        self.found = found


class ModelError(FedmtlError):
    """An encoder cannot be found, built, or used the way the config asks."""

    code = "model_unusable"


class PolicyError(FedmtlError):
    """A site's policy, or what a job may be at all, forbids what the server wants; raised with a code."""


class RunNotFound(FedmtlError):
    """No run folder has that name."""


class WireError(FedmtlError):
    """Bytes that came over the wire are not a message of ours."""

    code = "message_unreadable"


class CannotContinue(FedmtlError):
    """The run has to end: too few clients are left, or every update was refused."""

    exit_code = 3


def needs_extra(what: str, package: str, extra: str) -> str:
    """The line for a package that is not installed: who needs it, and a command that installs it.

    fedmtl is in no registry, so the command is that of a checkout.
    """
    return (
        f"{what}: needs {package}, which is not installed; run `pip install -c constraints.txt '.[{extra}]'` in the"
        " folder of fedmtl's source"
    )
