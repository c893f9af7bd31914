"""The tasks, the clients that have them, where their examples come from and how they are dealt."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from fedmtl.config.errors import HERE, WrongKey, shown
from fedmtl.config.kinds import (
    AsNumber,
    AsText,
    Count,
    Empty,
    Fraction,
    Name,
    Number,
    OneOrSeveral,
    Positive,
    Section,
    check_names,
    first_repeated,
)

Pool = Literal["auto", "pooler", "cls", "mean"]
Pair = Literal["cross", "dual"]
PoolWindows = Literal["mean", "max", "attention"]


class SourceConfig(Section):
    train: str | None = Field(None, description="File with training examples: csv, tsv, jsonl, parquet, also .gz.")
    validation: str | None = Field(
        None, description="File that scores every round; without it one is cut from train, equal texts on one side."
    )
    test: str | None = Field(
        None,
        description="Labelled file that no run reads; `fedmtl evaluate RUN --test` scores the finished model on it.",
    )
    more_validation: Annotated[dict[Name, str], Empty] = Field(
        default_factory=dict,
        description="Further validation files by name, such as {mismatched: FILE}: each is scored and reported as"
        " TASK:NAME, none counts for the best round or an average.",
    )
    hub: str | None = Field(None, description="Dataset on the hub, owner/name or name, instead of files.")
    delimiter: str | None = Field(
        None,
        description="What separates the columns of a csv or tsv file: tab, comma, semicolon or one character; without"
        " it, what separates the task's columns in the header.",
    )
    subset: str | None = Field(None, description="The hub dataset's configuration, such as sst2 of glue.")
    train_split: str = Field("train", description="Name of the hub's training split.")
    validation_split: str | None = Field(
        None, description="Name of the hub's validation split; a test split only with scores_test."
    )
    scores_test: bool = Field(
        False,
        description="Let validation_split be a test split: for a study in which no score chooses anything, neither a"
        " round nor a rate.",
    )

    more_validation_splits: Annotated[dict[Name, str], Empty] = Field(
        default_factory=dict, description="As more_validation, with splits of the hub dataset."
    )

    @field_validator("more_validation", "more_validation_splits")
    @classmethod
    def _has_plain_names(cls, named: dict[str, str]) -> dict[str, str]:
        check_names(named)
        return named

    @field_validator("more_validation_splits")
    @classmethod
    def _are_no_test_splits(cls, named: dict[str, str]) -> dict[str, str]:
        for name, split in named.items():
            if split.startswith("test"):
                raise WrongKey(name, f"found {split}, and test splits are not for tuning; write another or remove it")
        return named

    @model_validator(mode="after")
    def _is_no_test_split(self) -> Self:
        splits = {"train_split": self.train_split, "validation_split": self.validation_split}
        for key, split in splits.items():
            if split and split.startswith("test") and not (key == "validation_split" and self.scores_test):
                raise WrongKey(
                    key,
                    f"found {split}, and test splits are not for training and tuning; "
                    "write another split, or remove it (validation is then cut from train)",
                )
        return self

    @field_validator("delimiter")
    @classmethod
    def _is_a_delimiter(cls, delimiter: str | None) -> str | None:
        known = ("tab", "comma", "semicolon")
        if delimiter is not None and delimiter not in known and (len(delimiter) != 1 or delimiter in '"\r\n'):
            raise WrongKey("", f"found {shown(delimiter)}; write {', '.join(known)}, or one character but a quote")
        return delimiter

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.hub is None and self.train is None:
            raise ValueError("names neither a file nor a hub dataset; write `train: FILE` or `hub: owner/name`")
        if self.hub is not None and self.train is not None:
            raise ValueError("names both a file and a hub dataset; keep `train` or `hub`")
        if self.hub is not None and self.delimiter is not None:
            raise WrongKey("delimiter", "found with a hub dataset, which has none; remove it")
        if self.hub is not None and self.more_validation:
            raise WrongKey("more_validation", f"found with a hub dataset; write {HERE}more_validation_splits")
        if self.hub is None and self.more_validation_splits:
            raise WrongKey("more_validation_splits", f"found without a hub dataset; write {HERE}more_validation")
        return self


class HeadConfig(Section):
    """A hidden layer between what is pooled and the output layer, as DistilBERT's classifier has one."""

    hidden: Count | None = Field(None, description="Width of the hidden layer; empty is the encoder's width.")
    activation: Literal["relu", "tanh", "gelu"] = Field("relu", description="What follows the hidden layer.")
    dropout: Fraction = Field(
        0.1, description="Dropout behind the hidden layer; tasks.<name>.dropout is the one in front of it."
    )


class TaskConfig(Section):
    """One task. Built-in names need none of this; keys given here replace the built-in ones."""

    kind: str | None = Field(
        None,
        description="What the head predicts: classification, regression, tagging, or a kind of another package by its"
        " name.",
    )
    source: SourceConfig | None = Field(None, description="Where a task of your own has its examples.")
    text: Annotated[list[str] | None, OneOrSeveral] = Field(
        None,
        description="One or two text columns; of tagged columns the word's by number, the first without it.",
        min_length=1,
        max_length=2,
    )
    label: Annotated[str | None, AsText] = Field(
        None,
        description="The column with the label or the score; of tagged columns the tag's by number, else the last.",
    )
    labels: list[Name] | None = Field(
        None,
        description="The label values in order, of a tagging the types of its spans; without it, those found in the"
        " training data, sorted.",
        min_length=1,
    )
    score_range: tuple[Number, Number] | None = Field(None, description="Lowest and highest score of a regression.")
    metric: str | None = Field(
        None,
        description="The task's main metric, which early stopping and averages use: accuracy, f1 or matthews of a"
        " classification, pearson or spearman of a regression, f1, macro_f1 or strict_f1 of a tagging.",
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
    head: HeadConfig | Literal["pretrained"] | None = Field(
        None,
        description="A hidden layer for this task's head, such as {hidden: 128, activation: tanh}, or {} for one with"
        " ReLU of the encoder's width; `pretrained` is the head of model.server_model, a folder saved as"
        " ...ForSequenceClassification; empty is a fresh output layer alone.",
    )
    patience: Count | None = Field(
        None,
        description="Evaluations without a better score before the task stops: its head, and layers that no other task"
        " shares, go back to its best round and stay. Rounds count from the first one after training.warmup_rounds.",
    )
    auxiliary: bool = Field(False, description="Trains the encoder but does not count in the overall score.")
    from_round: Count = Field(1, description="First round in which the task is trained.")
    until_round: Count | None = Field(None, description="Last round in which the task is trained.")

    @field_validator("kind", "label", "metric")
    @classmethod
    def _is_a_word(cls, word: str | None) -> str | None:
        if word is not None and not word.strip():
            raise WrongKey("", f"found {shown(word)}; write a name, or remove the key for its default")
        return word

    @field_validator("labels")
    @classmethod
    def _each_label_once(cls, labels: list[str] | None) -> list[str] | None:
        twice = first_repeated(labels or ())
        if twice is not None:
            raise WrongKey("", f"{shown(twice)} stands there twice; keep one")
        return labels

    @field_validator("score_range")
    @classmethod
    def _lowest_score_first(cls, scores: tuple[float, float] | None) -> tuple[float, float] | None:
        if scores is not None and scores[0] >= scores[1]:
            raise WrongKey("", f"found [{scores[0]:g}, {scores[1]:g}], the first must be less than the second")
        return scores

    @model_validator(mode="after")
    def _ends_after_it_begins(self) -> Self:
        _check_span(self)
        return self


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

    @property
    def tasks_of_all_rounds(self) -> set[str]:
        """The tasks that the client trains in any round."""
        return set(self.tasks).union(*self.tasks_from_round.values())

    @model_validator(mode="after")
    def _ends_after_it_begins(self) -> Self:
        _check_span(self)
        return self

    @model_validator(mode="after")
    def _has_sources_of_its_tasks(self) -> Self:
        for task in self.source:
            if task not in self.tasks_of_all_rounds:
                raise WrongKey(
                    f"source.{task}",
                    f"found a source for a task the client does not hold; "
                    f"add `{task}` to {HERE}tasks or remove the source",
                )
        for task, source in self.source.items():
            if isinstance(source, SourceConfig) and (source.more_validation or source.more_validation_splits):
                raise WrongKey(
                    f"source.{task}",
                    "names further validation sets, which are the server's; write them under tasks.<name>.source",
                )
        return self


def _check_span(span: TaskConfig | ClientConfig) -> None:
    if span.until_round is not None and span.until_round < span.from_round:
        raise WrongKey(
            "until_round",
            f"found {span.until_round}, it must be at least {HERE}from_round, which is {span.from_round}",
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

    @model_validator(mode="after")
    def _has_its_column(self) -> Self:
        if self.kind == "column" and self.column is None:
            raise WrongKey("column", f"missing; {HERE}kind `column` needs the name of a column")
        return self
