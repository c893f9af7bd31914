"""A model that reads long texts in windows answers alike in torch, ONNX, the bundle and our own modelling file."""

from importlib.util import module_from_spec, spec_from_file_location

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from compress.onnx_models import make_saved
from fedmtl.export import bundle_predict, modeling_fedmtl
from fedmtl.export.bundle_predict import cut, most_central
from fedmtl.export.hf import export_hf
from fedmtl.export.onnx import export_bundle
from fedmtl.export.sentence_transformers import export_sentence_transformers
from fedmtl.model.multitask import BoundModel
from fedmtl.predict.answers import to_prediction
from fedmtl.predict.onnx import compute, open_onnx, predict_texts
from fedmtl.tasks.batches import TextShard
from fedmtl.tasks.task import HiddenLayer, Task, Windows
from fedmtl.tasks.tokens import encode_texts
from fedmtl.tasks.windows import NOWHERE, central, cut_text
from fedmtl.training.local import predict_together
from model.tiny import LENGTH, make_task, write_encoder

LONG = "the plot is dull and the film is very long "
TEXTS = [LONG * 4, "fine", LONG * 12, "a good film"]
OTHERS = ["the same", LONG * 5, LONG, "what is not"]


def make_tasks(pool):
    windows = Windows(stride=9, most=5, pool=pool)
    return [
        make_task("mood", pool="cls", labels=("bad", "good"), windows=windows),
        make_task("deep", pool="mean", kind="regression", head=HiddenLayer(8, "gelu"), windows=windows),
        make_task("joined", pool="cls", text=("a", "b"), outputs=1, windows=windows),
        make_task("apart", pool="mean", text=("a", "b"), pair="dual", labels=("x", "y", "z"), windows=windows),
        Task("names", "tagging", ("text",), "tags", "f1", labels=("X", "Y"), windows=windows),
    ]


def rows_of(task):
    return list(zip(TEXTS, OTHERS, strict=True)) if task.is_pair else [(text,) for text in TEXTS]


def outputs_of(saved, task, texts=TEXTS):
    """What our model gives, by the batches of a run."""
    bound = BoundModel(saved.model, saved.plan, list(saved.tasks), "", saved.weights, read=True)
    columns = (texts, OTHERS) if task.is_pair else (texts,)
    tokens = encode_texts(task, columns, saved.encoder.tokenizer, LENGTH)
    shard = TextShard(tokens, np.zeros(len(texts)), np.arange(len(texts)))
    return predict_together(bound, [task.name], shard, 3, torch.device("cpu"), labelled=False)[0][task.name]


def answers_of(saved, task):
    return [to_prediction(task, row, texts) for row, texts in zip(outputs_of(saved, task), rows_of(task), strict=True)]


def check_alike(found, expected):
    """Two answers in JSON, up to rounding."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if name == "entities":
            for one, other in zip(found[name], value, strict=True):
                check_alike(one, other)
        else:
            assert found[name] == (value if isinstance(value, str) else pytest.approx(value, abs=1e-5)), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_encoder("bert", tmp_path_factory.mktemp("bert"))


def lengths_of(text_of, most, windows, from_left):
    """Both cuts: ours and that of files which leave the house."""
    ours = cut_text(np.array(text_of), most, windows, from_left=from_left)
    given = {"length": most, "stride": windows.stride, "most": windows.most, "from_left": from_left}
    theirs = [None if text == NOWHERE else text for text in text_of]
    return ours, cut(theirs, given), modeling_fedmtl._cut(theirs, given)


@pytest.mark.parametrize("seed", range(40))
def test_what_leaves_the_house_cuts_and_looks_up_as_we_do(seed):
    random = np.random.Generator(np.random.PCG64(seed))
    first, second = random.integers(0, 30, 2)
    text_of = [NOWHERE, *[0] * first, NOWHERE] + ([*[1] * second, NOWHERE] if seed % 2 else [])
    windows = Windows(int(random.integers(1, 12)) if seed % 3 else None, int(random.integers(1, 7)))
    ours, *others = lengths_of(text_of, int(random.integers(6, 16)), windows, from_left=seed % 5 == 0)
    for theirs in others:
        assert [each.tolist() for each in ours.columns] == theirs
    begins = np.cumsum([0, *map(len, ours.columns)])
    slots = central(ours, len(text_of)).tolist()
    for find in (most_central, modeling_fedmtl._most_central):
        found = find(others[0], len(text_of))
        assert [NOWHERE if at is None else begins[at[0]] + at[1] for at in found] == slots
    assert bundle_predict.cut is cut


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["mean", "max", "attention"])
def test_the_graph_and_the_bundle_answer_as_the_model_does(folder, pool, tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    saved = make_saved(folder, make_tasks(pool))
    bundle = export_bundle(saved, saved.bind(), tmp_path / "bundle")
    model = open_onnx(bundle, threads=1)
    assert model.inputs == ("input_ids", "attention_mask", "token_type_ids", "windows")
    for task in saved.tasks.values():
        expected = outputs_of(saved, task)
        for batch in (1, 3, 32):
            found = compute(model, [task.name], rows_of(task), batch)[task.name]
            ours, theirs = (getattr(each, "values", each) for each in (found, expected))
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
    spec = spec_from_file_location("bundled", bundle / "predict.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    alone = module.Model()
    for rows in (rows_of(saved.tasks["mood"]), rows_of(saved.tasks["apart"])):
        for batch in (rows, rows[1:2]):
            theirs, ours = (
                alone.predict(batch),
                predict_texts(model, batch, [each["task"] for each in alone.predict(batch)[0]]),
            )
            for one, other in zip(theirs, ours, strict=True):
                for answer, expected in zip(one, other, strict=True):
                    check_alike({**answer}, expected.to_json())


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["mean", "max", "attention"])
def test_transformers_read_windows_by_our_modelling_file(folder, pool, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    saved = make_saved(folder, make_tasks(pool))
    export = export_hf(saved, saved.bind(), tmp_path / "hf")
    assert set(export.folders.values()) == {export.every_task}
    assert "windows" in export.reasons["mood"]
    tokenizer = AutoTokenizer.from_pretrained(export.every_task, trust_remote_code=True)
    model = AutoModel.from_pretrained(export.every_task, trust_remote_code=True).eval()
    found = [
        {**one, **two}
        for one, two in zip(model.answer(tokenizer, TEXTS), model.answer(tokenizer, TEXTS, OTHERS), strict=True)
    ]
    for task in saved.tasks.values():
        for each, expected in zip(found, answers_of(saved, task), strict=True):
            check_alike({"task": task.name, **each[task.name]}, expected.to_json())


def test_sentence_transformers_refuse_windows_by_name(folder, tmp_path):
    saved = make_saved(folder, make_tasks("mean")[:1])
    found = export_sentence_transformers(saved, saved.bind(), tmp_path / "st", lambda usage: usage)
    assert "windows (`model.windows`)" in found["mood"]
    assert not (tmp_path / "st").exists()
