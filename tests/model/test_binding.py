import json

import numpy as np
import pytest
import torch

from fedmtl.errors import ModelError
from fedmtl.model.multitask import BoundModel, Inputs
from fedmtl.sharing.plan import Key, SharingPlan, take_rows, used_rows
from fedmtl.sharing.weights import initial_weights

from .tiny import KINDS, PAIRS, SINGLES, encode, load, make_task, make_tokenizer, write_encoder

ALL = SharingPlan((("heads.*", "task"), ("*", "all")))


def sliced(model, weights, inputs):
    """The weights with the token rows of these inputs only, the rows, and the ids in the small table."""
    rows = used_rows([inputs.ids.numpy()], model.pad_id)
    key = Key("all", model.table)
    return {**weights, key: take_rows(weights[key], rows)}, rows


@pytest.mark.parametrize("kind", KINDS)
def test_a_compacted_table_gives_the_logits_and_gradients_of_the_full_one(folders, kind):
    task = make_task("pairs", text=("a", "b"), pool="mean")
    encoder, model = load(folders[kind], [task])
    # Rows of different length, so that padding is in the batch.
    inputs = encode(encoder.tokenizer, task, PAIRS)
    assert (inputs.ids == model.pad_id).any()
    weights = initial_weights(model, ALL)
    small, rows = sliced(model, weights, inputs)
    assert len(rows) < model.vocabulary_size

    full = BoundModel(model, ALL, ["pairs"], "c", weights)
    logits = full.use("pairs")("pairs", inputs)
    logits.square().sum().backward()
    compact = BoundModel(model, ALL, ["pairs"], "c", small, rows)
    again = compact.use("pairs")(
        "pairs", Inputs(torch.from_numpy(compact.index[inputs.ids.numpy()]), inputs.mask, inputs.segments)
    )
    again.square().sum().backward()

    torch.testing.assert_close(again, logits, rtol=0, atol=0)
    key = Key("all", model.table)
    torch.testing.assert_close(
        compact.parameters[key].grad, full.parameters[key].grad[torch.from_numpy(rows)], rtol=1e-6, atol=1e-8
    )
    outside = np.setdiff1d(np.arange(model.vocabulary_size), rows)
    assert full.parameters[key].grad[torch.from_numpy(outside)].abs().sum() == 0


def test_a_slice_that_would_move_counted_positions_is_refused(tmp_path):
    # This RoBERTa pads with one of its last ids, and counts positions from there.
    make = make_tokenizer("modernbert")
    folder = write_encoder("roberta", tmp_path / "late-pad")
    make.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    size = len(make)
    config |= {"pad_token_id": make.pad_token_id, "vocab_size": size, "max_position_embeddings": size + 40}
    (folder / "config.json").write_text(json.dumps(config))
    _, model = load(folder, [make_task(pool="cls")], initial="random")
    weights = initial_weights(model, ALL)
    rows = used_rows([np.array([9, 20])], model.pad_id)
    small = {**weights, Key("all", model.table): take_rows(weights[Key("all", model.table)], rows)}
    with pytest.raises(ModelError, match="vocabulary_slices: false"):
        BoundModel(model, ALL, ["single"], "c", small, rows)


def make_two():
    return [make_task("one", pool="cls"), make_task("two", pool="cls")]


def test_use_switches_the_values_of_layers_that_tasks_do_not_share(folders):
    encoder, model = load(folders["bert"], make_two())
    plan = SharingPlan((("heads.*", "task"), ("encoder.layer.1.*", "group"), ("*", "all")), ({"two": "late"},))
    weights = initial_weights(model, plan)
    inputs = encode(encoder.tokenizer, make_two()[0], SINGLES)
    name = "encoder.layer.1.output.dense.weight"
    assert {key.scope for key in weights if key.name == name} == {"task:one", "group:late"}
    before = BoundModel(model, plan, ["one", "two"], "c", weights).use("two")("two", inputs).detach()

    # Not the same added everywhere, which the norm that follows would take off again.
    weights[Key("task:one", name)] = weights[Key("task:one", name)] * 3.0
    bound = BoundModel(model, plan, ["one", "two"], "c", weights)
    changed = bound.use("one")("one", inputs).detach()
    assert torch.equal(bound.use("two")("two", inputs), before)
    assert torch.equal(bound.use("one")("one", inputs), changed)
    # Under the other task's values, task one's head sees other features.
    assert not torch.allclose(bound.use("two")("one", inputs), changed)


def test_gradients_land_on_the_values_of_the_task_in_use(folders):
    encoder, model = load(folders["bert"], make_two())
    plan = SharingPlan((("heads.*", "task"), ("encoder.layer.1.*", "task"), ("embeddings.*", "fixed"), ("*", "all")))
    bound = BoundModel(model, plan, ["one", "two"], "c", initial_weights(model, plan))
    inputs = encode(encoder.tokenizer, make_two()[0], SINGLES)
    bound.use("two")("two", inputs).square().sum().backward()
    moved = {key.scope for key, value in bound.parameters.items() if value.grad is not None and value.grad.any()}
    assert moved == {"all", "task:two"}
    fixed = [value for key, value in bound.parameters.items() if key.scope == "fixed"]
    assert fixed
    assert not any(value.requires_grad for value in fixed)


def test_training_a_bound_model_leaves_the_given_weights_alone(folders):
    _, model = load(folders["bert"], make_two())
    weights = initial_weights(model, ALL)
    bound = BoundModel(model, ALL, ["one"], "c", weights)
    with torch.no_grad():
        for parameter in bound.parameters.values():
            parameter.add_(1.0)
    key = Key("task:one", "heads.one.bias")
    assert weights[key].tolist() == [0.0, 0.0]
    assert bound.weights()[key].tolist() == [1.0, 1.0]
    assert {key.scope for key in bound.weights()} == {"all", "task:one"}


def test_two_bound_models_of_one_model_do_not_mix(folders):
    encoder, model = load(folders["bert"], make_two())
    inputs = encode(encoder.tokenizer, make_two()[0], SINGLES)
    weights = initial_weights(model, ALL)
    first = BoundModel(model, ALL, ["one"], "c", weights)
    expected = first.use("one")("one", inputs).detach()
    small, rows = sliced(model, {key: value + 1.0 for key, value in weights.items()}, inputs)
    BoundModel(model, ALL, ["one"], "c", small, rows)
    assert torch.equal(first.use("one")("one", inputs), expected)
