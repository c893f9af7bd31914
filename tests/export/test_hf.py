import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from fedmtl.export.hf import HIDDEN_LAYOUTS, LAYOUTS, export_hf
from fedmtl.model.encoder import describe_encoder
from fedmtl.model.multitask import build_model
from fedmtl.model.saved import SavedModel
from fedmtl.sharing.plan import Key, SharingPlan
from fedmtl.sharing.weights import initial_weights
from fedmtl.tasks.task import HiddenLayer
from model.tiny import KINDS, LENGTH, PAIRS, SINGLES, encode, load, make_task, write_encoder

PLAN = SharingPlan((("heads.*", "task"), ("*", "all")))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("encoders")
    return {kind: write_encoder(kind, root / kind) for kind in KINDS}


def make_tasks(pool):
    return [
        make_task("two", pool=pool, labels=("negative", "positive")),
        make_task("one", pool=pool, outputs=1, text=("a", "b"), labels=("other", "same")),
        make_task("three", pool=pool, text=("a", "b"), labels=("x", "y", "z")),
        make_task("score", pool=pool, kind="regression", text=("a", "b"), score_range=(1.0, 5.0)),
    ]


def saved_model(folder, tasks, head_scale):
    """A model whose heads are as large as trained ones."""
    encoder, model = load(folder, tasks)
    weights = initial_weights(model, PLAN)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for key in weights:
            if key.name.startswith("heads."):
                weights[key] = head_scale * torch.randn_like(weights[key])
    return SavedModel(model, encoder, model.tasks, PLAN, weights, LENGTH)


def rows_of(task):
    return PAIRS if task.is_pair else SINGLES


def scale_hidden(saved, largest):
    """Stretch the last norm, so that hidden states reach about `largest`."""
    norms = [name.removesuffix("weight") for name in saved.model.canonical() if name.endswith("orm.weight")]
    # ALBERT names the norm of its output before those inside.
    last = next((name for name in norms if "full_layer" in name), norms[-1])
    factor = largest / largest_hidden(saved)
    for key in (Key("all", last + "weight"), Key("all", last + "bias")):
        saved.weights[key] = saved.weights[key] * factor
    assert 0.8 * largest < largest_hidden(saved) < 1.2 * largest


def largest_hidden(saved):
    task = next(iter(saved.tasks.values()))
    inputs = encode(saved.encoder.tokenizer, task, rows_of(task))
    return saved.bind().use(task.name).encode(task.name, inputs)[0].abs().max().item()


@torch.inference_mode()
def our_answers(bound, tokenizer, task):
    """Probabilities of the labels, or the score in its own range."""
    logits = bound.use(task.name)(task.name, encode(tokenizer, task, rows_of(task))).double()
    if task.kind == "regression":
        low, high = task.score_range
        return low + (high - low) * logits
    if task.outputs == 1:
        return torch.cat([1 - logits.sigmoid(), logits.sigmoid()], dim=1)
    return logits.softmax(1)


@torch.inference_mode()
def plain_answers(folder, task):
    """The same from plain transformers, with every input its tokenizer gives."""
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    columns = [list(column) for column in zip(*rows_of(task), strict=True)]
    logits = model(**tokenizer(*columns, padding=True, truncation=True, return_tensors="pt")).logits.double()
    return logits if task.kind == "regression" else logits.softmax(1)


@pytest.mark.parametrize(("kind", "pool"), LAYOUTS)
def test_plain_transformers_gives_our_predictions(folders, tmp_path, kind, pool):
    tasks = make_tasks(pool)
    saved = saved_model(folders[kind], tasks, head_scale=0.2)
    bound = saved.bind()
    written = export_hf(saved, bound, tmp_path).folders
    assert written == {task.name: tmp_path / task.name for task in tasks}
    for task in tasks:
        ours = our_answers(bound, saved.encoder.tokenizer, task)
        assert ours.std(0).max() > 100 * 1e-5  # the texts are told apart
        torch.testing.assert_close(plain_answers(written[task.name], task), ours, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", HIDDEN_LAYOUTS)
def test_a_hidden_layer_becomes_the_one_that_the_class_has(folders, tmp_path, kind):
    layer = HiddenLayer(activation=HIDDEN_LAYOUTS[kind][0])
    tasks = [replace(task, head=layer) for task in make_tasks("cls")]
    saved = saved_model(folders[kind], tasks, head_scale=0.2)
    bound = saved.bind()
    written = export_hf(saved, bound, tmp_path).folders
    for task in tasks:
        ours = our_answers(bound, saved.encoder.tokenizer, task)
        assert ours.std(0).max() > 100 * 1e-5
        torch.testing.assert_close(plain_answers(written[task.name], task), ours, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "pool", "layer", "reason"),
    [
        ("distilbert", "cls", HiddenLayer(activation="tanh"), "is 32 wide with tanh on `pool: cls`; plain"),
        ("distilbert", "cls", HiddenLayer(8), "is 8 wide with relu on `pool: cls`; plain"),
        ("bert", "pooler", HiddenLayer(activation="tanh"), "is 32 wide with tanh on `pool: pooler`; plain"),
        ("modernbert", "cls", HiddenLayer(), "which modernbert has no equal of in plain transformers"),
    ],
)
def test_another_hidden_layer_is_no_layer_of_the_class(folders, tmp_path, kind, pool, layer, reason):
    saved = saved_model(folders[kind], [make_task(pool=pool, head=layer)], 0.2)
    made = export_hf(saved, saved.bind(), tmp_path)
    assert reason in made.reasons["single"]
    assert not (tmp_path / "single").exists()
    assert made.folders["single"] == made.every_task


@pytest.mark.parametrize(("kind", "pool"), LAYOUTS)
def test_the_pipeline_gives_our_label_and_score(folders, tmp_path, kind, pool):
    tasks = make_tasks(pool)
    saved = saved_model(folders[kind], tasks, head_scale=0.2)
    bound = saved.bind()
    written = export_hf(saved, bound, tmp_path).folders
    for task in tasks:
        ours = our_answers(bound, saved.encoder.tokenizer, task)
        answer = pipeline("text-classification", model=str(written[task.name]), device="cpu")
        given = [{"text": a, "text_pair": b} for a, b in PAIRS] if task.is_pair else [text for (text,) in SINGLES]
        for found, wanted in zip(answer(given), ours, strict=True):
            assert found["label"] == ("score" if task.kind == "regression" else task.labels[wanted.argmax()])
            assert found["score"] == pytest.approx(wanted.max().item(), abs=1e-5)


@pytest.mark.parametrize(("kind", "pool"), LAYOUTS)
def test_large_hidden_states_and_heads_lose_no_precision(folders, tmp_path, kind, pool):
    # Hidden states up to 20 and heads of 0.5: an output is a sum of 32 terms up to about 20, so float32 itself
    # leaves about 32 * 20 * 2^-24 = 4e-5 open, times 4 in a range from 1 to 5.
    tasks = make_tasks(pool)
    saved = saved_model(folders[kind], tasks, head_scale=0.5)
    scale_hidden(saved, 20.0)
    bound = saved.bind()
    written = export_hf(saved, bound, tmp_path).folders
    for task in tasks:
        ours = our_answers(bound, saved.encoder.tokenizer, task)
        atol = 2e-5 if task.kind == "regression" else 1e-5
        torch.testing.assert_close(plain_answers(written[task.name], task), ours, rtol=0, atol=atol)


def test_what_plain_classes_cannot_do_has_its_reason_and_the_folder_of_all_tasks(folders, tmp_path):
    dual = make_task("dual", text=("a", "b"), pair="dual", pool="cls")
    mean = make_task("mean", pool="mean")
    good = make_task("good", pool="cls")
    saved = saved_model(folders["bert"], [dual, mean, good], 0.2)
    made = export_hf(saved, saved.bind(), tmp_path)
    assert made.folders == {"dual": made.every_task, "mean": made.every_task, "good": tmp_path / "good"}
    assert made.reasons == {"dual": "pairs are encoded apart (`pair: dual`)", "mean": "pooled by the mean"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["every-task", "good"]

    saved = saved_model(folders["modernbert"], [good], 0.2)
    made = export_hf(saved, saved.bind(), tmp_path / "other")
    assert made.reasons["good"] == "modernbert with `pool: cls` has no equal in plain transformers"


def test_more_labels_than_the_layer_has_room_for_are_refused(folders, tmp_path):
    # 32 wide: 16 outputs with both signs fill it.
    for num, fits in ((16, True), (17, False)):
        task = make_task(str(num), pool="cls", labels=tuple(f"l{n}" for n in range(num)))
        saved = saved_model(folders["distilbert"], [task], 0.2)
        bound = saved.bind()
        made = export_hf(saved, bound, tmp_path)
        if fits:
            ours = our_answers(bound, saved.encoder.tokenizer, task)
            torch.testing.assert_close(plain_answers(made.folders[task.name], task), ours, rtol=0, atol=1e-5)
        else:
            assert made.reasons == {"17": "17 labels do not fit: the layer before the last takes at most 16"}
            assert not (tmp_path / "17").exists()


def test_each_task_is_written_with_its_own_values(folders, tmp_path):
    tasks = [make_task("one", pool="cls"), make_task("two", pool="cls")]
    plan = SharingPlan((("heads.*", "task"), ("encoder.layer.1.*", "task"), ("*", "all")))
    encoder, model = load(folders["bert"], tasks)
    weights = initial_weights(model, plan)
    key = Key("task:two", "encoder.layer.1.output.dense.bias")
    weights[key] = weights[key] + torch.arange(32.0)
    saved = SavedModel(model, encoder, model.tasks, plan, weights, LENGTH)
    bound = saved.bind()
    written = export_hf(saved, bound, tmp_path).folders
    for task in tasks:
        ours = our_answers(bound, encoder.tokenizer, task)
        torch.testing.assert_close(plain_answers(written[task.name], task), ours, rtol=0, atol=1e-5)


def test_long_texts_are_cut_where_ours_are(folders, tmp_path):
    task = make_task(pool="cls")
    saved = saved_model(folders["bert"], [task], 0.2)
    bound = saved.bind()
    written = export_hf(saved, bound, tmp_path).folders["single"]
    long = "a very long and dull plot " * 20
    with torch.inference_mode():
        logits = bound.use("single")("single", encode(saved.encoder.tokenizer, task, [(long,)])).double()
    (found,) = pipeline("text-classification", model=str(written), device="cpu")([long], truncation=True)
    assert found["score"] == pytest.approx(logits.softmax(1).max().item(), abs=1e-5)


@pytest.mark.parametrize(("kind", "gives"), [("bert", True), ("distilbert", False), ("roberta", False)])
def test_the_tokenizer_gives_segments_where_the_encoder_had_them(folders, tmp_path, kind, gives):
    # These tokenizers were saved without saying which inputs they give.
    assert "model_input_names" not in json.loads((folders[kind] / "tokenizer_config.json").read_text())
    saved = saved_model(folders[kind], [make_task(pool="cls", text=("a", "b"))], 0.2)
    written = export_hf(saved, saved.bind(), tmp_path).folders["single"]
    assert ("token_type_ids" in AutoTokenizer.from_pretrained(written)(*PAIRS[0])) is gives


def test_an_export_leaves_the_saved_model_as_it_was(folders, tmp_path):
    task = make_task(pool="cls")
    saved = saved_model(folders["bert"], [task], 0.2)
    bound = saved.bind()
    before = our_answers(bound, saved.encoder.tokenizer, task)
    labels, names = saved.encoder.module.config.num_labels, list(saved.encoder.tokenizer.model_input_names)
    export_hf(saved, bound, tmp_path)
    assert torch.equal(our_answers(bound, saved.encoder.tokenizer, task), before)
    assert saved.encoder.module.config.num_labels == labels
    assert saved.encoder.tokenizer.model_input_names == names
    again = describe_encoder(saved.encoder.module, saved.encoder.tokenizer, "again", has_pooler=False)
    assert list(build_model(again, {"single": task}, 0).canonical()) == list(saved.model.canonical())
