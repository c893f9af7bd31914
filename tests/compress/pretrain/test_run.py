import json
import signal

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from fedmtl.compress.pretrain import loop
from fedmtl.compress.pretrain.run import Disclosure, Machine, load_teacher
from fedmtl.compress.pretrain.settings import Losses, PretrainSettings
from fedmtl.compress.pretrain.steps import Step
from fedmtl.compress.pretrain.student import table_from_teacher
from fedmtl.config import ModelConfig
from fedmtl.errors import ConfigError, DataError, FedmtlError, ModelError
from fedmtl.model.encoder import load_encoder

TEXTS = ["the film was not good .", "a very odd w\u00f6rd, indeed", ""]


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_the_loss_falls_clearly(run, monkeypatch):
    monkeypatch.setattr(loop, "LOG_STEPS", 10)
    _, listener = run(steps=60, losses=Losses(attention=1.0))
    first, last = listener.updates[0].losses, listener.updates[-1].losses
    assert set(first) == {"total", "hidden", "similarity", "own_similarity", "attention"}
    assert last["total"] < 0.6 * first["total"]
    assert last["hidden"] < 0.8 * first["hidden"]
    assert last["own_similarity"] < 0.5 * first["own_similarity"]


def test_the_same_settings_give_the_same_bits_and_another_seed_others(run):
    first, again, other = (run(name, seed=seed)[0] for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    assert same(first, again)
    assert not same(first, other)


def test_resume_gives_the_bits_of_a_run_that_was_never_stopped(run, monkeypatch):
    whole, heard = run("whole", steps=7)
    assert heard.lines[-1].startswith("energy: ")
    real = Step.__call__

    def fail_at_six(*arguments):
        if arguments[2] == 5:
            raise RuntimeError("killed")
        return real(*arguments)

    monkeypatch.setattr(Step, "__call__", fail_at_six)
    with pytest.raises(RuntimeError):
        run("part", steps=7, machine=Machine("cpu", save_every=3))
    monkeypatch.setattr(Step, "__call__", real)
    resumed, listener = run("part", steps=7, machine=Machine("cpu", save_every=3), resume=True)
    assert same(whole, resumed)
    # Steps 4 to 7 after the checkpoint of step 3.
    assert listener.updates[-1].step == 7
    # What the killed session spent is not known.
    assert listener.lines[-1].startswith("energy since --resume: ")


def test_kept_answers_of_the_teacher_equal_live_ones(run):
    kept, _ = run("kept", altered=False, machine=Machine("cpu", keep_teacher=True), losses=Losses(attention=1.0))
    live, _ = run("live", altered=False, machine=Machine("cpu", keep_teacher=False), losses=Losses(attention=1.0))
    for a, b in zip(kept.parameters(), live.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["altered", "balanced", "teacher_table"])
def test_what_can_be_switched_off_changes_what_is_learned(run, name):
    assert not same(run("on")[0], run("off", **{name: False})[0])


def test_a_student_as_wide_as_its_teacher_begins_with_all_of_its_table(teacher, sentences):
    settings = PretrainSettings(teacher, (str(sentences),), hidden=32, max_length=32)
    encoder = load_teacher(settings)
    pieces = {"film": 0, "##z": 1, "zq": 2}
    table = table_from_teacher(pieces, encoder, 32)
    rows = encoder.module.get_parameter(encoder.table)
    known = encoder.tokenizer.get_vocab()
    # The teacher has no piece for "zq" and makes two of it.
    expected = torch.stack([rows[known["film"]], rows[known["##z"]], (rows[known["z"]] + rows[known["##q"]]) / 2])
    expected = expected - expected.mean(0)
    torch.testing.assert_close(table / table.std(), expected / expected.std())


def test_a_narrower_table_keeps_the_distances_that_fit(teacher, sentences):
    settings = PretrainSettings(teacher, (str(sentences),), hidden=4, max_length=32)
    encoder = load_teacher(settings)
    # Three vectors span a plane, so two dimensions hold them.
    words = {word: number for number, word in enumerate(list(encoder.tokenizer.get_vocab())[20:23])}
    wide, narrow = (table_from_teacher(words, encoder, width) for width in (32, 2))
    distances = [torch.pdist(table) / torch.pdist(table).sum() for table in (wide, narrow)]
    torch.testing.assert_close(*distances)


def test_minutes_end_it(run):
    _, listener = run(steps=None, minutes=0.01)
    assert listener.updates[-1].share >= 1.0
    assert 0.6 <= listener.updates[-1].seconds < 60


@pytest.mark.parametrize(
    ("losses", "names"),
    [
        (Losses(similarity=0.0, own_similarity=0.0), {"hidden"}),
        (Losses(hidden=0.0), {"similarity", "own_similarity"}),
        (Losses(hidden=0.0, similarity=0.0), {"own_similarity"}),
        (Losses(hidden=0.0, similarity=0.0, own_similarity=0.0, attention=1.0), {"attention"}),
    ],
)
def test_a_loss_that_is_off_is_no_term(run, tmp_path, losses, names):
    run(steps=2, losses=losses)
    entry = json.loads((tmp_path / "small.json").read_text())["log"][-1]
    assert set(entry) == {"step", "learning_rate", "seconds", "total"} | names
    assert entry["total"] == pytest.approx(sum(getattr(losses, name) * entry[name] for name in names), rel=1e-5)


def test_hidden_words_change_every_second_batch(run):
    plain, _ = run("plain", steps=1, mask_words=0.0)
    first, _ = run("first", steps=1, mask_words=0.5)
    assert same(plain, first)
    assert not same(run("two", steps=2, mask_words=0.0)[0], run("hidden", steps=2, mask_words=0.5)[0])


def test_plain_transformers_loads_the_students_outputs(run, tmp_path):
    student, _ = run()
    folder = tmp_path / "small"
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    model, info = AutoModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert all("pooler" in name for name in info["missing_keys"])
    assert not info["unexpected_keys"]
    inputs = AutoTokenizer.from_pretrained(folder)(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        loaded = model.eval()(**inputs).last_hidden_state[inputs["attention_mask"].bool()]
        own = student(inputs["input_ids"], inputs["attention_mask"].bool())[-1][inputs["attention_mask"].bool()]
    # Weights keep 11 bits: states of about 1 differ in the third decimal.
    torch.testing.assert_close(loaded, own, rtol=0, atol=1e-2)
    half, _ = AutoModel.from_pretrained(folder, add_pooling_layer=False, output_loading_info=True)
    assert half.dtype == torch.float16


def test_the_package_takes_it_as_an_encoder_without_a_pooler(run, tmp_path):
    run()
    encoder = load_encoder(ModelConfig(server_model=str(tmp_path / "small"), max_length=32), 0)
    assert not encoder.has_pooler
    assert encoder.hidden_size == 16
    assert encoder.tokenizer("good")["input_ids"][0] == encoder.tokenizer.cls_token_id


def test_the_card_says_where_it_comes_from(run, tmp_path, sentences):
    measured = tmp_path / "measured.json"
    measured.write_text(json.dumps({"measured": [{"task": "stsb", "metric": "pearson", "mean": 0.8421}]}))
    disclosure = Disclosure("fedmtl pretrain --seed 4", "Apache-2.0", ("It saw Quora duplicates.",), measured)
    run(seed=4, disclosure=disclosure)
    card = (tmp_path / "small" / "README.md").read_text()
    for words in ("teacher. Its licence: Apache-2.0.", "It saw Quora duplicates.", "fedmtl pretrain --seed 4"):
        assert words in card
    assert f"| {sentences} | lines | 300 | 300 |" in card
    assert "Seed 4; 6 steps, 192 segments seen" in card
    assert "| stsb | pearson | 0.8421 |" in card


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"batch": 512}, DataError, "300 segments are fewer than one batch of 512; add texts or lower --batch"),
        ({"steps": None}, ConfigError, "give one of them"),
        ({"minutes": 1.0}, ConfigError, "give one of them"),
        ({"steps": 0}, ConfigError, "above 0"),
        ({"batch": 31}, ConfigError, "write an even number"),
        ({"heads": 3}, ConfigError, "3 do not divide --hidden 16"),
        ({"vocab": 20}, ConfigError, "from 200 on, or teacher"),
        ({"mask_words": 1.0}, ConfigError, "a share from 0 to below 1"),
        ({"losses": Losses(0.0, 0.0, 0.0, 0.0)}, ConfigError, "every loss is switched off"),
        ({"layers": 4}, ConfigError, "give the student at most 3"),
        ({"max_length": 100}, ModelError, "--max-length: found 100, but .* has 64 positions"),
    ],
)
def test_what_cannot_be_is_one_clear_line(run, given, kind, words):
    with pytest.raises(kind, match=words) as error:
        run(**given)
    assert "\n" not in str(error.value)


def test_a_missing_teacher_is_one_clear_line(run, tmp_path):
    with pytest.raises(ModelError, match=r"--teacher: .*gone is no folder with a config.json"):
        run(teacher=tmp_path / "gone")


def test_nothing_of_the_users_is_overwritten(run, tmp_path):
    run()
    run(seed=1)  # An earlier artefact is replaced.
    (tmp_path / "small" / "thesis.tex").write_text("x")
    with pytest.raises(FedmtlError, match=r"holds thesis.tex, which would be lost"):
        run()


def test_a_checkpoint_asks_for_resume_and_the_same_settings(run, tmp_path):
    with pytest.raises(FedmtlError, match="there is no checkpoint"):
        run(resume=True)
    path = tmp_path / "work" / "small.checkpoint"
    path.parent.mkdir()
    path.write_bytes(b"cut off")
    with pytest.raises(FedmtlError, match="did not end; go on with --resume, or delete this file"):
        run()
    with pytest.raises(FedmtlError, match="cannot be read as a checkpoint"):
        run(resume=True)


def test_a_signal_saves_and_resume_goes_on(run, monkeypatch):
    whole, _ = run("whole", steps=5, learning_rate=5e-3)
    real = Step.__call__

    def signal_at_three(*arguments):
        if arguments[2] == 2:
            signal.raise_signal(signal.SIGTERM)
        return real(*arguments)

    monkeypatch.setattr(Step, "__call__", signal_at_three)
    with pytest.raises(loop.Interrupted, match=r"ended by SIGTERM after step 3; .*--resume") as error:
        run("part", steps=5, learning_rate=5e-3)
    assert error.value.exit_code == 143
    monkeypatch.setattr(Step, "__call__", real)
    with pytest.raises(FedmtlError, match="was made with other settings"):
        run("part", steps=5, learning_rate=1e-3, resume=True)
    assert same(whole, run("part", steps=5, learning_rate=5e-3, resume=True)[0])
