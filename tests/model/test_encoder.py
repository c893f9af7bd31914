import json
import shutil
from dataclasses import replace

import pytest
import torch
from transformers import BertConfig, BertModel

from fedmtl.config import ModelConfig
from fedmtl.errors import ModelError
from fedmtl.model import encoder
from fedmtl.model.encoder import load_encoder, load_tokenizer
from fedmtl.model.multitask import build_model

from .tiny import (
    KINDS,
    LENGTH,
    PAIRS,
    SINGLES,
    WIDTH,
    WITH_POOLER,
    encode,
    load,
    make_task,
    make_tokenizer,
    write_encoder,
)

WAYS = [(kind, pool) for kind in KINDS for pool in ("pooler", "cls", "mean") if pool != "pooler" or kind in WITH_POOLER]


def config_of(folder, **keys):
    return ModelConfig(server_model=str(folder), **{"max_length": LENGTH, **keys})


def bits(encoder):
    return {name: value.clone() for name, value in encoder.module.named_parameters()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(("kind", "pool"), WAYS)
def test_every_encoder_runs_one_text_a_joint_pair_and_two_texts_apart(folders, kind, pool):
    single = make_task(pool=pool)
    cross = make_task("cross", text=("a", "b"), pool=pool)
    dual = make_task("dual", kind="regression", text=("a", "b"), pair="dual", pool=pool)
    encoder, model = load(folders[kind], [single, cross, dual])
    for task, rows, outputs in ((single, SINGLES, 2), (cross, PAIRS, 2), (dual, PAIRS, 1)):
        model.zero_grad()
        logits = model(task.name, encode(encoder.tokenizer, task, rows))
        assert logits.shape == (4, outputs)
        assert logits.isfinite().all()
        logits.square().sum().backward()
        trained = {name for name, value in model.named_parameters() if value.grad is not None and value.grad.any()}
        assert f"encoder.{encoder.table}" in trained
        assert f"heads.{task.name}.weight" in trained
        assert not any(name.startswith("heads.") and task.name not in name for name in trained)
        assert any("pooler" in name for name in trained) == (pool == "pooler")


@pytest.mark.parametrize(
    ("kind", "takes_segments"),
    [
        ("bert", True),
        ("albert", True),
        ("electra", True),
        ("roberta", False),
        ("distilbert", False),
        ("modernbert", False),
        ("mpnet", False),
    ],
)
def test_only_inputs_that_the_encoder_knows_are_fed(folders, kind, takes_segments):
    cross = make_task(text=("a", "b"), pool="cls")
    encoder, model = load(folders[kind], [cross])
    inputs = encode(encoder.tokenizer, cross, PAIRS)
    plain, joint = (
        model("single", replace(inputs, segments=segments))
        for segments in (torch.zeros_like(inputs.ids), (inputs.ids > 10).long())
    )
    assert torch.equal(plain, joint) is not takes_segments
    assert encoder.accepts == {"input_ids", "attention_mask"} | ({"token_type_ids"} if takes_segments else set())


def test_the_files_weights_are_the_encoders(folders):
    saved = BertModel.from_pretrained(folders["bert"])
    encoder = load_encoder(config_of(folders["bert"]), seed=1)
    assert same(bits(encoder), dict(saved.named_parameters()))
    assert encoder.hidden_size == WIDTH
    assert encoder.table == "embeddings.word_embeddings.weight"
    assert encoder.has_pooler


@pytest.mark.parametrize("kind", WITH_POOLER)
def test_a_pooler_that_was_not_saved_is_dropped_or_made_by_seed(tmp_path, kind):
    folder = write_encoder(kind, tmp_path / kind, pooler=False)
    auto, model = load(folder, [make_task()])
    assert not auto.has_pooler
    assert model.pools == {"single": "mean"}
    assert not any("pooler" in name for name in bits(auto))

    fresh = [load(folder, [make_task(pool="pooler")], seed=seed)[0] for seed in (3, 3, 4)]
    poolers = [{name: value for name, value in bits(one).items() if "pooler" in name} for one in fresh]
    assert len(poolers[0]) == 2
    assert same(poolers[0], poolers[1])
    assert not same(poolers[0], poolers[2])
    assert same(bits(auto), {name: value for name, value in bits(fresh[0]).items() if "pooler" not in name})


def test_a_saved_pooler_is_taken_under_auto_and_dropped_where_no_task_uses_it(folders):
    auto, model = load(folders["bert"], [make_task()])
    assert auto.has_pooler
    assert model.pools == {"single": "pooler"}
    unused, _ = load(folders["bert"], [make_task(pool="cls")])
    assert set(bits(auto)) - set(bits(unused)) == {"pooler.dense.weight", "pooler.dense.bias"}


@pytest.mark.parametrize("kind", sorted(set(KINDS) - set(WITH_POOLER)))
def test_a_pooler_cannot_be_asked_of_an_encoder_that_never_has_one(folders, kind):
    with pytest.raises(ModelError, match=r"has no pooler; write `pool: cls` or `pool: mean`"):
        load(folders[kind], [make_task(pool="pooler")])


@pytest.mark.parametrize("initial", ["pretrained", "random"])
def test_the_same_seed_gives_the_same_bits_whatever_was_drawn_before(folders, initial):
    config = config_of(folders["electra"], initial=initial)
    torch.manual_seed(1)
    first = bits(load_encoder(config, seed=5))
    torch.manual_seed(2)
    torch.rand(100)
    before = torch.get_rng_state()
    assert same(bits(load_encoder(config, seed=5)), first)
    assert torch.equal(torch.get_rng_state(), before)
    assert same(bits(load_encoder(config, seed=6)), first) == (initial == "pretrained")


def test_a_random_start_keeps_the_shape_and_not_the_values(folders):
    saved = bits(load_encoder(config_of(folders["bert"]), seed=0))
    random = bits(load_encoder(config_of(folders["bert"], initial="random"), seed=0))
    assert {name: value.shape for name, value in random.items()} == {name: value.shape for name, value in saved.items()}
    table = "embeddings.word_embeddings.weight"
    assert not torch.allclose(random[table], saved[table])
    assert random["encoder.layer.0.output.LayerNorm.weight"].tolist() == [1.0] * WIDTH


@pytest.mark.parametrize("initial", ["pretrained", "random"])
def test_files_in_half_precision_become_float32(tmp_path, initial):
    folder = write_encoder("bert", tmp_path / "half")
    BertModel.from_pretrained(folder).half().save_pretrained(folder)
    encoder = load_encoder(config_of(folder, initial=initial), seed=0)
    assert {value.dtype for value in bits(encoder).values()} == {torch.float32}


def test_a_name_of_a_random_encoder_gives_its_shape():
    encoder = load_encoder(ModelConfig(server_model="random-3x64", max_length=200), seed=0)
    config = encoder.module.config
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (3, 64, 256)
    assert config.max_position_embeddings == 200
    assert len(encoder.tokenizer) == config.vocab_size


def test_a_random_encoder_without_layers_is_not_blamed_on_its_width():
    with pytest.raises(ModelError, match=r"model.server_model: random-0x32 has no layer; write random-1x32 or more"):
        load_encoder(ModelConfig(server_model="random-0x32"), seed=0)


@pytest.mark.parametrize("name", ["random-2x0", "random-2x129"])
def test_a_random_encoder_that_cannot_be_built_is_refused(name):
    with pytest.raises(ModelError, match=f"{name} cannot be built"):
        load_encoder(ModelConfig(server_model=name), seed=0)


@pytest.mark.parametrize("kind", KINDS)
def test_encoder_dropout_replaces_what_the_encoder_says(folders, kind):
    differs = {}
    for rate in (0.0, 0.25):
        encoder, model = load(folders[kind], [make_task(pool="mean")], encoder_dropout=rate)
        inputs = encode(encoder.tokenizer, make_task(), SINGLES)
        torch.manual_seed(0)
        first, second = (model.train()("single", inputs) for _ in range(2))
        differs[rate] = not torch.equal(first, second)
    assert differs == {0.0: False, 0.25: True}
    names = {
        "distilbert": ("dropout", "attention_dropout"),
        "modernbert": ("embedding_dropout", "attention_dropout", "mlp_dropout"),
    }.get(kind, ("hidden_dropout_prob", "attention_probs_dropout_prob"))
    assert [getattr(encoder.module.config, name) for name in names] == [0.25] * len(names)


@pytest.mark.parametrize("name", ["./no-such-folder", "/no/such/folder", "prajjwal1/no-such-bert", "no-such-bert"])
def test_an_encoder_that_cannot_be_reached_is_one_line_and_never_another(monkeypatch, name):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError) as caught:
        load_encoder(ModelConfig(server_model=name), seed=0)
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)


def spoil_config(folder):
    (folder / "config.json").write_text("{")


def spoil_weights(folder):
    (folder / "model.safetensors").write_bytes(b"not tensors at all")


def drop_weights(folder):
    (folder / "model.safetensors").unlink()


def take_other_shape(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 64}))


def take_other_kind(folder):
    shutil.copy(folder.parent / "distilbert" / "model.safetensors", folder)


def take_more_layers(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))


def drop_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (spoil_config, "cannot load"),
        (spoil_weights, "cannot load"),
        (drop_weights, "cannot load"),
        (take_other_shape, "cannot load"),
        (take_other_kind, "lacks the weights of"),
        (take_more_layers, "lacks the weights of encoder.layer.2"),
        (drop_tokenizer, "has no vocabulary"),
    ],
)
def test_a_folder_that_does_not_hold_the_encoder_is_refused_in_one_line(folders, tmp_path, harm, reason):
    shutil.copytree(folders["distilbert"], tmp_path / "distilbert")
    folder = shutil.copytree(folders["bert"], tmp_path / "bert")
    harm(folder)
    with pytest.raises(ModelError, match=reason) as caught:
        load_encoder(config_of(folder), seed=0)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(("kind", "limit"), [("bert", 40), ("roberta", 38), ("mpnet", 38), ("distilbert", 40)])
def test_texts_may_be_as_long_as_the_encoder_has_positions(folders, kind, limit):
    # RoBERTa and MPNet count from their padding id, 1, so that positions 0 and 1 are never used.
    encoder, model = load(folders[kind], [make_task(pool="mean")], max_length=limit)
    ids = torch.full((1, limit), 9)
    model("single", replace(encode(encoder.tokenizer, make_task(), SINGLES), ids=ids, mask=ids // 9, segments=0 * ids))
    with pytest.raises(ModelError, match=rf"model.max_length: found {limit + 1}, .* has {limit} positions"):
        load_encoder(config_of(folders[kind], max_length=limit + 1), seed=0)


def test_the_tokenizer_of_a_folder_is_the_one_that_was_saved(folders):
    for kind in KINDS:
        loaded, made = load_tokenizer(config_of(folders[kind])), make_tokenizer(kind)
        assert loaded.pad_token_id == made.pad_token_id
        assert loaded(*PAIRS[0])["input_ids"] == made(*PAIRS[0])["input_ids"]


def test_bert_tiny_has_the_parameters_that_it_should_have(tmp_path):
    tasks = [
        make_task("sst2", pool="pooler"),
        make_task("qqp", text=("a", "b"), pool="pooler"),
        make_task("stsb", kind="regression", text=("a", "b"), pool="pooler"),
    ]
    shape = BertConfig(
        vocab_size=30522, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512
    )
    shape.save_pretrained(tmp_path)
    make_tokenizer("bert").save_pretrained(tmp_path)
    encoder = load_encoder(ModelConfig(server_model=str(tmp_path), initial="random"), 0, keep_pooler=True)
    model = build_model(encoder, {task.name: task for task in tasks}, 0)
    sizes = {name: getattr(module, leaf).numel() for name, (module, leaf) in model.canonical().items()}
    shared = [size for name, size in sizes.items() if not name.startswith("heads.")]
    # embeddings 30522*128 + 512*128 + 2*128 + 2*128 = 3,972,864; a layer 4*(128*128+128) + 128*512+512 + 512*128+128
    # + 4*128 = 198,272; pooler 16,512: 3,972,864 + 2*198,272 + 16,512 = 4,385,920.
    assert (sum(shared), len(shared)) == (4_385_920, 39)
    heads = {
        task.name: sum(size for name, size in sizes.items() if name.startswith(f"heads.{task.name}.")) for task in tasks
    }
    assert heads == {"sst2": 128 * 2 + 2, "qqp": 258, "stsb": 129}
    assert sum(sizes.values()) == 4_386_565
    assert list(sizes)[: len(shared)] == [name for name, _ in encoder.module.named_parameters()]


def test_a_hub_that_does_not_answer_is_not_tried_again_and_again(monkeypatch):
    calls = []

    def load(name, **options):
        calls.append(options.get("local_files_only"))
        raise OSError("not in the cache")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("fedmtl.tasks.load.hub_answers", lambda: False)
    with pytest.raises(
        ModelError, match=r"no/such \(not a folder, and the hub did not answer within 5 s\); give a folder"
    ):
        encoder._reach(load, "no/such")
    monkeypatch.setattr("fedmtl.tasks.load.hub_answers", lambda: True)
    with pytest.raises(ModelError, match="the hub has no such name"):
        encoder._reach(load, "no/such")
    assert calls == [True, None]
