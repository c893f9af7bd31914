from typing import Any

import pytest

from fedmtl.config import Config
from fedmtl.errors import ConfigError
from fedmtl.tasks.builtin import BUILTIN
from fedmtl.tasks.resolve import brings_all, resolve_task
from fedmtl.tasks.task import Task

OWN = {"kind": "classification", "source": {"train": "a.tsv"}, "text": ["message"], "label": "topic"}


def resolve(name: str, keys: dict[str, Any], found: tuple[str, ...] = (), **rest: Any) -> Task:
    return resolve_task(Config.model_validate({"tasks": {name: keys}, **rest}), name, found)


def test_builtin_task_needs_only_its_name():
    assert resolve("stsb", {}) == Task(
        "stsb",
        "regression",
        ("sentence1", "sentence2"),
        "label",
        "pearson",
        score_range=(0.0, 5.0),
        outputs=1,
    )
    ag_news = resolve("ag_news", {})
    assert (ag_news.labels, ag_news.outputs) == (("World", "Sports", "Business", "Sci/Tech"), 4)


@pytest.mark.parametrize("name", BUILTIN)
def test_every_builtin_task_resolves(name):
    task, entry = resolve(name, {}, data={"root": "somewhere"}), BUILTIN[name]
    assert task.metric in task.kind_of.main_metrics
    assert bool(task.labels) == task.kind_of.has_labels
    assert entry.hub is None or len(entry.hub.text) == len(entry.text)
    assert entry.hub is None or entry.hub.validation_split in ("validation", "validation_matched", None)


def test_a_task_that_is_only_in_files_says_so_without_them():
    with pytest.raises(ConfigError, match=r"data.root: found nothing, and cfimdb is neither embedded nor on the hub"):
        resolve("cfimdb", {})
    assert resolve("cfimdb", {"source": {"train": "a.tsv"}}).labels == ("negative", "positive")


def test_user_keys_replace_builtin_ones_and_model_fills_the_rest():
    model = {"pair": "dual", "pool": "mean", "head_dropout": 0.3}
    qqp = resolve("qqp", {"text": ["q1", "q2"], "metric": "f1", "dropout": 0.0}, model=model)
    assert (qqp.text, qqp.label, qqp.metric) == (("q1", "q2"), "label", "f1")
    assert (qqp.pair, qqp.pool, qqp.dropout) == ("dual", "mean", 0.0)
    assert resolve("qqp", {"pair": "cross", "pool": "cls"}, model=model).pair == "cross"
    assert resolve("qqp", {}, model=model).dropout == 0.3


def test_another_kind_drops_the_builtin_labels_and_metric():
    sst5 = resolve("sst5", {"kind": "regression", "score_range": [0, 4]})
    assert (sst5.labels, sst5.score_range, sst5.metric, sst5.outputs) == ((), (0.0, 4.0), "pearson", 1)


def test_own_task_takes_the_labels_found_in_its_data():
    assert resolve("complaints", OWN).labels == ()
    assert resolve("complaints", OWN, found=("bill", "card", "loan")).outputs == 3
    assert resolve("complaints", OWN | {"labels": ["x", "y"]}, found=("z",)).labels == ("x", "y")


def test_two_classes_may_have_one_output():
    assert resolve("sst2", {"outputs": 1}).outputs == 1
    assert resolve("sst2", {}).outputs == 2


def test_class_weights_are_one_per_label():
    assert resolve("sst2", {"class_weights": [1, 2]}).class_weights == (1.0, 2.0)
    assert resolve("sst2", {"class_weights": "balanced"}).class_weights == "balanced"


def test_a_task_has_the_same_labels_wherever_its_examples_are():
    assert resolve("qqp", {}, data={"source": "embedded"}).labels == ("not_duplicate", "duplicate")
    assert resolve("paraphrase", {}, data={"source": "embedded"}).labels == ("different", "same")
    own = {"source": {"train": "q.tsv"}}
    assert resolve("qqp", own, data={"source": "embedded"}).labels == ("not_duplicate", "duplicate")


def test_own_task_needs_no_source_when_every_client_brings_one():
    task = {key: value for key, value in OWN.items() if key != "source"}
    clients = {"a": {"tasks": ["mine"], "source": {"mine": "a.tsv"}}, "b": {"tasks": ["mine"]}}
    with pytest.raises(ConfigError, match=r"tasks\.mine\.source: found nothing, and b has no file"):
        resolve("mine", task, clients=clients)
    clients["b"] = {"tasks": ["mine"], "source": {"mine": "b.tsv"}}
    assert resolve("mine", task, clients=clients).label == "topic"
    assert brings_all(Config.model_validate({"tasks": {"mine": task}, "clients": clients}), "mine")


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in OWN.items() if name != key}


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("mine", without("kind"), "tasks.mine.kind: found nothing"),
        ("mine", without("source"), "tasks.mine.source: found nothing"),
        ("mine", without("text"), "write `text: [COLUMN]` or `text: [COLUMN, COLUMN]`"),
        ("mine", without("label"), "write `label: COLUMN`"),
        ("mine", OWN | {"kind": "regression"}, "write `score_range: [0, 5]` for scores from 0 to 5"),
        ("sst2", {"score_range": [0, 5]}, "tasks.sst2.score_range: found on a classification"),
        ("stsb", {"labels": ["a", "b"]}, "tasks.stsb.labels: found on a regression"),
        ("sst2", {"metric": "pearson"}, "tasks.sst2.metric: found pearson on a classification, write one of"),
        ("stsb", {"metric": "accuracy"}, "write one of pearson, spearman"),
        ("ag_news", {"outputs": 1}, "tasks.ag_news.outputs: found 1 on 4 classes"),
        ("stsb", {"outputs": 2}, "tasks.stsb.outputs: found 2 on a regression"),
        ("sst2", {"class_weights": [1]}, "found 1 weights for 2 labels, write one for each of negative, pos"),
        ("stsb", {"class_weights": "balanced"}, "tasks.stsb.class_weights: found on a regression"),
        (
            "sst2",
            {"pair": "dual"},
            "tasks.sst2.pair: found dual, and the task has one text column (sentence)",
        ),
    ],
)
def test_what_does_not_fit_is_an_error_with_its_path_and_remedy(name, keys, message):
    with pytest.raises(ConfigError) as error:
        resolve(name, keys)
    assert message in str(error.value)
    assert str(error.value).startswith(f"tasks.{name}.")


def test_places_that_lack_a_builtin_task_are_errors():
    with pytest.raises(ConfigError, match=r"data\.source: found embedded, and mrpc is not embedded \(only sst2"):
        resolve("mrpc", {}, data={"source": "embedded"})
    with pytest.raises(ConfigError, match=r"data\.root: found nothing with `source: files`"):
        resolve("mrpc", {}, data={"source": "files"})


@pytest.mark.parametrize("data", [{"source": "embedded"}, {}])
def test_embedded_texts_are_no_tagged_words_and_the_other_way_round(data):
    with pytest.raises(
        ConfigError, match=r"tasks\.sentiment\.kind: found tagging, and the embedded examples of"
    ) as error:
        resolve("sentiment", {"kind": "tagging"}, data=data)
    assert str(error.value).endswith("leave it out, or write `tasks.sentiment.source: {train: FILE}`")
    with pytest.raises(ConfigError, match=r"tasks\.roles\.kind: found classification, and .* are of kind tagging"):
        resolve("roles", {"kind": "classification"}, data=data)
    assert resolve("sentiment", {"kind": "tagging", "source": {"train": "a.conll"}}, data=data).kind == "tagging"
