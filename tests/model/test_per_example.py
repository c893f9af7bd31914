"""Per-example norms and clipped sums against gradients of one example at a time, by autograd."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedmtl.model.bert.cpu.per_example import Owners, Squares, linear_squares
from fedmtl.model.multitask import Inputs, MultiTaskModel
from fedmtl.model.per_example import Clip, ExampleGradients
from fedmtl.tasks.batches import collate
from fedmtl.tasks.task import HiddenLayer
from fedmtl.training.local import to_tensors
from model import tiny
from model.compiled import compiled, compute_by
from model.tiny import KINDS
from training.small_client import CPU, CROSS, DUAL, SINGLE, make_shard, make_task, small_model

WIDE = Clip(1e9)


def batch_of(model: MultiTaskModel, task: str, folder: Path, number: int = 12) -> tuple[Inputs, Tensor]:
    shard = make_shard(model.tasks[task], folder)
    return to_tensors(collate(shard, shard.indices[:number], model.pad_id, None), CPU)


def losses_of(model: MultiTaskModel, task: str) -> Any:
    one = model.tasks[task]
    return lambda outputs, labels: one.kind_of.losses(one, outputs, labels)


def one_by_one(model: MultiTaskModel, task: str, inputs: Inputs, labels: Tensor, names: list[str]) -> list[Any]:
    """The gradients of every example, each by a pass of its own."""
    parameters = [getattr(*model.canonical()[name]) for name in names]
    found = []
    model.adds_gradients = True
    for number in range(len(labels)):
        own = Inputs(*(part[number :: len(labels)] for part in (inputs.ids, inputs.mask, inputs.segments)))
        loss = losses_of(model, task)(model(task, own), labels[number : number + 1]).sum()
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        found.append([torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)])
    model.adds_gradients = False
    return found


def norms(gradients: list[Any]) -> Tensor:
    return torch.stack([torch.stack([g.double().square().sum() for g in own]).sum().sqrt() for own in gradients])


def check(model: MultiTaskModel, task: str, inputs: Inputs, labels: Tensor, tolerance: float, **fixed: Any) -> None:
    """Every norm, from the sums of one clipped example each, and the sum of all clipped ones."""
    for name, (module, leaf) in model.canonical().items():
        getattr(module, leaf).requires_grad_(not any(name.startswith(prefix) for prefix in fixed.get("fixed", ())))
    trained = [name for name, at in model.canonical().items() if getattr(*at).requires_grad]
    made = ExampleGradients(model, task, trained)
    expected = one_by_one(model, task, inputs, labels, made.names)
    others = [name for name in trained if name not in made.names]
    for own in one_by_one(model, task, inputs, labels, others) if others else ():
        assert not any(gradient.any() for gradient in own)
    seen: list[Squares] = []

    class Seen(Clip):
        def factors(self, squares: Squares) -> Tensor:
            seen.append(squares)
            return super().factors(squares)

    into = {name: torch.full_like(getattr(*model.canonical()[name]), 7.0).detach() for name in made.names}
    true = norms(expected)
    bound = float(true.median())
    dtype = expected[0][0].dtype
    made.clipped(inputs, labels, losses_of(model, task), Seen(bound, 0.5, dtype), into)
    assert made.is_one_by_one is fixed.get("is_one_by_one", False)
    squares, aligned = (torch.cat([getattr(each, which) for each in seen]) for which in ("found", "aligned"))
    torch.testing.assert_close(squares.sqrt(), true, rtol=tolerance, atol=0)
    # Sums that are formed before they are measured have nothing that could cancel afterwards.
    assert fixed.get("is_formed", made.is_one_by_one) or (aligned >= 0.3 * squares).all()
    factors = Clip(bound, 0.5, dtype).factors(Squares(true.square(), aligned))
    torch.testing.assert_close(
        factors, 0.5 * (bound / true).clamp(max=1.0), rtol=2e-5 if tolerance < 1e-9 else 5e-3, atol=0
    )
    assert factors.min() < factors.max()
    for number, name in enumerate(made.names):
        total = sum(own[number] * factor.to(own[number].dtype) for own, factor in zip(expected, factors, strict=True))
        torch.testing.assert_close(into[name], total, rtol=max(tolerance, 1e-9), atol=tolerance * bound)


HIDDEN = make_task("single", pool="mean", head=HiddenLayer(32, "tanh", 0.0))
TASKS = {
    "pooler": SINGLE, "cls pair": CROSS, "dual": DUAL, "mean": make_task("single", pool="mean"), "hidden": HIDDEN,
    "dual cls": make_task("dual", text=("a", "b"), pair="dual", pool="cls"),
}  # fmt: skip


@pytest.mark.parametrize("means", ["kernels", "torch", "called"])
@pytest.mark.parametrize("kind", list(TASKS))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_norms_and_sums_are_those_of_one_example_at_a_time(
    kind: str, means: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if means == "called":
        # As on a GPU, by modules.
        monkeypatch.setattr(MultiTaskModel, "writes_gradients", property(lambda self: False))
    else:
        compute_by(means, monkeypatch)
    task = TASKS[kind]
    model = small_model(task, dtype=dtype)
    inputs, labels = batch_of(model, task.name, tmp_path)
    check(model, task.name, inputs, labels, 1e-10 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("means", ["kernels", "torch", "called"])
def test_an_example_with_several_labels_is_one_example(
    means: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The losses of all of a text's labels are added up before there is a norm."""
    if means == "called":
        monkeypatch.setattr(MultiTaskModel, "writes_gradients", property(lambda self: False))
    else:
        compute_by(means, monkeypatch)
    inputs, _ = batch_of(small_model(TASKS["mean"]), "single", tmp_path)
    labels = (torch.arange(12 * 3).view(12, 3) % 5 < 2).to(torch.uint8)
    assert set(labels.sum(1).tolist()) == {0, 1, 2}
    several = make_task("single", pool="mean", kind="multilabel", labels=("a", "b", "c"), metric="f1")
    check(small_model(several, dtype=torch.float64), "single", inputs, labels, 1e-10)


# Of what is not trained there is no norm, and no work. Biases and norms alone, no tables, the head alone, odd choices.
FIXED: dict[str, tuple[str, ...]] = {
    "table": ("embeddings.word",),
    "embeddings": ("embeddings.",),
    "encoder": ("embeddings.", "encoder.", "pooler."),
    "a key and a value": ("encoder.layer.1.attention.self.key.weight", "encoder.layer.0.attention.self.value.bias"),
    "first layer": ("encoder.layer.0.",),
}


@pytest.mark.parametrize("means", ["kernels", "torch"])
@pytest.mark.parametrize("fixed", list(FIXED))
@pytest.mark.parametrize("kind", ["pooler", "dual"])
def test_what_is_fixed_has_no_norm(
    kind: str, fixed: str, means: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_by(means, monkeypatch)
    task = TASKS[kind]
    model = small_model(task)
    inputs, labels = batch_of(model, task.name, tmp_path)
    check(model, task.name, inputs, labels, 1e-10, fixed=FIXED[fixed])


@pytest.mark.parametrize("means", ["kernels", "torch"])
def test_biases_and_norms_alone(means: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compute_by(means, monkeypatch)
    model = small_model(SINGLE)
    weights = [name for name in model.canonical() if name.endswith("weight") and "Norm" not in name]
    inputs, labels = batch_of(model, "single", tmp_path)
    check(model, "single", inputs, labels, 1e-10, fixed=tuple(weights), is_formed=True)


@pytest.mark.parametrize("number", [1, 2])
def test_a_batch_may_have_one_example(number: int, tmp_path: Path) -> None:
    model = small_model(DUAL)
    inputs, labels = batch_of(model, "dual", tmp_path, number)
    made = ExampleGradients(model, "dual", list(model.canonical()))
    into = {name: torch.empty_like(getattr(*model.canonical()[name])).detach() for name in made.names}
    made.clipped(inputs, labels, losses_of(model, "dual"), WIDE, into)
    expected = one_by_one(model, "dual", inputs, labels, made.names)
    for at, name in enumerate(made.names):
        torch.testing.assert_close(into[name], sum(own[at] for own in expected))


def test_a_text_of_many_tokens_has_its_norm_from_the_gradient_itself(tmp_path: Path) -> None:
    # 32 columns in and out: beyond 2 * 32 * 32 / 64 = 32 tokens, products between tokens take longer.
    inputs, gradient = torch.randn(90, 32, dtype=torch.float64), torch.randn(90, 32, dtype=torch.float64)
    owners = Owners.of_tokens(torch.arange(90) // 80, 2)
    for kernels in (None, compiled(torch.float64)):
        squares = Squares.of_none(2)
        linear_squares(inputs, gradient, owners, squares, kernels, bias=True)
        for owner, part in enumerate((slice(0, 80), slice(80, 90))):
            weight, bias = gradient[part].t() @ inputs[part], gradient[part].sum(0)
            torch.testing.assert_close(
                squares.found[owner], weight.square().sum() + bias.square().sum(), rtol=1e-12, atol=0
            )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pair", [None, "dual"])
def test_any_encoder(kind: str, pair: str | None, tmp_path: Path) -> None:
    more = {} if pair is None else {"text": ("a", "b"), "pair": "dual"}
    task = tiny.make_task(pool="cls", **more)
    encoder, model = tiny.load(tiny.write_encoder(kind, tmp_path), [task])
    rows = tiny.SINGLES if pair is None else tiny.PAIRS
    inputs = tiny.encode(encoder.tokenizer, task, rows)
    # MPNet adds one table of relative positions to all rows at once.
    check(model.double(), "single", inputs, torch.tensor([0, 1, 1, 0]), 1e-10, is_one_by_one=kind == "mpnet")


@pytest.mark.parametrize("added", [{"lora": {"rank": 2}}, {"adapters": {"kind": "pals", "size": 8, "heads": 2}}])
def test_lora_and_adapters(added: dict[str, Any], tmp_path: Path) -> None:
    task = tiny.make_task()
    encoder, model = tiny.load(tiny.write_encoder("bert", tmp_path), [task], **added)
    for module, leaf in model.canonical().values():
        # Fresh ones are zero, and have no gradient to tell apart.
        getattr(module, leaf).data += 0.1 * torch.randn_like(getattr(module, leaf))
    inputs = tiny.encode(encoder.tokenizer, task, tiny.SINGLES)
    check(model.double(), "single", inputs, torch.tensor([0, 1, 1, 0]), 1e-10)


@pytest.mark.parametrize("seed", range(5))
def test_no_example_exceeds_the_bound(seed: int, tmp_path: Path) -> None:
    """In float32, whatever the scale of its gradient: the sum of one example is its clipped gradient."""
    torch.manual_seed(seed)
    model = small_model(SINGLE, dtype=torch.float32)
    made = ExampleGradients(model, "single", list(model.canonical()))
    into = {name: torch.empty_like(getattr(*model.canonical()[name])).detach() for name in made.names}
    for number in range(3):
        shard = make_shard(SINGLE, tmp_path)
        own = to_tensors(collate(shard, shard.indices[[4 * seed % 12 + number]], model.pad_id, None), CPU)
        size = 10.0 ** (2 * seed - 4)
        losses = losses_of(model, "single")
        made.clipped(*own, lambda *given, size=size, losses=losses: size * losses(*given), Clip(0.7), into)
        norm = sum(float(value.double().square().sum()) for value in into.values()) ** 0.5
        assert norm <= 0.7
