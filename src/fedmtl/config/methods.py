"""The settings of methods that are off by default: each is a section of `schema`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from fedmtl.config.errors import WrongKey
from fedmtl.config.kinds import Count, Decay, Fraction, Name, NonNegative, OneOrSeveral, Positive, Section, Whole


class LoraConfig(Section):
    rank: Count = Field(8, description="Rows of A and columns of B, the two matrices added to a layer.")
    alpha: Positive = Field(
        16.0, description="B A counts alpha / rank times; a report that multiplies by alpha means alpha * rank here."
    )
    targets: list[str] | None = Field(
        None,
        description="The encoder's linear layers that get it, by their path inside a layer or its end; empty is"
        " queries, keys, values and both feed-forward layers, as the encoder names them.",
        min_length=1,
    )
    layers: list[Whole] | None = Field(
        None, description="The numbers of the encoder's layers that get it, from 0; empty is all.", min_length=1
    )
    dropout: Decay = Field(0.0, description="Dropout in front of A.")
    mode: Literal["adapters", "last_linear", "full_model"] = Field(
        "adapters",
        description="What trains besides: the heads (adapters); nothing, heads get LoRA too (last_linear); all that"
        " got no LoRA, and heads get it too (full_model).",
    )
    train: Literal["both", "b"] = Field(
        "both", description="A and B, or B alone: A is then the same everywhere, and the mean of the clients exact."
    )


class AdaptersConfig(Section):
    kind: Literal["low_rank", "pals", "mixed"] = Field(
        "pals",
        description="What a task adds to a layer: two projections (low_rank), attention between them (pals), or pals"
        " with shared projections in the first half of the layers and low_rank in the second (mixed).",
    )
    size: Count | None = Field(
        None, description="Width between the projections; empty is 100 for low_rank and 204 for pals."
    )
    heads: Count = Field(12, description="Attention heads of pals; they divide the size.")
    share: Literal["none", "projections", "all"] = Field(
        "none", description="What a task's layers have in common: nothing, the two projections, or the attention too."
    )
    wiring: Literal["parallel", "alternative"] = Field(
        "parallel", description="Beside the whole layer (parallel), or beside its self-attention (alternative)."
    )
    tasks: list[Name] | None = Field(None, description="The tasks that have them; empty is all.", min_length=1)

    def size_of(self, kind: str) -> int:
        """The width between the projections of a layer of that kind."""
        return self.size or (100 if kind == "low_rank" else 204)

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        if self.kind == "mixed" and self.share != "none":
            raise WrongKey("share", f"found {self.share}, but `mixed` says itself what is shared; leave it out")
        if self.kind == "low_rank" and self.share == "all":
            raise WrongKey("share", "found all, but `low_rank` has no attention; write `projections`")
        if self.kind != "low_rank" and self.size_of("pals") % self.heads:
            raise WrongKey("heads", f"found {self.heads}, which does not divide the size, {self.size_of('pals')}")
        return self


class SmartConfig(Section):
    """Smoothness against small changes of the embeddings (SMART). Empty is off."""

    weight: NonNegative = Field(1e-3, description="What the divergence is multiplied by before it joins the loss.")
    radius: Positive = Field(
        1e-2, description="How far noise on an example's word embeddings may go, measured by `norm`."
    )
    norm: Literal["inf", "2"] = Field(
        "inf", description="inf bounds every entry of the noise; 2 bounds its length over all tokens of an example."
    )
    steps: Whole = Field(1, description="Ascent steps that look for the noise; each is a pass forward and back.")
    step_size: Positive | None = Field(
        None, description="Length of an ascent step, by `norm`; empty is a hundred times the radius, as in the paper."
    )
    noise: NonNegative | None = Field(
        None, description="Standard deviation of the noise the ascent starts from; empty is the radius."
    )
    bregman: NonNegative = Field(
        0.0, description="Bregman proximal mu: how hard the outputs are held near those of the averaged weights."
    )
    momentum: Fraction = Field(0.99, description="With `bregman`: how much of the averaged weights a step keeps.")
    perturb: Literal["one", "both"] = Field(
        "one",
        description="Noise on the compared outputs only (one), or a random one on the embeddings that the task's loss"
        " is computed from as well (both).",
    )

    @model_validator(mode="before")
    @classmethod
    def _norm_as_text(cls, value: Any) -> Any:
        # YAML reads `norm: 2` as a number and `.inf` as another.
        if isinstance(value, dict) and value.get("norm") in (2, float("inf")):
            return {**value, "norm": "2" if value["norm"] == 2 else "inf"}
        return value


class DistillationConfig(Section):
    """A finished model as teacher while the federation trains (knowledge distillation). Empty is off."""

    teacher: str = Field(description="Folder of a finished run, or its model/; it has to answer the same tasks.")
    weight: Fraction = Field(0.5, description="The teacher's share of a client's loss; the rest is the task's own.")
    temperature: Positive = Field(
        2.0, description="What outputs are divided by before they are compared; larger is softer. Not for regressions."
    )
    where: Literal["clients", "server"] = Field(
        "clients",
        description="Clients learn what the teacher says of their own examples, or the server teaches the averaged"
        " model on texts without labels after every round.",
    )
    tasks: list[Name] | None = Field(None, description="The tasks it teaches; empty is all.", min_length=1)
    texts: list[str] = Field(
        default_factory=list,
        description="With `server`: files of texts, one a line (.txt, .txt.gz) or in the first column of a table; pairs"
        " in tables with the task's columns, or of two columns.",
    )
    steps: Count = Field(100, description="With `server`: batches after every round, tasks in turn.")
    learning_rate: Positive | None = Field(
        None, description="With `server`: step size of those batches; empty is each task's own."
    )

    @model_validator(mode="after")
    def _texts_are_for_the_server(self) -> Self:
        if self.where == "clients" and self.texts:
            raise WrongKey("texts", "clients learn from their own examples; write `where: server`, or leave it out")
        if self.where == "server" and not self.texts:
            raise WrongKey("texts", "missing; `where: server` needs files of texts without labels")
        return self


class PruningConfig(Section):
    """The smallest weights become zero, more of them with every round, and stay zero. Empty is off."""

    amount: Decay = Field(0.2, description="The share of all weights of `layers` together that is zero at the end.")
    rounds: Count = Field(6, description="Rounds over which that share is reached, some more after each of them.")
    start_round: Whole = Field(
        1, description="The first round after which weights are pruned; 0 begins before any training."
    )
    schedule: Literal["even", "cubic"] = Field(
        "even", description="As many weights after every round (even), or most of them early (cubic)."
    )
    layers: Annotated[list[str] | None, OneOrSeveral] = Field(
        None,
        description="Patterns of the linear weight matrices, such as [encoder.layer.*.intermediate.*]; empty is all of"
        " the encoder's and the heads'.",
        min_length=1,
    )


class TaskWeightingConfig(Section):
    kind: Literal["fixed", "progress"] = Field(
        "fixed",
        description="Tasks count as tasks.<name>.weight says (fixed), or more than that while their validation error"
        " falls slower than other tasks' (progress).",
    )
    temperature: Positive = Field(2.0, description="With `progress`: how even the weights are; large is even.")
    floor: Positive = Field(
        0.05,
        description="With `progress`: a validation error (1 minus the main metric) below this counts as this.",
    )
