"""A site's policy: what a server may have of it, in its owner's words, as a file that can be read and signed.

Only the record, its file and its sentences are here; `deploy/site_config.py` and
`deploy/job_rules.py` hold a server's welcome and jobs to it. Without a file the defaults hold, which are strict.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError, ValidationInfo, field_validator, model_validator

from fedmtl.config.errors import did_you_mean, shown
from fedmtl.config.file import expand
from fedmtl.config.kinds import Count, Empty, Number, OneOrSeveral, Positive, Section, Whole
from fedmtl.config.privacy import Delta
from fedmtl.config.yaml_text import parse_yaml, write_yaml
from fedmtl.errors import ConfigError
from fedmtl.federation.faults import is_safe_name

MAX_BYTES = 1 << 20
WIDTH = 100


class TaskPolicy(Section):
    """What a task's job may touch; whatever is left out is as the server's config and --data say."""

    file: str | None = Field(
        None, description="The file of this task's examples, relative to the policy; no other is opened for it."
    )
    text: Annotated[list[str] | None, OneOrSeveral] = Field(
        None, description="The text columns that may be trained on.", min_length=1, max_length=2
    )
    label: str | None = Field(None, description="The column that may serve as the label.")
    labels: list[Annotated[str, Field(coerce_numbers_to_str=True)]] | None = Field(
        None, description="The labels in order; a server with another list is refused.", min_length=2
    )
    score_range: tuple[Number, Number] | None = Field(None, description="Lowest and highest score of a regression.")


class CountsPolicy(Section):
    send: bool = Field(True, description="Whether they leave at all.")
    round_to: Count = Field(1, description="They are rounded up to a multiple of this; 1 sends them as they are.")


class ExampleCountsPolicy(Section):
    round_to: Count = Field(1, description="They are rounded up to a multiple of this; 1 sends them as they are.")


class SendPolicy(Section):
    prediction_pairs: bool = Field(
        False,
        description="Whether predictions may leave next to the true label of each validation example, where the"
        " server's config wants them (evaluation.share_pairs).",
    )
    scores: bool = Field(
        True,
        description="Whether sums over this site's validation examples may leave, where scoring is done at the sites."
        " They hold how often each label was predicted as which, so they also tell how many there are of each.",
    )
    losses: bool | None = Field(
        None,
        description="Whether the mean loss of each task's training leaves every round. It has no noise, so empty means:"
        " unless require.example_privacy is there.",
    )
    label_counts: CountsPolicy = Field(
        default_factory=CountsPolicy,
        description="How many training examples there are of each label, in the order of the server's list. The labels"
        " themselves never leave.",
    )
    example_counts: ExampleCountsPolicy = Field(
        default_factory=ExampleCountsPolicy,
        description="How many examples and tokens there are of each task; a mean needs them, so they always leave."
        " Sums of `scores` still hold the exact number of validation examples.",
    )
    token_rows: bool = Field(
        True,
        description="Whether the list of token rows that this site's texts use is sent beforehand, so that only those"
        " travel. The list tells the server the site's vocabulary. Without it the whole table travels, and the rows"
        " of an update that are not zero still tell which words the texts of that round use.",
    )


class SecureAggregationPolicy(Section):
    min_clients: Annotated[int, Field(ge=2)] = Field(
        3,
        description="The fewest clients whose updates may be summed and opened; the server's number counts where it is"
        " larger.",
    )
    peers: Annotated[dict[str, Annotated[str, Field(pattern=r"^[0-9a-f]{16,64}$")]], Empty] = Field(
        default_factory=dict,
        description="The other sites by name, each with the fingerprint of its key (`fedmtl certs node` prints it); no"
        " other key is taken for theirs. Without any, the first key that comes under a name is remembered, and another"
        " one is refused.",
    )


class ExamplePrivacyPolicy(Section):
    """The most that may be told of one example, over all runs of the site's folder."""

    max_epsilon: Positive = Field(
        8.0, description="The most that all jobs of a task may spend for one example, over all runs; then it refuses."
    )
    max_delta: Delta = Field(1e-5, description="The delta of (epsilon, delta); a config with a larger one is refused.")


class ClientPrivacyPolicy(Section):
    """The most that servers may learn of the site as a whole, over all runs of its folder."""

    max_epsilon: Positive = Field(
        8.0, description="The most that all rounds may spend for this site with all its examples, over all runs."
    )
    max_delta: Delta = Field(1e-5, description="The delta of (epsilon, delta); a config with a larger one is refused.")
    noise_at: Literal["clients", "server"] = Field(
        "clients",
        description="Whose noise counts: `clients` is noise that the sites add themselves, under masks; with `server`,"
        " noise that the server says it adds counts too, and each run counts with all of its rounds.",
    )


class RequirePolicy(Section):
    noise: Any = Field(
        None, description="An old name; noise on gradients is required by example_privacy, so anything here is refused."
    )
    example_privacy: ExamplePrivacyPolicy | None = Field(
        None,
        description="Every example's gradient is clipped and has noise (privacy.example of the server), or jobs"
        " are refused; `{}` is epsilon 8 at delta 1e-5, empty is not required.",
    )
    client_privacy: ClientPrivacyPolicy | None = Field(
        None,
        description="Sums of updates are clipped and have noise (privacy.client of the server), or jobs are refused;"
        " `{}` is epsilon 8 at delta 1e-5 with noise that the sites add, empty is not required.",
    )
    secure_aggregation: SecureAggregationPolicy | None = Field(
        None,
        description="Updates and scores that the server opens only in sums (privacy.secure_aggregation of its config);"
        " `true` or a section with what is to hold, and a server without it is refused.",
    )
    masking: Any = Field(
        None, description="An old name; sums are required by secure_aggregation, so anything here is refused."
    )

    @field_validator("secure_aggregation", mode="before")
    @classmethod
    def _is_a_section(cls, value: Any) -> Any:
        return {True: {}, False: None}[value] if isinstance(value, bool) else value

    @field_validator("noise", "masking")
    @classmethod
    def _has_a_name(cls, value: Any, info: ValidationInfo) -> Any:
        if value not in (None, False):
            named = {"noise": "`example_privacy: {max_epsilon: 8}`", "masking": "`secure_aggregation: true`"}
            raise ValueError(f"write {named[info.field_name or 'noise']} instead")
        return None


class Policy(Section):
    """All that a site's owner decides; the defaults hold for a site without a file."""

    tasks: Annotated[dict[str, TaskPolicy], Empty] = Field(
        default_factory=dict,
        description="The tasks this site may train, with their file, columns and labels; without any, those of --tasks,"
        " with the columns that the server's config names in the files of --data.",
    )
    min_examples: Count = Field(
        32,
        description="A job that would use fewer distinct examples of a task is refused; where the site has fewer in"
        " all, it must use all of them.",
    )
    max_rounds: Whole = Field(
        1000, description="After this many rounds of training, over all runs of this site's folder, jobs are refused."
    )
    max_jobs: Whole = Field(
        10_000, description="After this many jobs, training and scoring together, over all runs, jobs are refused."
    )
    max_configs: Whole = Field(
        20,
        description="How many different configs of servers this site answers, over all runs of its folder: each may"
        " show other examples, or more of them. The same config again, after a lost line or a restart, does not count.",
    )
    repeat_rounds: Whole = Field(
        1, description="How many rounds a resumed server may go back behind the last one that this site trained."
    )
    max_personal_data: Whole | None = Field(
        None,
        description="The site does not start where more of its examples than this have what looks like personal data"
        " (`fedmtl check`); without a number it warns on its terminal. Texts are read as far as `tasks` names their"
        " columns, otherwise all columns but the label.",
    )
    send: SendPolicy = Field(default_factory=SendPolicy, description="What may leave besides updates and losses.")
    encoders: list[str] = Field(
        default_factory=list,
        description="Names of encoders on the hub that a server's config may choose; tiny and random-LxH always may,"
        " and a folder is given with --model.",
    )
    hub_datasets: list[str] = Field(
        default_factory=list, description="Names of datasets on the hub that a server's config may deal to this site."
    )
    teacher: str | None = Field(
        None,
        description="Folder of the finished model that a server's config may have this site learn from, relative to"
        " the policy; without it, training.distillation is refused.",
    )
    methods: list[str] = Field(
        default_factory=list,
        description="Names of capabilities of other packages, installed here, that a server's config may switch on;"
        " those of fedmtl itself always may.",
    )
    require: RequirePolicy = Field(default_factory=RequirePolicy, description="Protection that updates must have.")

    @model_validator(mode="after")
    def _names(self) -> Policy:
        for name in self.tasks:
            if not is_safe_name(name):
                raise ValueError(f"{shown(name)} is no name of a task")
        return self

    @property
    def sends_losses(self) -> bool:
        """Whether mean losses leave: they have no noise, which `require.example_privacy` demands of what leaves."""
        return self.require.example_privacy is None if self.send.losses is None else self.send.losses

    def words(self) -> str:
        """What this policy lets leave, as one line for whoever starts the site."""
        send = self.send
        counts = send.label_counts
        labels = "" if not counts.send else f", numbers of labels{_rounded(counts.round_to)}"
        losses = ", losses" if self.sends_losses else ""
        leaves = f"updates{losses}, numbers of examples{_rounded(send.example_counts.round_to)}{labels}"
        leaves += ", token rows (they show the vocabulary)" if send.token_rows else ""
        leaves += ", scores" if send.scores else ""
        leaves += ", predictions with labels" if send.prediction_pairs else ""
        never = "texts never do" if send.prediction_pairs else "a text or an example's label never does"
        masked = self.require.secure_aggregation
        leaves += "" if masked is None else f"; updates and scores only in sums of {masked.min_clients} sites or more"
        most = self.max_personal_data
        personal = "" if most is None else f"; at most {most} examples with what looks like personal data"
        return (
            f"policy: {leaves} may leave; {never};"
            f" jobs of {self.min_examples} distinct examples or more, at most {self.max_rounds} rounds{personal}"
        )


def _rounded(step: int) -> str:
    return "" if step == 1 else f" (rounded up to {step}s)"


def round_up(count: int, step: int) -> int:
    """The next multiple: a count that is checked against a rounded one is never above it."""
    return -(-count // step) * step


def read_policy(path: Path) -> Policy:
    """The policy in a file, its paths made absolute; anything wrong is a ConfigError that names the key."""
    # A pipe would be waited for.
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path}: is no file; write one with `fedmtl policy init`")
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); write one with `fedmtl policy init`") from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path}: is longer than {MAX_BYTES} bytes; is it a policy?")
    try:
        raw = parse_yaml(data.decode("utf-8-sig"), where=str(path))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})") from None
    if raw is not None and not isinstance(raw, dict):
        raise ConfigError(f"{path}: found {shown(raw)}, a policy is sections of `key: value` lines")
    try:
        policy = Policy.model_validate(raw or {})
    except ValidationError as error:
        raise ConfigError(f"{path}: {_first_mistake(error)}") from None
    try:
        return _with_absolute_paths(policy, path.parent.absolute())
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _with_absolute_paths(policy: Policy, folder: Path) -> Policy:
    def absolute(name: str | None, *key: str) -> str | None:
        return None if name is None else str(folder / expand(name, key))

    tasks = {
        name: task.model_copy(update={"file": absolute(task.file, "tasks", name, "file")})
        for name, task in policy.tasks.items()
    }
    return policy.model_copy(update={"tasks": tasks, "teacher": absolute(policy.teacher, "teacher")})


def _first_mistake(error: ValidationError) -> str:
    details = error.errors(include_url=False)
    # A mistyped key is why another one is missing.
    first = min(details, key=lambda each: each["type"] != "extra_forbidden")
    where = ".".join(str(part) for part in first["loc"]) or "the policy"
    more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    if first["type"] == "extra_forbidden":
        return f"{where}: unknown key; {did_you_mean(first['loc'][-1], _keys_beside(first['loc']))}{more}"
    said = first["msg"].removeprefix("Value error, ")
    return f"{where}: found {shown(first['input'])}; {said[:1].lower()}{said[1:]}{more}"


def _keys_beside(location: tuple[Any, ...]) -> list[str]:
    section: type[BaseModel] = Policy
    for part in location[:-1]:
        inner = TaskPolicy if part == "tasks" else getattr(section.model_fields.get(part), "annotation", None)
        section = inner if isinstance(inner, type) and issubclass(inner, BaseModel) else section
    return list(section.model_fields)


EXAMPLE = """\
  complaints:
    file: complaints.tsv
    text: [message]
    label: topic
    labels: [billing, delivery, other]"""


def policy_text(policy: Policy | None = None) -> str:
    """A policy as YAML, each line under the sentence that says what it does."""
    head = "What this site lets a server have of it; `fedmtl client --policy FILE` holds the server to it."
    return "\n".join([*_comment(head, 0), "", *_lines(policy or Policy(), 0)]) + "\n"


def _lines(section: BaseModel, depth: int) -> list[str]:
    lines: list[str] = []
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        lines += _comment(field.description or "", depth)
        if isinstance(value, BaseModel):
            lines += [f"{'  ' * depth}{name}:", *_lines(value, depth + 1)]
        else:
            plain = {key: each.model_dump() for key, each in value.items()} if name == "tasks" else value
            lines += textwrap.indent(write_yaml({name: plain}).rstrip("\n"), "  " * depth).split("\n")
            if name == "tasks" and not value:
                lines += [f"# {line}".rstrip() for line in ("for example", "tasks:", *EXAMPLE.split("\n"))]
        lines += [""] if depth == 0 else []
    return lines


def _comment(words: str, depth: int) -> list[str]:
    margin = "  " * depth + "# "
    return textwrap.wrap(words, WIDTH, initial_indent=margin, subsequent_indent=margin)
