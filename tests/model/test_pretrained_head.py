"""`head: pretrained`: a folder that was saved as ...ForSequenceClassification gives its head as well."""

import json

import pytest
import torch

from fedmtl.config.file import config_from
from fedmtl.deploy.tasks import check_deployable
from fedmtl.errors import ConfigError, ModelError
from fedmtl.model.multitask import open_model
from fedmtl.tasks.pretrained_head import LAYOUTS
from fedmtl.tasks.resolve import resolve_task

from .tiny import LENGTH, SINGLES, encode, write_classifier


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory):
    root = tmp_path_factory.mktemp("classifiers")
    return {kind: (root / kind, write_classifier(kind, root / kind)) for kind in LAYOUTS}


def make_config_of(folder, head="pretrained", model=(), **task):
    return config_from(
        {
            "model": {"server_model": str(folder), "max_length": LENGTH, **dict(model)},
            "tasks": {"sentiment": {"head": head, **task}},
        }
    )


def open_pretrained(folder, **keys):
    config = make_config_of(folder, **keys)
    task = resolve_task(config, "sentiment")
    encoder, model = open_model(config.model, {"sentiment": task}, config.seed)
    return task, encoder, model


@pytest.mark.parametrize("kind", LAYOUTS)
def test_the_model_begins_with_the_answers_of_the_folder(classifiers, kind):
    folder, theirs = classifiers[kind]
    task, encoder, ours = open_pretrained(folder)
    inputs = encode(encoder.tokenizer, task, SINGLES)
    with torch.inference_mode():
        expected = theirs(input_ids=inputs.ids, attention_mask=inputs.mask).logits
        found = ours("sentiment", inputs)
    assert expected.std(0).min() > 1e-4  # the texts are told apart
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_the_layer_the_pooling_and_the_dropout_are_those_of_the_class(classifiers):
    tasks = {kind: resolve_task(make_config_of(folder), "sentiment") for kind, (folder, _) in classifiers.items()}
    assert {kind: task.pool for kind, task in tasks.items() if task.head is None} == {
        "bert": "pooler", "albert": "pooler",
    }  # fmt: skip
    deep = {kind: (task.pool, task.head.activation) for kind, task in tasks.items() if task.head is not None}
    assert deep == {
        "distilbert": ("cls", "relu"), "roberta": ("cls", "tanh"), "mpnet": ("cls", "tanh"), "electra": ("cls", "gelu"),
    }  # fmt: skip
    # DistilBERT drops behind the layer alone, 0.2 of it unless its config says otherwise.
    assert (tasks["distilbert"].dropout, tasks["distilbert"].head.dropout) == (0.0, 0.2)
    assert tasks["roberta"].dropout == 0.1


@pytest.mark.parametrize("mode", ["last_linear", "full_model"])
def test_lora_is_added_to_the_pretrained_head(classifiers, mode):
    folder, theirs = classifiers["distilbert"]
    task, encoder, ours = open_pretrained(
        folder, model={"lora": {"rank": 2, "mode": mode, "targets": ["q_lin"]}}.items()
    )
    inputs = encode(encoder.tokenizer, task, SINGLES)
    with torch.inference_mode():
        expected = theirs(input_ids=inputs.ids, attention_mask=inputs.mask).logits
        torch.testing.assert_close(ours("sentiment", inputs), expected, rtol=0, atol=1e-6)


def test_another_number_of_labels_is_an_error_with_both_numbers(tmp_path):
    labels = {"id2label": {n: f"l{n}" for n in range(5)}, "label2id": {f"l{n}": n for n in range(5)}}
    write_classifier("bert", tmp_path / "five", **labels)
    with pytest.raises(ConfigError, match=r"has 5 outputs, and sentiment has 2 \(negative, positive\); leave `head`"):
        resolve_task(make_config_of(tmp_path / "five"), "sentiment")


def test_the_same_labels_in_another_order_are_an_error(tmp_path):
    write_classifier("bert", tmp_path / "turned", id2label={0: "POSITIVE", 1: "NEGATIVE"}, label2id={})
    with pytest.raises(ConfigError, match=r"in the order POSITIVE, NEGATIVE; write tasks.sentiment.labels in that"):
        resolve_task(make_config_of(tmp_path / "turned"), "sentiment")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"folder": "tiny"}, "server_model, tiny, is no folder with a config.json; name one"),
        ({"pool": "mean"}, "reads `pool: pooler`, found tasks.sentiment.pool=mean; write tasks.sentiment.pool=pooler"),
        (
            {"model": [("pool", "mean")]},
            "reads `pool: pooler`, found model.pool=mean; write tasks.sentiment.pool=pooler",
        ),
        ({"model": [("initial", "random")]}, "with `model.initial: random`; leave one of them out"),
        ({"kind": "regression", "score_range": [0, 1], "labels": None}, "on a task that is a regression"),
        ({"outputs": 1}, "has 2 outputs, and sentiment has 1"),
    ],
)
def test_what_cannot_be_is_one_line(classifiers, keys, words):
    given = {"folder": classifiers["bert"][0], **keys}
    with pytest.raises(ConfigError, match=words) as caught:
        resolve_task(make_config_of(given.pop("folder"), **given), "sentiment")
    assert str(caught.value).startswith("tasks.sentiment.head: ")
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_head_says_what_it_was_saved_as(folders):
    with pytest.raises(ConfigError, match=r"has no head: it was saved as BertModel, not as \.\.\.ForSequence"):
        resolve_task(make_config_of(folders["bert"]), "sentiment")


def test_a_config_that_promises_a_head_which_the_file_lacks_is_one_line(folders, tmp_path):
    (tmp_path / "broken").mkdir()
    for file in folders["bert"].iterdir():
        (tmp_path / "broken" / file.name).write_bytes(file.read_bytes())
    config = tmp_path / "broken" / "config.json"
    said = {**json.loads(config.read_text()), "architectures": ["BertForSequenceClassification"]}
    config.write_text(json.dumps(said))
    with pytest.raises(ModelError, match=r"tasks.sentiment.head: `classifier.weight` of .* is not there"):
        open_pretrained(tmp_path / "broken")


def test_a_deployment_refuses_it_before_any_site_opens_a_folder(classifiers):
    with pytest.raises(ConfigError, match=r"tasks.sentiment.head: found pretrained, for which a site would have to"):
        check_deployable(make_config_of(classifiers["bert"][0]))
