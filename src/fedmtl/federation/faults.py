"""Why a site cannot do what a server wants, as far as the server is to know: a code, a task and a line number.

A site that leaves because it cannot take part also gives its name, for a server that knows sites by no key.

The words of an error may quote a text, a label or a path, so they stay at the site. The server words a code from the
table here; whatever is not exactly such a record, a hostile site's free text among it, is `UNREADABLE`.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from fedmtl.errors import FedmtlError

# Of clients and tasks: they stand in file names, logs, tables and pages.
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
UNREADABLE = "failed without a readable reason"
MOST_LETTERS = 300

SENTENCES = {
    "failed": "the site could not do it; its terminal says why",
    "config_unusable": "the server's config cannot be used there",
    "task_unknown": "the site was started for a task that this run does not have; see its --tasks",
    "data_unusable": "a file of examples cannot be used",
    "hub_unreachable": "the dataset cannot be loaded there from the hub; --data gives the site a file instead",
    "column_missing": "the file lacks a column that the server's config names",
    "text_empty": "a text is empty",
    "label_unknown": "a label is not in the agreed list",
    "score_invalid": "a score is not a number in the agreed range",
    "labels_missing": "the server names no labels for the task, and a site tells none of its own",
    "model_unusable": "the encoder cannot be used there",
    "message_unreadable": "the server's message cannot be read there",
    "policy_tasks": "the site's policy does not have the task",
    "policy_columns": "the site's policy names other columns for the task",
    "policy_labels": "the site's policy names other labels or another score range for the task",
    "policy_source": "the site was given no file of the task, and opens none that a server names; it needs --data",
    "policy_encoder": "the site's policy does not let the server name this encoder; it may be given with --model",
    "policy_methods": "the site's policy allows no capability that is not part of fedmtl, unless it names it",
    "policy_teacher": "the site's policy names no teacher, and the site opens none that a server names",
    "policy_bounds": "a setting is beyond what a site takes from a server",
    "policy_min_examples": "the job would use fewer distinct examples than the site's policy allows",
    "policy_pairs": "the site's policy lets no predictions leave next to their labels",
    "policy_scores": "the site's policy lets no scores leave",
    "policy_privacy": "the site's policy requires protection of updates that the server's config does not give",
    "privacy_spent": "what may be told of an example there has been told; the site answers no more jobs of the task",
    "client_privacy_spent": "what a server may learn of the site as a whole is spent; it trains no more",
    "privacy_unreachable": "no noise reaches privacy.example.epsilon with the examples and rounds there are; a larger"
    " epsilon, fewer rounds or more examples there help",
    "privacy_beyond": "the site would spend more than the run states of all sites; a larger"
    " privacy.example.max_sampling_rate, or more examples there help",
    "policy_limit": "the site has done as many rounds or jobs as its policy allows",
    "job_client": "the job is for another client",
    "job_tasks": "the job is for tasks that the site does not have",
    "job_round": "the job's round is not due",
    "job_settings": "the job's settings are not those of the config that the site was welcomed with",
    "job_plan": "the job's sharing plan does not fit the config that the site was welcomed with",
    "job_weights": "the job's values are not those of the model",
    "exchange_refused": "an exchange of a capability broke a rule of it; the site's terminal says which",
    "policy_protection": "the site's policy requires a protection of updates that the server's config does not have",
    "training_failed": "training failed",
    "filter_failed": "a filter of its update failed there; the site's terminal says which",
    "diverged": "the loss became infinite or not a number; a smaller learning rate may help",
    "out_of_memory": "out of memory; a smaller batch_size or model.max_length may help",
    "worker_ended": "its worker process ended",
    "internal": "an unexpected error at the site; its terminal shows it",
}


def is_safe_name(name: str) -> bool:
    """Whether a client or a task may be called so."""
    return re.fullmatch(NAME, name) is not None


class Fault(BaseModel):
    """What crosses the line instead of an error's words."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    code: str
    task: Annotated[str, Field(pattern=NAME)] | None = None
    line: Annotated[int, Field(ge=1, lt=1 << 53)] | None = None
    client: Annotated[str, Field(pattern=NAME)] | None = None

    @field_validator("code")
    @classmethod
    def _is_known(cls, code: str) -> str:
        if code not in SENTENCES:
            raise ValueError("unknown code")
        return code

    def words(self) -> str:
        """The server's sentence for it."""
        parts = [part for part in (self.task, self.line and f"line {self.line}") if part]
        return f"{', '.join(parts)}: {SENTENCES[self.code]}" if parts else SENTENCES[self.code]


def fault_of(error: BaseException) -> Fault:
    """What may be known elsewhere of an error at this site, whatever its words are."""
    if isinstance(error, MemoryError):
        return Fault(code="out_of_memory")
    if not isinstance(error, FedmtlError):
        return Fault(code="internal")
    is_name = error.task is not None and is_safe_name(error.task)
    is_number = type(error.line) is int and error.line >= 1
    return Fault(
        code=error.code if error.code in SENTENCES else "failed",
        task=error.task if is_name else None,
        line=error.line if is_number else None,
    )


def read_fault(reason: object) -> Fault | None:
    """A site's reason; None, which is `UNREADABLE`, where it is not a record of ours."""
    if not isinstance(reason, str) or len(reason) > MOST_LETTERS:
        return None
    try:
        return Fault.model_validate_json(reason)
    except (ValidationError, ValueError, RecursionError):
        return None
