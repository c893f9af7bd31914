"""Every setting, with its default and one sentence on what it does. Nothing else defines a default.

Only shapes and types live here, and checks that need no file. `file` reads and writes YAML;
a task's defaults come from the table of built-in tasks.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from fedmtl.config.kinds import (
    AsNumber,
    Count,
    Decay,
    Empty,
    Fraction,
    Name,
    NonNegative,
    Number,
    OneOrSeveral,
    Positive,
    Section,
    Share,
    Whole,
)
from fedmtl.config.methods import (
    AdaptersConfig,
    AdaptiveSharingConfig,
    DistillationConfig,
    LoraConfig,
    PruningConfig,
    SmartConfig,
    TaskWeightingConfig,
)

Mode = Literal["federated", "federated_single_task", "centralized", "centralized_single_task", "local"]
Level = Literal["all", "group", "task", "client", "fixed"]
Pool = Literal["auto", "pooler", "cls", "mean"]
Pair = Literal["cross", "dual"]
TaskSchedule = Literal["even", "joint", "epoch", "random", "round_robin", "proportional", "annealed", "temperature"]


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


class SourceConfig(Section):
    train: str | None = Field(None, description="File with training examples: csv, tsv, jsonl, parquet, also .gz.")
    validation: str | None = Field(None, description="File that scores every round; without it one is cut from train.")
    hub: str | None = Field(None, description="Dataset on the hub, owner/name or name, instead of files.")
    subset: str | None = Field(None, description="The hub dataset's configuration, such as sst2 of glue.")
    train_split: str = Field("train", description="Name of the hub's training split.")
    validation_split: str | None = Field(None, description="Name of the hub's validation split; never a test split.")

    @model_validator(mode="after")
    def _one_kind(self) -> SourceConfig:
        if self.hub is None and self.train is None:
            raise ValueError("names neither a file nor a hub dataset; write `train: FILE` or `hub: owner/name`")
        if self.hub is not None and self.train is not None:
            raise ValueError("names both a file and a hub dataset; keep `train` or `hub`")
        return self


class TaskConfig(Section):
    """One task. Built-in names need none of this; keys given here replace the built-in ones."""

    kind: str | None = Field(
        None,
        description="What the head predicts: classification, regression, or a kind of another package by its name.",
    )
    source: SourceConfig | None = Field(None, description="Where a task of your own has its examples.")
    text: Annotated[list[str] | None, OneOrSeveral] = Field(
        None, description="One or two text columns.", min_length=1, max_length=2
    )
    label: str | None = Field(None, description="The column with the label or the score.")
    labels: list[Name] | None = Field(
        None,
        description="The label values in order; without it, those found in the training data, sorted.",
        min_length=2,
    )
    score_range: tuple[Number, Number] | None = Field(None, description="Lowest and highest score of a regression.")
    metric: str | None = Field(
        None,
        description="The task's main metric, which early stopping and averages use: accuracy, f1 or matthews of a"
        " classification, pearson or spearman of a regression.",
    )
    pair: Pair | None = Field(None, description="As model.pair, for this task.")
    pool: Pool | None = Field(None, description="As model.pool, for this task.")
    outputs: Literal[1, 2] | None = Field(
        None, description="Two classes as two outputs with cross-entropy (2) or one output with BCE (1)."
    )
    class_weights: Literal["none", "balanced"] | list[Positive] = Field(
        "none",
        description="Loss weights against imbalance: balanced by each client's own counts, or one per label.",
    )
    train_samples: Count | None = Field(
        None, description="Use this many training examples, drawn by seed, then partition."
    )
    val_samples: Count | None = Field(None, description="Use this many validation examples, drawn by seed.")
    weight: Positive = Field(1.0, description="How much the task counts; training.task_weight_in says where.")
    learning_rate: Positive | None = Field(None, description="As training.learning_rate, for steps on this task.")
    batch_size: Count | None = Field(
        None, description="As training.batch_size, for steps on this task; a small task wants more and smaller ones."
    )
    dropout: Fraction | None = Field(None, description="As model.head_dropout, for this task's head.")
    patience: Count | None = Field(
        None,
        description="Evaluations without a better score before the task's head is fixed at its best round.",
    )
    auxiliary: bool = Field(False, description="Trains the encoder but does not count in the overall score.")
    from_round: Count = Field(1, description="First round in which the task is trained.")
    until_round: Count | None = Field(None, description="Last round in which the task is trained.")


class ClientConfig(Section):
    tasks: list[Name] = Field(description="The tasks this client has examples of.", min_length=1)
    source: Annotated[dict[Name, SourceConfig | str], Empty] = Field(
        default_factory=dict,
        description="The client's own files per task; tasks without one are partitioned.",
    )
    from_round: Count = Field(1, description="First round the client takes part in.")
    until_round: Count | None = Field(None, description="Last round the client takes part in.")
    tasks_from_round: Annotated[dict[Count, list[Name]], Empty] = Field(
        default_factory=dict, description="Which tasks it trains from a given round on, such as {5: [qqp]}."
    )


class DataConfig(Section):
    root: str | None = Field(
        None, description="Folder with <task>/train.tsv.gz and <task>/dev.tsv.gz for the built-in tasks."
    )
    source: Literal["auto", "hub", "files", "embedded"] = Field(
        "auto", description="Where built-in tasks come from; auto is data.root if given, else the hub."
    )
    cache: str | None = Field(None, description="Folder for tokenized texts; empty is the user's cache folder.")
    validation_fraction: Annotated[float, Field(gt=0, lt=1), AsNumber] = Field(
        0.1, description="Share of train that becomes validation for a task without a validation file."
    )


class PartitionConfig(Section):
    kind: Literal["iid", "dirichlet", "quantity", "column"] = Field(
        "iid", description="How a task's examples are dealt to its clients."
    )
    alpha: Positive = Field(
        0.5,
        description="Dirichlet concentration, of labels (dirichlet) or of sizes (quantity); small is skewed.",
    )
    column: str | None = Field(None, description="With `column`: each value of this column goes to one client.")
    min_examples: Count = Field(1, description="Fewer examples than this at a client is an error.")


class SharingConfig(Section):
    rules: list[dict[str, str]] = Field(
        default_factory=lambda: [{"heads.*": "task"}, {"*": "all"}],
        description="Ordered `pattern: level` rules over parameter names; levels: all, group, group.N, task,"
        " client, fixed.",
    )
    groups: Annotated[dict[Name, Any], Empty] = Field(
        default_factory=dict,
        description="Groups of tasks, as a tree: {pair: [qqp, stsb]} or"
        " {nlu: {pair: [qqp, stsb], single: [sst2]}}; level `group` is the outermost depth,"
        " `group.2` the next.",
    )
    adaptive: AdaptiveSharingConfig | None = Field(
        None, description="Let layers change their level while the federation runs; empty is a plan that stays."
    )


class TrainingConfig(Section):
    num_rounds: Whole = Field(10, description="Rounds of the federation.")
    local_epochs: Count = Field(1, description="Passes over its own examples a client makes in a round.")
    local_steps: Count | None = Field(None, description="Batches per client and round, instead of local_epochs.")
    batch_size: Count = Field(32, description="Examples per step.")
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


class ServerOptimizerConfig(Section):
    kind: Literal["none", "fedavgm", "fedadam", "fedyogi"] = Field(
        "none", description="What the server does with the mean update: add it, or take it as a gradient."
    )
    learning_rate: Positive = Field(1.0, description="The server's step size.")
    momentum: Fraction = Field(0.9, description="fedavgm's momentum; beta1 of fedadam and fedyogi.")
    beta2: Fraction = Field(0.99, description="Second-moment decay of fedadam and fedyogi.")
    tau: Positive = Field(1e-3, description="Adaptivity of fedadam and fedyogi: the denominator's floor.")


Average = Literal["weighted", "uniform", "tasks"]


class FederationConfig(Section):
    clients_per_task: Count = Field(1, description="Clients made for each task where `clients` names none.")
    average: Average = Field(
        "weighted",
        description="Clients count by their examples (weighted), all the same (uniform), or by their examples within a"
        " task, tasks alike (tasks).",
    )
    aggregation: Name = Field(
        "mean",
        description="How updates of a scope become one: their mean, the mean of updates whose norm is clipped to the"
        " median of the last round (clipped_mean), which bounds what one hostile client can do, or a rule that another"
        " package adds.",
    )
    max_share: Share | None = Field(
        None,
        description="The largest share of any scope's mean that one client may have, by the examples it declared when"
        " it joined; empty is no limit. Where clients are too few for that share, all of them count alike.",
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
        description="Seconds `fedmtl server` waits for sites: all of them before round 1, min_clients before others.",
    )
    vocabulary_slices: bool = Field(True, description="Send only the token rows a client's texts use; exact.")
    task_weighting: TaskWeightingConfig = Field(default_factory=TaskWeightingConfig)


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


class CheckpointConfig(Section):
    every: Whole = Field(0, description="Keep every n-th round besides the last and the best.")


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


class Config(Section):
    """A whole run. `fedmtl config` prints it with every default filled in."""

    mode: Mode = Field("federated", description="federated, or a baseline on the same data and budget.")
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
    wire: WireConfig = Field(default_factory=WireConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    compute: ComputeConfig = Field(default_factory=ComputeConfig)
    methods: Annotated[dict[Name, dict[str, Any]], Empty] = Field(
        default_factory=dict,
        description="Capabilities without a key of their own, such as those of other packages, by name, each with its"
        " options.",
    )
    output: str = Field("runs", description="Folder that holds the run folders.")

    def batch_size_of(self, task: str) -> int:
        """Examples per step on a task."""
        return self.tasks[task].batch_size or self.training.batch_size
