import pytest
import torch

from fedmtl.errors import ConfigError
from fedmtl.model.multitask import Head, Inputs, wants_pooler

from .tiny import KINDS, PAIRS, SINGLES, WIDTH, encode, load, make_task


def test_two_texts_apart_are_compared_by_exactly_five_features(folders):
    dual = make_task(text=("a", "b"), pair="dual", pool="mean")
    _, model = load(folders["bert"], [dual])
    # Two pairs, (3, 0)-(0, 4) and (1, 2)-(2, 4), in a space of two dimensions and zeros.
    vectors = torch.zeros(4, WIDTH)
    vectors[:, :2] = torch.tensor([[3.0, 0.0], [1.0, 2.0], [0.0, 4.0], [2.0, 4.0]])
    seen = []
    model.heads["single"].register_forward_hook(lambda module, given, output: seen.append(given[0]))
    model.head("single", vectors)
    (features,) = seen
    assert features.shape == (2, 4 * WIDTH + 1)
    u, v, difference, product = (features[:, start : start + 2].tolist() for start in range(0, 4 * WIDTH, WIDTH))
    assert u == [[3, 0], [1, 2]]
    assert v == [[0, 4], [2, 4]]
    assert difference == [[3, 4], [1, 2]]
    assert product == [[0, 0], [2, 8]]
    # cos((3,0),(0,4)) = 0; (1,2) and (2,4) point the same way; scaled by ten.
    torch.testing.assert_close(features[:, -1], torch.tensor([0.0, 10.0]))


def test_the_score_of_two_texts_apart_begins_as_their_cosine(folders):
    dual = make_task(text=("a", "b"), pair="dual", pool="mean", kind="regression")
    _, model = load(folders["bert"], [dual])
    u, v = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(0))
    scores = model.head("single", torch.cat([u, v]))
    torch.testing.assert_close(scores[:, 0], torch.cosine_similarity(u, v))


def test_each_way_of_pooling_takes_what_it_says(folders):
    tasks = [make_task(pool, pool=pool) for pool in ("pooler", "cls", "mean")]
    _, model = load(folders["bert"], tasks)
    hidden = torch.tensor([[[1.0], [2.0], [6.0], [100.0]], [[5.0], [100.0], [100.0], [100.0]]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    pooled = torch.tensor([[7.0], [8.0]])
    # mean: (1 + 2 + 6) / 3 = 3 and 5 / 1 = 5, without the padding's 100.
    expected = {"pooler": [[7.0], [8.0]], "cls": [[1.0], [5.0]], "mean": [[3.0], [5.0]]}
    assert {name: model.pool(name, hidden, pooled, mask).tolist() for name in expected} == expected


@pytest.mark.parametrize("pair", ["cross", "dual"])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_no_result(folders, kind, pair):
    task = make_task(text=("a", "b"), pair=pair, pool="mean")
    encoder, model = load(folders[kind], [task])
    inputs = encode(encoder.tokenizer, task, PAIRS)
    more = torch.full((len(inputs.ids), 5), model.pad_id)
    padded = Inputs(
        torch.cat([inputs.ids, more], 1),
        torch.cat([inputs.mask, 0 * more], 1),
        torch.cat([inputs.segments, 0 * more], 1),
    )
    together = model("single", inputs)
    torch.testing.assert_close(model("single", padded), together, rtol=0, atol=1e-5)
    alone = torch.cat([model("single", encode(encoder.tokenizer, task, [row])) for row in PAIRS])
    torch.testing.assert_close(alone, together, rtol=0, atol=1e-5)


def test_two_classes_have_one_or_two_outputs_and_a_score_has_one(folders):
    tasks = [
        make_task("two"),
        make_task("one", outputs=1),
        make_task("three", labels=("a", "b", "c")),
        make_task("score", kind="regression"),
    ]
    encoder, model = load(folders["bert"], tasks)
    inputs = encode(encoder.tokenizer, tasks[0], SINGLES)
    assert {task.name: model(task.name, inputs).shape[1] for task in tasks} == {
        "two": 2,
        "one": 1,
        "three": 3,
        "score": 1,
    }


def test_a_head_depends_on_seed_and_task_and_on_nothing_before_it():
    torch.manual_seed(1)
    first = Head(make_task("a"), 8, seed=0)
    torch.manual_seed(2)
    assert torch.equal(Head(make_task("a"), 8, seed=0).weight, first.weight)
    assert not torch.equal(Head(make_task("b"), 8, seed=0).weight, first.weight)
    assert not torch.equal(Head(make_task("a"), 8, seed=1).weight, first.weight)
    assert first.bias.tolist() == [0.0, 0.0]


def test_head_dropout_holds_in_training_only(folders):
    _, model = load(folders["bert"], [make_task("a", dropout=0.5)])
    vectors = torch.ones(2, 32)
    assert torch.equal(model.eval().head("a", vectors), model.head("a", vectors))
    assert not torch.equal(model.train().head("a", vectors), model.head("a", vectors))


@pytest.mark.parametrize("name", ["type", "values", "train", "weight", "zero_grad"])
def test_a_task_may_be_called_anything_that_torch_calls_its_own(folders, name):
    task = make_task(name)
    encoder, model = load(folders["bert"], [task])
    assert list(model.canonical())[-2:] == [f"heads.{name}.weight", f"heads.{name}.bias"]
    model(name, encode(encoder.tokenizer, task, SINGLES)).sum().backward()
    assert model.heads[name].bias.grad.tolist() == [4.0, 4.0]
    assert f"heads.{name}.bias" in dict(model.named_parameters())


def test_a_task_with_a_dot_in_its_name_is_refused(folders):
    with pytest.raises(ConfigError, match=r"tasks.v1.5: has a dot"):
        load(folders["bert"], [make_task("v1.5")])


@pytest.mark.parametrize(
    ("pools", "wanted"),
    [(["cls", "pooler"], True), (["auto", "pooler"], True), (["auto", "cls"], None), (["cls", "mean"], False)],
)
def test_the_pooler_is_wanted_by_a_task_that_asks_for_it(pools, wanted):
    assert wants_pooler({pool: make_task(pool, pool=pool) for pool in pools}) is wanted


def test_canonical_names_are_the_plain_encoders(folders):
    for kind in KINDS:
        encoder, model = load(folders[kind], [make_task(pool="mean")])
        plain = [name for name, _ in encoder.module.named_parameters()]
        assert list(model.canonical()) == [*plain, "heads.single.weight", "heads.single.bias"]
        assert model.token_table() is encoder.module.get_input_embeddings()


def test_moving_inputs_moves_every_part():
    inputs = Inputs(*(torch.zeros(1, 2) for _ in range(3)))
    moved = inputs.to(torch.device("meta"))
    assert {part.device.type for part in (moved.ids, moved.mask, moved.segments)} == {"meta"}


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_noise_on_the_embeddings_can_turn_one_word_into_another(folders, kind, plain):
    # Noise is E[great] - E[dull] at the word's place, so the encoder sees the other text; elsewhere there is none.
    task = make_task(pool="mean")
    encoder, model = load(folders[kind], [task])
    model.adds_gradients = True
    if plain:
        model.layout = None
    inputs = encode(encoder.tokenizer, task, [("the plot is dull",), ("a dull film and very long",)])
    dull, great = encoder.tokenizer.convert_tokens_to_ids(["dull", "great"])
    table = model.token_table().weight.detach()
    noise = (inputs.ids == dull).unsqueeze(-1) * (table[great] - table[dull])
    other = Inputs(torch.where(inputs.ids == dull, great, inputs.ids), inputs.mask, inputs.segments)
    torch.testing.assert_close(model("single", inputs, noise), model("single", other))
    assert torch.equal(model("single", inputs, 0 * noise), model("single", inputs))
