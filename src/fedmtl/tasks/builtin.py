"""The tasks that need no more than their name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fedmtl.tasks.embedded import TAGGED

SINGLE = ("sentence",)
PAIR = ("sentence1", "sentence2")
EMOTIONS = (
    "admiration", "amusement", "anger", "annoyance", "approval", "caring", "confusion", "curiosity", "desire",
    "disappointment", "disapproval", "disgust", "embarrassment", "excitement", "fear", "gratitude", "grief", "joy",
    "love", "nervousness", "optimism", "pride", "realization", "relief", "remorse", "sadness", "surprise", "neutral",
)  # fmt: skip


@dataclass(frozen=True)
class HubTable:
    """Where the hub has a task: its dataset, and the columns that become our text and label columns.

    `validation_split` is never a test split; without one, validation is cut from train. `more_validation` are further
    splits by name, which are scored and reported beside it. `test_split` has labels that are public; no run reads it, a
    study that chooses nothing may.
    """

    dataset: str
    text: tuple[str, ...]
    subset: str | None = None
    label: str = "label"
    train_split: str = "train"
    validation_split: str | None = "validation"
    more_validation: Mapping[str, str] = field(default_factory=dict)
    test_split: str | None = None


@dataclass(frozen=True)
class BuiltinTask:
    """A task's defaults. `embedded` names the data inside the package that can stand in for it.

    A task that is neither embedded nor on the hub is read from files.
    """

    kind: str
    text: tuple[str, ...]
    labels: tuple[str, ...] = ()
    score_range: tuple[float, float] | None = None
    metric: str = "accuracy"
    label: str = "label"
    hub: HubTable | None = None
    embedded: str | None = None

    @property
    def is_package_only(self) -> bool:
        """Whether its examples are in the package and nowhere else."""
        return self.embedded is not None and self.hub is None


def _glue(subset: str, *text: str) -> HubTable:
    return HubTable("nyu-mll/glue", text, subset)


def _tagging(*types: str, embedded: str | None = None) -> BuiltinTask:
    return BuiltinTask("tagging", ("tokens",), types, metric="f1", label="tags", embedded=embedded)


BUILTIN: dict[str, BuiltinTask] = {
    "sst2": BuiltinTask(
        "classification",
        SINGLE,
        ("negative", "positive"),
        hub=_glue("sst2", "sentence"),
        embedded="sentiment",
    ),
    "qqp": BuiltinTask(
        "classification",
        PAIR,
        ("not_duplicate", "duplicate"),
        hub=_glue("qqp", "question1", "question2"),
        embedded="paraphrase",
    ),
    "stsb": BuiltinTask(
        "regression",
        PAIR,
        score_range=(0.0, 5.0),
        metric="pearson",
        hub=_glue("stsb", "sentence1", "sentence2"),
        embedded="similarity",
    ),
    "mrpc": BuiltinTask(
        "classification",
        PAIR,
        ("not_equivalent", "equivalent"),
        hub=_glue("mrpc", "sentence1", "sentence2"),
    ),
    "rte": BuiltinTask(
        "classification",
        PAIR,
        ("entailment", "not_entailment"),
        hub=_glue("rte", "sentence1", "sentence2"),
    ),
    "mnli": BuiltinTask(
        "classification",
        PAIR,
        ("entailment", "neutral", "contradiction"),
        hub=replace(
            _glue("mnli", "premise", "hypothesis"),
            validation_split="validation_matched",
            more_validation={"mismatched": "validation_mismatched"},
        ),
    ),
    "qnli": BuiltinTask(
        "classification",
        PAIR,
        ("entailment", "not_entailment"),
        hub=_glue("qnli", "question", "sentence"),
    ),
    "wnli": BuiltinTask(
        "classification",
        PAIR,
        ("not_entailment", "entailment"),
        hub=_glue("wnli", "sentence1", "sentence2"),
    ),
    "cola": BuiltinTask(
        "classification",
        SINGLE,
        ("unacceptable", "acceptable"),
        metric="matthews",
        hub=_glue("cola", "sentence"),
    ),
    "sst5": BuiltinTask(
        "classification",
        SINGLE,
        ("very negative", "negative", "neutral", "positive", "very positive"),
        hub=HubTable("SetFit/sst5", ("text",), test_split="test"),
    ),
    "cfimdb": BuiltinTask("classification", SINGLE, ("negative", "positive")),
    "imdb": BuiltinTask(
        "classification",
        SINGLE,
        ("negative", "positive"),
        hub=HubTable("stanfordnlp/imdb", ("text",), validation_split=None, test_split="test"),
    ),
    "ag_news": BuiltinTask(
        "classification",
        SINGLE,
        ("World", "Sports", "Business", "Sci/Tech"),
        hub=HubTable("fancyzhx/ag_news", ("text",), validation_split=None, test_split="test"),
    ),
    "yelp": BuiltinTask(
        "classification",
        SINGLE,
        ("1 star", "2 stars", "3 stars", "4 stars", "5 stars"),
        hub=HubTable("Yelp/yelp_review_full", ("text",), validation_split=None, test_split="test"),
    ),
    # Several labels a text, or one (Demszky et al. 2020).
    "goemotions": BuiltinTask(
        "multilabel",
        ("text",),
        EMOTIONS,
        metric="macro_f1",
        label="labels",
        hub=HubTable(
            "google-research-datasets/go_emotions", ("text",), "simplified", label="labels", test_split="test"
        ),
    ),
    # Biomedical names, from files alone: JSON lines with `tokens` and `tags` (Crichton et al. 2017).
    "bc5cdr_chem": _tagging("Chemical"),
    "bc5cdr_disease": _tagging("Disease"),
    "ncbi_disease": _tagging("Disease"),
    "bc2gm": _tagging("GENE"),
    # A word and its tag a line (Derczynski et al. 2017).
    "wnut17": _tagging("corporation", "creative-work", "group", "location", "person", "product"),
    "roles": _tagging(*TAGGED["roles"], embedded="roles"),
    "settings": _tagging(*TAGGED["settings"], embedded="settings"),
    "sentiment": BuiltinTask("classification", SINGLE, ("negative", "positive"), embedded="sentiment"),
    "paraphrase": BuiltinTask("classification", PAIR, ("different", "same"), embedded="paraphrase"),
    "similarity": BuiltinTask("regression", PAIR, score_range=(0.0, 5.0), metric="pearson", embedded="similarity"),
    "entailment": BuiltinTask(
        "classification", PAIR, ("contradiction", "neutral", "entailment"), embedded="entailment"
    ),
}
