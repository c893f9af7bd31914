"""Several labels a text leave as plain transformers', our own modelling file's and ONNX's, with the same shares."""

from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer, pipeline

from export.test_hf import saved_model
from fedmtl.export.hf import export_hf
from fedmtl.export.onnx import export_bundle
from fedmtl.export.sentence_transformers import export_sentence_transformers
from fedmtl.predict.answers import to_predictions
from fedmtl.predict.onnx import compute, open_onnx, predict_texts, score_examples
from fedmtl.tasks.batches import TextShard
from fedmtl.tasks.examples import Examples
from fedmtl.tasks.task import HiddenLayer
from fedmtl.tasks.tokens import encode_texts
from fedmtl.training.local import predict_together
from model.tiny import KINDS, LENGTH, SINGLES, make_task, write_encoder

FITTED = (0.2, 0.5, 0.7)
MOODS = make_task("moods", kind="multilabel", pool="cls", labels=("anger", "fear", "joy"), metric="f1", fitted=FITTED)
VERDICT = make_task("verdict", pool="cls", labels=("bad", "good"))
TEXTS = [text for (text,) in SINGLES]


def outputs_of(saved):
    tokens = encode_texts(MOODS, (TEXTS,), saved.encoder.tokenizer, LENGTH)
    shard = TextShard(tokens, np.zeros(len(TEXTS)), np.arange(len(TEXTS)))
    return predict_together(saved.bind(), ["moods"], shard, 8, torch.device("cpu"), labelled=False)[0]["moods"]


def answers_of(saved):
    return to_predictions(MOODS, outputs_of(saved), [(text,) for text in TEXTS])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return saved_model(write_encoder("bert", tmp_path_factory.mktemp("bert")), [MOODS, VERDICT], 0.5)


@pytest.mark.parametrize(
    # The others take a second each.
    "kind",
    [kind if kind == "bert" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS],
)
def test_a_plain_class_gives_the_same_shares(kind, tmp_path):
    saved = saved_model(write_encoder(kind, tmp_path / kind), [MOODS], 0.5)
    made = export_hf(saved, saved.bind(), tmp_path / "out")
    if made.reasons:
        # Their plain classes have a hidden layer that this head has not.
        assert "has no equal in plain transformers" in made.reasons["moods"]
        return
    model = AutoModelForSequenceClassification.from_pretrained(made.folders["moods"])
    assert model.config.problem_type == "multi_label_classification"
    assert model.config.id2label == dict(enumerate(MOODS.labels))
    tokenizer = AutoTokenizer.from_pretrained(made.folders["moods"])
    with torch.inference_mode():
        given = tokenizer(TEXTS, return_tensors="pt", truncation=True, padding=True)
        shares = model(**given).logits.sigmoid().numpy()
    expected = [[answer.probabilities[label] for label in MOODS.labels] for answer in answers_of(saved)]
    np.testing.assert_allclose(shares, expected, atol=1e-5)
    # What transformers' own pipeline makes of the problem type.
    found = pipeline("text-classification", model=model, tokenizer=tokenizer, top_k=None)(TEXTS)
    for row, answer in zip(found, answers_of(saved), strict=True):
        assert {each["label"]: each["score"] for each in row} == pytest.approx(dict(answer.probabilities), abs=1e-5)


def test_the_modelling_file_gives_the_same_shares(saved, tmp_path):
    made = export_hf(saved, saved.bind(), tmp_path)
    model = AutoModel.from_pretrained(made.every_task, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(made.every_task, trust_remote_code=True)
    for row, answer in zip(model.answer(tokenizer, TEXTS), answers_of(saved), strict=True):
        assert row["moods"]["probabilities"] == pytest.approx(dict(answer.probabilities), abs=1e-5)
        assert set(row["verdict"]) == {"label", "probabilities"}


def test_a_hidden_layer_leaves_by_the_modelling_file(tmp_path):
    task = replace(MOODS, head=HiddenLayer(8, "gelu", 0.0))
    saved = saved_model(write_encoder("bert", tmp_path / "bert"), [task], 0.5)
    made = export_hf(saved, saved.bind(), tmp_path / "out")
    assert "hidden layer" in made.reasons["moods"]
    model = AutoModel.from_pretrained(made.every_task, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(made.every_task, trust_remote_code=True)
    for row, answer in zip(model.answer(tokenizer, TEXTS), answers_of(saved), strict=True):
        assert row["moods"]["probabilities"] == pytest.approx(dict(answer.probabilities), abs=1e-5)


@pytest.mark.slow
def test_one_graph_has_every_head_and_the_thresholds(saved, tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    folder = export_bundle(saved, saved.bind(), tmp_path / "onnx")
    model = open_onnx(folder)
    assert model.tasks["moods"].fitted == FITTED
    np.testing.assert_allclose(compute(model, ["moods"], SINGLES)["moods"], outputs_of(saved), atol=1e-4)
    expected = [set(answer.answer.labels) for answer in answers_of(saved)]
    assert all(0 < len(found) < len(MOODS.labels) for found in expected), "thresholds divide the labels"
    assert [set(row[0].answer.labels) for row in predict_texts(model, SINGLES, ["moods"])] == expected
    # Scored by its own answers, all of them are right.
    labels = np.array([[label in found for label in MOODS.labels] for found in expected], np.uint8)
    assert score_examples(model, MOODS, Examples((TEXTS,), labels)).metrics["subset_accuracy"] == 1.0
    spec = spec_from_file_location("bundle", folder / "predict.py")
    bundle = module_from_spec(spec)
    spec.loader.exec_module(bundle)
    rows = bundle.Model(folder).predict(TEXTS)
    np.testing.assert_allclose([row[0]["outputs"] for row in rows], outputs_of(saved), atol=1e-4)


def test_vectors_leave_with_a_head_that_gives_logits(saved, tmp_path):
    library = pytest.importorskip("sentence_transformers")
    made = export_sentence_transformers(saved, saved.bind(), tmp_path / "st", lambda usage: usage)
    assert made["moods"] == tmp_path / "st"
    model = library.SentenceTransformer(str(tmp_path / "st"))
    found = model.encode(TEXTS, output_value=None)
    np.testing.assert_allclose(np.stack([row["moods"].numpy() for row in found]), outputs_of(saved), atol=1e-4)
