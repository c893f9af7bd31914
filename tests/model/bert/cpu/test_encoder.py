"""What `tests/model/bert/test_autograd.py` does not ask of both codes."""

import copy

import pytest
import torch

from model.bert.test_autograd import build, gradients
from model.compiled import compute_by


@pytest.fixture(params=["kernels", "torch"], autouse=True)
def means(request, monkeypatch):
    compute_by(request.param, monkeypatch)


@pytest.mark.parametrize("pool", ["pooler", "cls", "mean"])
@pytest.mark.parametrize("fixed", ["embeddings", "encoder.layer.0", "encoder.layer.1", "encoder", "pooler", ""])
def test_fixed_values_have_no_gradient_and_the_others_have_theirs(fixed, pool):
    model, inputs = build("cross", pool, torch.float64)
    plain = copy.deepcopy(model)
    plain.layout = None
    for each in (model, plain):
        for name, parameter in each.encoder.named_parameters():
            parameter.requires_grad_(not name.startswith(fixed))
    ours, theirs = (gradients(each, each("cross", inputs)) for each in (model, plain))
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, atol=1e-12, rtol=0, msg=name)


def test_memory_is_used_again_once_a_pass_was_followed_back():
    model, inputs = build("single", "cls", torch.float64)
    for _ in range(2):
        model("single", inputs).sum().backward()
        model("single", inputs).detach()
        with torch.inference_mode():
            model("single", inputs)
    assert len(model.memory.spaces) == 1


@pytest.mark.parametrize("pool", ["pooler", "cls", "mean"])
def test_what_a_pass_gave_survives_the_next_one(pool):
    model, inputs = build("single", pool, torch.float64)
    with torch.inference_mode():
        first = model.vectors("single", inputs)
        before = first.clone()
        model.vectors("single", type(inputs)(inputs.ids.flip(0), inputs.mask.flip(0), inputs.segments))
    assert torch.equal(first, before)


def test_a_second_pass_before_the_first_was_followed_back_disturbs_nothing():
    model, inputs = build("single", "cls", torch.float64)
    expected = gradients(model, model("single", inputs))
    model.zero_grad()
    first = model("single", inputs)
    model("single", type(inputs)(inputs.ids.flip(0), inputs.mask.flip(0), inputs.segments))
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients(model, first).items())


def test_kept_gradients_are_overwritten_and_not_added_to():
    model, inputs = build("single", "mean", torch.float64)
    expected = gradients(model, model("single", inputs))
    kept = {name: torch.full_like(p, 7.0) for name, p in model.encoder.named_parameters() if p.requires_grad}
    model.zero_grad()
    model.memory.gradients = kept
    model("single", inputs).sin().sum().backward()
    reached = [name for name in kept if f"encoder.{name}" in expected]
    assert 0 < len(reached) < len(kept)
    for name in reached:
        torch.testing.assert_close(kept[name], expected[f"encoder.{name}"], atol=0, rtol=0)
    assert all(p.grad is None for p in model.encoder.parameters())
