"""Tags leave as plain transformers', our own modelling file's, ONNX's and the bundle's, and are found alike by all."""

from importlib.util import module_from_spec, spec_from_file_location

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForTokenClassification, AutoTokenizer, pipeline

from export.test_hf import saved_model
from fedmtl.export.hf import export_hf
from fedmtl.export.onnx import export_bundle
from fedmtl.model.multitask import BoundModel
from fedmtl.predict.answers import to_prediction
from fedmtl.predict.onnx import compute, open_onnx, predict_texts, score_examples
from fedmtl.tasks.batches import TextShard
from fedmtl.tasks.examples import Examples
from fedmtl.tasks.sequences import Sequences
from fedmtl.tasks.task import HiddenLayer, Task
from fedmtl.tasks.tokens import encode_texts
from fedmtl.tasks.words import join_words
from fedmtl.training.local import predict_together
from model.tiny import KINDS, LENGTH, make_task, write_encoder

NAMES = Task("names", "tagging", ("tokens",), "tags", "f1", labels=("LOC", "PER"))
OTHERS = Task("others", "tagging", ("tokens",), "tags", "f1", labels=("X",))
MOOD = make_task("mood", pool="cls", labels=("bad", "good"))
# Plain text, a sentence that is cut, and a word that the tokenizer leaves nothing of.
TEXTS = ["a dull film, and very long", " ".join(["unhappy plot"] * 12), "fine \u00ad good"]
# What transformers' own classes have no head for.
NO_PLAIN_CLASS = ("modernbert",)


def outputs_of(saved, texts=TEXTS):
    bound = BoundModel(saved.model, saved.plan, list(saved.tasks), "", saved.weights, read=True)
    tokens = encode_texts(NAMES, (texts,), saved.encoder.tokenizer, LENGTH)
    shard = TextShard(tokens, np.zeros(len(texts)), np.arange(len(texts)))
    return predict_together(bound, ["names"], shard, 8, torch.device("cpu"), labelled=False)[0]["names"]


def entities(saved, texts=TEXTS):
    return [
        to_prediction(NAMES, row, (text,)).to_json()["entities"]
        for row, text in zip(outputs_of(saved, texts), texts, strict=True)
    ]


def check_alike(found, expected):
    assert sum(map(len, expected)) > 2, "there is something to compare"
    for ours, theirs in zip(expected, found, strict=True):
        assert [{**each, "probability": None} for each in ours] == [{**each, "probability": None} for each in theirs]
        assert [each["probability"] for each in theirs] == pytest.approx(
            [each["probability"] for each in ours], abs=1e-5
        )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return saved_model(write_encoder("bert", tmp_path_factory.mktemp("bert")), [NAMES, OTHERS, MOOD], 0.3)


@pytest.mark.parametrize(
    "kind", [kind if kind == "bert" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_a_plain_class_holds_the_head_where_there_is_one(kind, tmp_path):
    saved = saved_model(write_encoder(kind, tmp_path / kind), [NAMES], 0.3)
    made = export_hf(saved, saved.bind(), tmp_path / "out")
    if kind in NO_PLAIN_CLASS:
        assert "has no equal" in made.reasons["names"]
    else:
        assert made.reasons == {}
        model = AutoModelForTokenClassification.from_pretrained(made.folders["names"])
        assert model.config.id2label == {0: "O", 1: "B-LOC", 2: "I-LOC", 3: "B-PER", 4: "I-PER"}
        tokenizer = AutoTokenizer.from_pretrained(made.folders["names"])
        with torch.inference_mode():
            logits = model(**tokenizer(TEXTS[0], return_tensors="pt", truncation=True)).logits[0].numpy()
        # Every word of this text but the third and the comma is cut into letters or is one token: the first of each.
        columns = encode_texts(NAMES, (TEXTS[:1],), saved.encoder.tokenizer, LENGTH).words.values
        np.testing.assert_allclose(logits[columns], outputs_of(saved)[0], atol=2e-5)
        found = pipeline("token-classification", model=model, tokenizer=tokenizer, aggregation_strategy="first")(
            TEXTS[0]
        )
        assert {(each["start"], each["end"]) for each in found} == {
            (each["start"], each["end"]) for each in entities(saved)[0]
        }


def test_the_modelling_file_finds_what_we_find(saved, tmp_path):
    made = export_hf(saved, saved.bind(), tmp_path)
    assert sorted(made.folders) == ["mood", "names", "others"]
    model = AutoModel.from_pretrained(made.every_task, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(made.every_task, trust_remote_code=True)
    answers = model.answer(tokenizer, TEXTS)
    assert set(answers[0]) == {"names", "others", "mood"}
    check_alike([row["names"]["entities"] for row in answers], entities(saved))


def test_a_hidden_layer_on_words_leaves_by_the_modelling_file(tmp_path):
    task = Task("names", "tagging", ("tokens",), "tags", "f1", labels=("LOC", "PER"), head=HiddenLayer(8, "tanh", 0.0))
    saved = saved_model(write_encoder("bert", tmp_path / "bert"), [task], 0.5)
    made = export_hf(saved, saved.bind(), tmp_path / "out")
    assert made.reasons == {"names": "its head has a hidden layer on every word, which plain transformers do not have"}
    model = AutoModel.from_pretrained(made.every_task, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(made.every_task, trust_remote_code=True)
    check_alike([row["names"]["entities"] for row in model.answer(tokenizer, TEXTS)], entities(saved))


@pytest.mark.slow
def test_one_graph_has_every_head(saved, tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    folder = export_bundle(saved, saved.bind(), tmp_path / "onnx")
    model = open_onnx(folder)
    texts = [*TEXTS, join_words(["a", "dull film", ",", "fine"])]
    found = compute(model, ["names", "mood"], [(text,) for text in texts])
    expected = outputs_of(saved, texts)
    assert found["names"].lengths().tolist() == expected.lengths().tolist()
    np.testing.assert_allclose(found["names"].values, expected.values, atol=1e-4)
    assert found["mood"].shape == (4, 2)
    answers = predict_texts(model, [(text,) for text in TEXTS], ["names", "others", "mood"])
    check_alike([row[0].to_json()["entities"] for row in answers], entities(saved))
    # Scored by the answers themselves, all of them are right but words that were cut off, which are said to be O.
    labels = Sequences(expected.values.argmax(1), expected.offsets)
    scored = score_examples(model, NAMES, Examples((texts,), labels))
    assert scored.examples == 4
    assert scored.metrics["precision"] == 1.0
    spec = spec_from_file_location("bundle", folder / "predict.py")
    bundle = module_from_spec(spec)
    spec.loader.exec_module(bundle)
    rows = bundle.Model(folder).predict(TEXTS)
    assert [answer["task"] for answer in rows[0]] == ["names", "others", "mood"]
    check_alike([row[0]["entities"] for row in rows], entities(saved))
