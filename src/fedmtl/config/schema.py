"""Every setting, with its default and one sentence on what it does. Nothing else defines a default.

A rule that needs nothing but settings is a validator of the section that has them all, so a config meets every rule
however it is made. `file` reads and writes YAML; a task's defaults come from the table of built-in tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, field_validator, model_validator

from fedmtl.config.errors import HERE, WrongKey, did_you_mean, shown
from fedmtl.config.kinds import (
    Count,
    Decay,
    Empty,
    Fraction,
    Minority,
    Name,
    NonNegative,
    Positive,
    Section,
    Share,
    Whole,
    check_names,
)
from fedmtl.config.methods import (
    AdaptersConfig,
    DistillationConfig,
    LoraConfig,
    PruningConfig,
    SmartConfig,
    TaskWeightingConfig,
)
from fedmtl.config.privacy import PrivacyConfig
from fedmtl.config.sharing import SharingConfig, group_members
from fedmtl.config.tasks import ClientConfig, DataConfig, Pair, PartitionConfig, Pool, PoolWindows, TaskConfig

Mode = Literal["federated", "federated_single_task", "centralized", "centralized_single_task", "local"]
Level = Literal["all", "group", "task", "client", "fixed"]
TaskSchedule = Literal["even", "joint", "epoch", "random", "round_robin", "proportional", "annealed", "temperature"]


class WindowsConfig(Section):
    """Texts with more tokens than a sequence are read in several, which overlap or lie end to end."""

    length: Count | None = Field(
        None, description="Tokens of a window with its special ones: model.max_length by another name."
    )
    stride: Count | None = Field(
        None,
        description="How many tokens after the one before a window begins; empty is end to end, as is what would leave"
        " a gap.",
    )
    most: Count = Field(8, description="Windows of a text at most; what comes behind the last is cut.")
    pool: PoolWindows = Field(
        "mean",
        description="How the vectors of a text's windows become one: their mean, the largest of each feature (max), or"
        " a mean with weights that each task learns (attention). Words have theirs from one window.",
    )


class ModelConfig(Section):
    server_model: str = Field(
        "tiny",
        description="The shared encoder: tiny, which is in the box, a folder, a hub name, or random-LxH: a new BERT,"
        " L layers, H wide.",
    )
    client_model: str | None = Field(
        None,
        description="The guide's key; must equal server_model: encoders that are averaged must be equal.",
    )
    initial: Literal["pretrained", "random"] = Field(
        "pretrained",
        description="Start from the encoder's own weights, or from random ones of the same shape.",
    )
    pool: Pool = Field(
        "auto",
        description="How tokens become one vector: the encoder's pooler, the first position (cls), the mean;"
        " auto takes the pooler where the encoder has one, the mean otherwise.",
    )
    pair: Pair = Field(
        "cross",
        description="Two texts in one pass, A [SEP] B (cross), or each alone and then compared (dual).",
    )
    max_length: Count = Field(128, description="Tokens per text (both texts of a cross pair together); longer is cut.")
    windows: WindowsConfig | None = Field(
        None,
        description="Read longer texts in windows of that many tokens; `{}` turns it on with its defaults, empty cuts.",
    )
    head_dropout: Fraction = Field(0.1, description="Dropout in front of every head.")
    encoder_dropout: Fraction | None = Field(
        None, description="Dropout inside the encoder; empty keeps what the encoder's own config says."
    )
    lora: LoraConfig | None = Field(
        None, description="Low-rank matrices added to the encoder's layers, which then stay as they are; empty is none."
    )
    adapters: AdaptersConfig | None = Field(
        None, description="Small layers of each task's own beside the encoder's (PALs); empty is none."
    )
    start_from: str | None = Field(
        None,
        description="Folder of a finished run, or its model/, whose encoder and heads a new run starts with; the"
        " encoder must have the shape of server_model. Empty starts with server_model and fresh heads.",
    )

    @model_validator(mode="before")
    @classmethod
    def _has_windows_of_its_length(cls, value: Any) -> Any:
        windows = value.get("windows") if isinstance(value, dict) else None
        given = windows.get("length") if isinstance(windows, dict) else None
        return {"max_length": given, **value} if isinstance(given, int) else value

    @model_validator(mode="after")
    def _has_one_length(self) -> Self:
        windows = self.windows
        if windows is not None and windows.length not in (None, self.max_length):
            raise WrongKey(
                "windows.length",
                f"found {windows.length}, {HERE}max_length is {self.max_length}; they are the same, so leave one out",
            )
        if windows is not None and windows.stride is not None and windows.stride > self.max_length:
            raise WrongKey(
                "windows.stride",
                f"found {windows.stride}, a window has {self.max_length} tokens; write that many or less",
            )
        return self

    @model_validator(mode="after")
    def _has_one_encoder(self) -> Self:
        client, server = self.client_model, self.server_model
        if client is not None and client != server:
            raise WrongKey(
                "client_model",
                f"found {shown(client)}, {HERE}server_model is {shown(server)};"
                " encoders that are averaged must be equal, so give both the same value or leave client_model out",
            )
        return self


class TrainingConfig(Section):
    num_rounds: Whole = Field(10, description="Rounds of the federation.")
    local_epochs: Count = Field(1, description="Passes over its own examples a client makes in a round.")
    local_steps: Count | None = Field(None, description="Batches per client and round, instead of local_epochs.")
    batch_size: Count = Field(32, description="Examples per step.")
    min_steps: Count | None = Field(
        None,
        description="Steps on a task that a pass at a client has at least: where its examples make fewer, its batches"
        " are smaller, down to 8. Empty is no rule.",
    )
    learning_rate: Positive = Field(5e-5, description="Step size of the clients' optimizer.")
    head_rate: Positive = Field(
        1.0,
        description="What a head's step size is multiplied by; a fresh head on a pretrained encoder wants 10 or more.",
    )
    optimizer: Literal["adamw", "sgd"] = Field("adamw", description="The clients' optimizer.")
    momentum: Fraction = Field(0.0, description="Momentum of sgd.")
    betas: tuple[Decay, Decay] = Field((0.9, 0.999), description="Moment decays of adamw.")
    epsilon: Positive = Field(1e-8, description="Denominator guard of adamw.")
    weight_decay: NonNegative = Field(0.01, description="On matrices only; never on token tables, norms and biases.")
    max_grad_norm: NonNegative = Field(1.0, description="Gradients are clipped to this norm; 0 is off.")
    schedule: Literal["constant", "linear", "cosine", "step"] = Field(
        "constant", description="How the learning rate falls over all rounds."
    )
    warmup_rounds: NonNegative = Field(0.0, description="Rounds, or part of one, over which it rises from 0.")
    keep: Literal["last", "best"] = Field(
        "last",
        description="The round whose model a run ends with: its last, or the one with the best overall score (for a"
        " task that was stopped early, its best round).",
    )
    step_rounds: Count = Field(10, description="With `step`: rounds between two drops.")
    step_factor: Fraction = Field(0.1, description="With `step`: what each drop multiplies by.")
    task_weight_in: Literal["averaging", "loss"] = Field(
        "averaging",
        description="Where tasks.<name>.weight counts: in the server's mean, or in the client's loss.",
    )
    proximal: NonNegative = Field(
        0.0, description="FedProx's mu: how hard a client is held near the weights it received."
    )
    logit_adjustment: NonNegative = Field(
        0.0,
        description="How far a client's loss allows for shares of labels that are not the federation's: 0 is not at"
        " all, 1 in full.",
    )
    keep_optimizer: bool | None = Field(
        None,
        description="Keep a client's optimizer state between rounds; empty is yes where nothing is averaged"
        " (centralized and local), no in a federation.",
    )
    task_schedule: TaskSchedule = Field(
        "even",
        description="How a client with several tasks mixes them: each spread evenly over the epoch (even), one batch of"
        " each in every step (joint), in turn (round_robin), or drawn: per pass (epoch), per batch with equal"
        " chances (random), by examples N (proportional), N to a falling power (annealed) or N^(1/T) (temperature).",
    )
    anneal: Fraction = Field(
        0.8, description="With `annealed`: how far the power of N falls from 1, from the first round to the last."
    )
    task_temperature: Positive = Field(2.0, description="With `temperature`: T; 1 is proportional, large is random.")
    gradients: Literal["sum", "pcgrad"] = Field(
        "sum",
        description="What a joint step does with its tasks' gradients: add them up, or first take out of each what"
        " points against another (PCGrad).",
    )
    loss_weighting: Literal["fixed", "uncertainty"] = Field(
        "fixed", description="Weigh losses by tasks.<name>.weight, or by a variance learnt per task, in its head."
    )
    smart: SmartConfig | None = Field(
        None, description="Adversarial smoothness, SMART; `{}` turns it on with its defaults, empty is off."
    )
    distillation: DistillationConfig | None = Field(
        None, description="Learn from a finished model while federating; empty is off."
    )
    pruning: PruningConfig | None = Field(
        None, description="Prune the smallest weights while training; `{}` turns it on with its defaults, empty is off."
    )

    @model_validator(mode="after")
    def _warms_up_within_its_rounds(self) -> Self:
        if self.warmup_rounds > self.num_rounds:
            raise WrongKey(
                "warmup_rounds",
                f"found {self.warmup_rounds:g}, it must be at most {HERE}num_rounds, which is {self.num_rounds}",
            )
        return self

    @model_validator(mode="after")
    def _prunes_within_its_rounds(self) -> Self:
        if self.pruning is not None:
            rounds, first = self.pruning.rounds, self.pruning.start_round
            if first + rounds - 1 > self.num_rounds:
                raise WrongKey(
                    "pruning.rounds",
                    f"found {rounds} from start_round {first}, that is up to round {first + rounds - 1};"
                    f" {HERE}num_rounds is {self.num_rounds}",
                )
        return self

    @model_validator(mode="after")
    def _compares_tasks_of_one_step(self) -> Self:
        if self.gradients == "pcgrad" and self.task_schedule != "joint":
            raise WrongKey(
                "gradients",
                f"pcgrad compares the tasks of one step, {HERE}task_schedule is {self.task_schedule};"
                " write `task_schedule: joint`",
            )
        return self


class ServerOptimizerConfig(Section):
    kind: Literal["none", "fedavgm", "fedadam", "fedyogi"] = Field(
        "none", description="What the server does with the mean update: add it, or take it as a gradient."
    )
    learning_rate: Positive = Field(1.0, description="The server's step size.")
    momentum: Fraction = Field(0.9, description="fedavgm's momentum; beta1 of fedadam and fedyogi.")
    beta2: Fraction = Field(0.99, description="Second-moment decay of fedadam and fedyogi.")
    tau: Positive = Field(1e-3, description="Adaptivity of fedadam and fedyogi: the denominator's floor.")


Baseline = Literal["constant", "tfidf", "frozen", "alone", "single"]
Average = Literal["weighted", "uniform", "tasks"]


# Rules in the package that have the option `hostile`, and its value where it is empty: one client of three.
HOSTILE_RULES = ("trimmed_mean", "multi_krum")
HOSTILE = 0.34


class RuleConfig(Section):
    """How updates become one; a name by itself is its `rule`."""

    rule: Name = Field(
        "mean",
        description="Their mean; the mean of updates clipped to the median norm of the last round (clipped_mean) or"
        " around the last round's step (centered_clipping); within each task the coordinate median"
        " (coordinate_median), the mean without the extremes (trimmed_mean) or of the clients nearest to each other"
        " (multi_krum); or a rule that another package adds.",
    )
    hostile: Minority | None = Field(
        None,
        description="With `trimmed_mean` and `multi_krum`: the share of a task's clients that may be hostile, which the"
        f" rule leaves out; empty is {HOSTILE}, one of three.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_a_name(cls, value: Any) -> Any:
        return {"rule": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _has_options_of_its_rule(self) -> Self:
        if self.hostile is not None and self.rule not in HOSTILE_RULES:
            raise WrongKey(
                "hostile",
                f"found {self.hostile:g}, but {HERE}rule is {self.rule}, which has no such option;"
                f" {' and '.join(HOSTILE_RULES)} have it",
            )
        return self


# Keys that stand under `aggregation` and stood beside it once; both are read.
MOVED: dict[tuple[str, ...], tuple[str, ...]] = {
    ("federation", key): ("federation", "aggregation", key) for key in ("average", "max_share")
}


def _text_too(schema: dict[str, Any]) -> None:
    """A rule may be its name in a file, and what stood beside it once may still stand there."""
    properties = schema["properties"]
    if "scopes" in properties:
        values = properties["scopes"]
        values["additionalProperties"] = {"anyOf": [{"type": "string"}, values["additionalProperties"]]}
    if "aggregation" in properties:
        inner = properties["aggregation"]
        inner["anyOf"] = [{"type": "string"}, {"$ref": inner.pop("$ref")}]
        words = "Stands under `aggregation` now; it is read here too."
        properties |= {key: {"description": words, "deprecated": True} for *_, key in MOVED}


class AggregationConfig(RuleConfig):
    model_config = ConfigDict(json_schema_extra=_text_too)

    average: Average = Field(
        "weighted",
        description="Clients count by their examples (weighted), all the same (uniform), or by their examples within a"
        " task, tasks alike (tasks).",
    )
    max_share: Share | None = Field(
        None,
        description="The largest share of any scope's mean that one client may have, by the examples it declared when"
        " it joined; empty is no limit. Where clients are too few for that share, all of them count alike.",
    )
    scopes: Annotated[dict[str, RuleConfig], Empty] = Field(
        default_factory=dict,
        description="Other rules for some scopes, by pattern over `all`, `group:NAME` and `task:NAME`, such as"
        " `task:*: coordinate_median`; the first that matches counts.",
    )

    def rules(self) -> dict[str, RuleConfig]:
        """Every rule that is named, by its key in a config."""
        inner = {f"federation.aggregation.scopes.{pattern}": rule for pattern, rule in self.scopes.items()}
        return {"federation.aggregation": self, **inner}

    def rule_of(self, scope: str) -> str:
        """The name of the rule that a scope is combined by."""
        matching = (rule.rule for pattern, rule in self.scopes.items() if fnmatchcase(scope, pattern))
        return next(matching, self.rule)

    def looks_at_updates(self) -> dict[str, str]:
        """The rules that look at the updates of single clients, by their key: all but the mean.

        Whatever makes single updates unreadable, or acts on the mean by itself, refuses these by name.
        """
        return {key: rule.rule for key, rule in self.rules().items() if rule.rule != "mean"}


def with_moved_keys(federation: Mapping[str, Any]) -> dict[str, Any]:
    """The unchecked section `federation` with `average` and `max_share` under `aggregation`, where they belong."""
    given = dict(federation)
    aggregation = given.get("aggregation")
    if isinstance(aggregation, str):
        aggregation = {"rule": aggregation}
    moved = {key: given.pop(key) for *_, key in MOVED if key in given}
    if not moved:
        return {**given, "aggregation": aggregation} if aggregation is not None else given
    if aggregation is not None and not isinstance(aggregation, Mapping):
        # What is wrong with it is for its section to say.
        return given
    inner = dict(aggregation or {})
    for key, value in moved.items():
        if key in inner and inner[key] != value:
            raise WrongKey(
                key,
                f"found {shown(value)}, but {HERE}aggregation.{key} is {shown(inner[key])}; keep the latter alone",
            )
        inner[key] = value
    return {**given, "aggregation": inner}


class FederationConfig(Section):
    model_config = ConfigDict(json_schema_extra=_text_too)
    also_read: ClassVar[tuple[str, ...]] = tuple(key for *_, key in MOVED)

    clients_per_task: Count = Field(1, description="Clients made for each task where `clients` names none.")
    aggregation: AggregationConfig = Field(
        default_factory=AggregationConfig,
        description="How updates become one, scope by scope, and how much each client counts in it; a name by itself is"
        " its `rule`. `average` and `max_share` may also stand here, as they once did.",
    )
    server_optimizer: ServerOptimizerConfig = Field(default_factory=ServerOptimizerConfig)
    clients_per_round: Count | None = Field(None, description="Clients sampled for a round; empty is all of them.")
    min_clients: Count = Field(1, description="Fewer accepted updates than this in a round ends the run.")
    min_clients_per_task: Whole = Field(
        0, description="As min_clients, for every task that is trained in the round; 0 lets a head wait for its sites."
    )
    max_update_norm: Positive | None = Field(None, description="An update with a larger norm than this is refused.")
    round_timeout: Positive = Field(3600.0, description="Seconds until a silent client counts as failed.")
    join_timeout: Positive = Field(
        3600.0,
        description="Seconds `fedmtl server` waits for sites: before round 1 all who did not leave, then min_clients.",
    )
    vocabulary_slices: bool = Field(True, description="Send only the token rows a client's texts use; exact.")
    task_weighting: TaskWeightingConfig = Field(default_factory=TaskWeightingConfig)

    @model_validator(mode="before")
    @classmethod
    def _reads_moved_keys(cls, value: Any) -> Any:
        return with_moved_keys(value) if isinstance(value, Mapping) else value

    @property
    def average(self) -> Average:
        return self.aggregation.average

    @property
    def max_share(self) -> float | None:
        return self.aggregation.max_share

    @model_validator(mode="after")
    def _samples_enough_clients(self) -> Self:
        if self.clients_per_round is not None and self.clients_per_round < self.min_clients:
            raise WrongKey(
                "clients_per_round",
                f"found {self.clients_per_round}, it must be at least {HERE}min_clients, which is {self.min_clients}",
            )
        return self


class WireConfig(Section):
    down: Literal["fp32", "fp16", "int8"] = Field(
        "fp32", description="How weights travel to clients: exact (fp32), or in half or a quarter of the bytes."
    )
    up: Literal["fp32", "fp16", "int8", "topk"] = Field(
        "fp32", description="How updates travel to the server; topk sends only the largest entries."
    )
    topk_share: Share = Field(0.05, description="With `topk`: the share of a matrix's entries that is sent.")
    error_feedback: bool = Field(
        True, description="Clients add what the encoding of an update lost to their next one (int8, topk, fp16)."
    )
    max_bytes: Count = Field(
        2**34, description="A larger message is neither sent nor read, nor one that would take more once decoded."
    )


class EvaluationConfig(Section):
    every: Count = Field(1, description="Evaluate after every n-th round (and the last one).")
    where: Literal["auto", "server", "clients"] = Field(
        "auto",
        description="Score on the server's validation data, or at the clients; auto is the server unless"
        " a parameter stays at its client.",
    )
    batch_size: Count = Field(64, description="Examples per forward pass when scoring.")
    share_pairs: bool = Field(
        False,
        description="Let clients return predictions with labels, which Spearman needs, instead of sums.",
    )
    baselines: Literal["auto", "none"] | list[Baseline] = Field(
        "auto",
        description="What a run is compared with: the majority class or the mean score (constant), TF-IDF or the frozen"
        " encoder with a linear model (tfidf, frozen), each client alone (alone) or each task federated by itself"
        " (single), which are whole runs before this one. auto is the first three, with the package's synthetic data"
        " the first; a server, which has no texts, has none.",
    )


class CheckpointConfig(Section):
    every: Whole = Field(
        0, description="Keep every n-th round besides the last two and the best; `--round N` opens them."
    )


class ComputeConfig(Section):
    device: str = Field("auto", description="cpu, cuda, or auto: a GPU where there is one.")
    workers: Whole | None = Field(
        None,
        description="Worker processes, one thread each; empty is one per core (with a GPU 0: no workers).",
    )
    stack: Whole | None = Field(
        None,
        description="Clients that train at once, as one batched computation (one with several tasks is one by itself);"
        " empty is as many as fit on a GPU, and none on a CPU; 0 trains each alone, step by step.",
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto",
        description="What clients that train at once are computed in, their weights being kept in fp32; auto is bf16"
        " on a GPU that has it.",
    )
    encoder: Literal["auto", "plain"] = Field(
        "auto",
        description="Compute BERT encoders by fedmtl's own faster code, equal up to rounding, others by transformers"
        " (auto); or all by transformers (plain).",
    )


class EnergyConfig(Section):
    cpu_watts: Positive = Field(
        85.0,
        description="What the processor of this machine takes at full load (its TDP), for the estimate where it has no"
        " counter that can be read; the default is codecarbon's for an unknown one.",
    )
    grams_per_kwh: Positive | None = Field(
        None, description="Grams of CO2 per kWh of your electricity; with it a run's CO2 is computed, without it not."
    )


def _named(value: Any) -> Any:
    """`track: [mlflow]` and `track: {mlflow: }` say the same: every option at its default."""
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list):
        value = dict.fromkeys(value) if all(isinstance(name, str) for name in value) else value
    if not isinstance(value, dict):
        return {} if value is None else value
    return {name: {} if options is None else options for name, options in value.items()}


def _or_names(schema: dict[str, Any]) -> None:
    known = {key: schema.pop(key) for key in ("type", "additionalProperties") if key in schema}
    schema["anyOf"] = [{"type": "array", "items": {"type": "string"}}, known]


class Config(Section):
    """A whole run. `fedmtl config` prints it with every default filled in."""

    mode: Mode = Field("federated", description="federated, or a baseline on the same data and budget.")
    defaults: Literal["auto", "plain"] = Field(
        "auto",
        description="Where settings that are not given come from: chosen by the encoder and the tasks (auto), which"
        " `fedmtl config` prints with reasons, or the defaults of this table and nothing else (plain).",
    )
    seed: Whole = Field(0, description="All randomness derives from it.")
    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    tasks: Annotated[dict[Name, TaskConfig], Empty] = Field(description="The tasks, by name.", min_length=1)
    clients: Annotated[dict[Name, ClientConfig], Empty] = Field(
        default_factory=dict, description="The clients, by name; optional."
    )
    partition: PartitionConfig = Field(default_factory=PartitionConfig)
    sharing: SharingConfig = Field(default_factory=SharingConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    federation: FederationConfig = Field(default_factory=FederationConfig)
    privacy: PrivacyConfig = Field(default_factory=PrivacyConfig)
    wire: WireConfig = Field(default_factory=WireConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    compute: ComputeConfig = Field(default_factory=ComputeConfig)
    energy: EnergyConfig = Field(default_factory=EnergyConfig)
    methods: Annotated[dict[Name, dict[str, Any]], Empty] = Field(
        default_factory=dict,
        description="Capabilities without a key of their own, by name, each with its options: `scaffold: {}` (SCAFFOLD"
        " against skewed labels), and those of other packages.",
    )
    track: Annotated[dict[Name, dict[str, Any]], BeforeValidator(_named), Field(json_schema_extra=_or_names)] = Field(
        default_factory=dict,
        description="Trackers that the run's numbers are sent to: tensorboard, mlflow, wandb, trackio. A list of names,"
        " or a section with options for each (docs/trackers.md). It may be changed between two sessions of a run.",
    )
    output: str = Field("runs", description="Folder that holds the run folders.")

    @field_validator("tasks", "clients")
    @classmethod
    def _have_plain_names(cls, named: dict[str, Any]) -> dict[str, Any]:
        check_names(named)
        return named

    @model_validator(mode="after")
    def _names_known_tasks(self) -> Self:
        adapters, distillation = self.model.adapters, self.training.distillation
        lists = {f"sharing.groups.{path}": members for path, members in group_members(self.sharing.groups)}
        lists["model.adapters.tasks"] = (adapters and adapters.tasks) or []
        lists["training.distillation.tasks"] = (distillation and distillation.tasks) or []
        for key, tasks in lists.items():
            for task in tasks:
                if task not in self.tasks:
                    raise WrongKey(key, f"unknown task {shown(task)}; {did_you_mean(task, list(self.tasks))}")
        return self

    @model_validator(mode="after")
    def _gives_clients_known_tasks(self) -> Self:
        for name, client in self.clients.items():
            later = {f"tasks_from_round.{start}": tasks for start, tasks in client.tasks_from_round.items()}
            for key, tasks in {"tasks": client.tasks, **later}.items():
                for task in tasks:
                    if task not in self.tasks:
                        known = ", ".join(self.tasks)
                        raise WrongKey(
                            f"clients.{name}.{key}", f"found {task!r}, which is no task here; write one of {known}"
                        )
        return self

    @model_validator(mode="after")
    def _weighs_labels_once(self) -> Self:
        for name, task in self.tasks.items():
            if self.training.logit_adjustment and task.class_weights == "balanced":
                raise WrongKey(
                    f"tasks.{name}.class_weights",
                    "found balanced with training.logit_adjustment; both make up for a client's shares of labels,"
                    " so keep one",
                )
        return self

    @model_validator(mode="after")
    def _takes_joint_steps_at_one_rate(self) -> Self:
        rates = {name: task.learning_rate or self.training.learning_rate for name, task in self.tasks.items()}
        if self.training.task_schedule == "joint" and len(set(rates.values())) > 1:
            found = ", ".join(f"{rate:g} for {name}" for name, rate in rates.items())
            raise WrongKey(
                "training.task_schedule",
                f"a joint step has one learning rate, found {found}; write one learning rate, training.learning_rate",
            )
        return self

    @model_validator(mode="after")
    def _weighs_losses_once(self) -> Self:
        training = self.training
        weighted = [name for name, task in self.tasks.items() if task.weight != 1.0]
        if training.loss_weighting == "uncertainty" and training.task_weight_in == "loss" and weighted:
            raise WrongKey(
                "training.loss_weighting",
                f"uncertainty learns what tasks.{weighted[0]}.weight is to say of the loss;"
                " write `task_weight_in: averaging` or leave the weight out",
            )
        return self

    @model_validator(mode="after")
    def _prunes_what_the_server_has(self) -> Self:
        if self.training.pruning is None:
            return self
        if self.model.lora is not None:
            found = "model.lora, whose encoder does not train; leave one of them out"
        elif self.mode == "local":
            found = "mode local, where no weight is the server's to prune; take another mode"
        elif self.sharing.adaptive is not None:
            found = "sharing.adaptive, where merging would revive weights; leave one out"
        else:
            return self
        raise WrongKey("training.pruning", f"found with {found}")

    @model_validator(mode="after")
    def _adapts_between_tasks(self) -> Self:
        if self.sharing.adaptive is None:
            return self
        if self.mode != "federated":
            raise WrongKey(
                "sharing.adaptive",
                f"found with mode {self.mode}, whose plan is what it is compared by;"
                " write `mode: federated`, or `adaptive: null`",
            )
        if len(self.tasks) < 2:
            raise WrongKey("sharing.adaptive", "found with one task; layers split between tasks, so name two or more")
        return self

    def batch_size_of(self, task: str) -> int:
        """Examples per step on a task."""
        return self.tasks[task].batch_size or self.training.batch_size
