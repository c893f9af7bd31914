"""TinyBERT's two stages: general distillation with the teacher's vocabulary, then distillation for its tasks."""

import json
from dataclasses import replace

import pytest
import torch

from compress.listening import Listener
from fedmtl.compress.distill.run import distill
from fedmtl.compress.distill.settings import DistillSettings
from fedmtl.compress.general import PROJECTIONS, RECORD, General, read_general
from fedmtl.compress.pretrain import loop
from fedmtl.compress.pretrain.batches import DeviceSide, Tokens
from fedmtl.compress.pretrain.corpus import read_corpus
from fedmtl.compress.pretrain.run import Disclosure, Machine, PretrainPaths, load_teacher, pretrain
from fedmtl.compress.pretrain.same_tokens import TokenTargets, build_alike, fit_to_teacher, token_terms
from fedmtl.compress.pretrain.segments import divider, open_segments, write_segments
from fedmtl.compress.pretrain.settings import Losses, PretrainSettings, check_settings
from fedmtl.config import ModelConfig
from fedmtl.config.file import load_config
from fedmtl.errors import ConfigError, ModelError
from fedmtl.experiment.run import start_run
from fedmtl.model.encoder import load_encoder
from fedmtl.model.wordpiece import wrap_tokenizer
from fedmtl.tasks.embedded import embedded_columns
from raw_events import raw_events
from small_config import SMALL

pytestmark = pytest.mark.usefixtures("one_thread")

PAPER = Losses(hidden=1.0, similarity=0.0, own_similarity=0.0, attention=1.0)
TASKS = ("sentiment", "paraphrase", "similarity")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("two-stages")


def save_encoder(path, name="random-3x32", tokenizer=None):
    encoder = load_encoder(ModelConfig(server_model=name, max_length=32), 5, keep_pooler=False)
    with torch.no_grad():
        # Fresh weights barely mix positions; larger ones make layers differ.
        for parameter in encoder.module.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    encoder.module.save_pretrained(path)
    (tokenizer or encoder.tokenizer).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def encoder(folder):
    return save_encoder(folder / "encoder")


@pytest.fixture(scope="module")
def settings(folder, encoder):
    texts = folder / "texts.txt"
    texts.write_text("\n".join(embedded_columns("sentiment", "train")["sentence"][:200]))
    sizes = {"layers": 2, "hidden": 16, "max_length": 32, "batch": 32, "steps": 40, "learning_rate": 1e-2}
    return PretrainSettings(encoder, (str(texts),), vocab="teacher", losses=PAPER, altered=False, **sizes)


def make(settings, folder, name, listener=None):
    paths = PretrainPaths(folder / name, folder / "work")
    listener = listener or Listener()
    pretrain(settings, paths, Machine("cpu"), Disclosure("fedmtl pretrain ..."), listener)
    return paths.out


@pytest.fixture(scope="module")
def student(folder, settings):
    return make(settings, folder, "student")


def run_teacher(folder, encoder, name="teacher", length=32):
    sizes = (f"tasks.{task}={{train_samples: 16, val_samples: 12}}" for task in TASKS)
    overrides = [f"model.server_model={encoder}", f"model.max_length={length}", "training.num_rounds=1", *sizes]
    return start_run(load_config(None, [*SMALL, *overrides, f"output={folder}"]), name)


@pytest.fixture(scope="module")
def teacher(folder, encoder):
    return run_teacher(folder, encoder)


def go(teacher, student, name, listener=None, **changes):
    values = {"student": str(student), "epochs_intermediate": 1, "epochs_prediction": 1, **changes}
    return distill(teacher, load_config(teacher.config), DistillSettings(**values), name, listener or Listener())


def intermediate_loss(listener):
    return next(update.losses["total"] for update in listener.updates if update.stage == "intermediate")


def test_a_student_that_is_its_teacher_has_nothing_to_learn(settings):
    settings = fit_to_teacher(replace(settings, layers=3, hidden=32, max_length=128), teacher := load_teacher(settings))
    student, losses = build_alike(settings, teacher)
    student.encoder.load_state_dict(teacher.module.state_dict(), strict=False)
    ids = torch.tensor([[2, 60, 61, 62, 3], [2, 70, 71, 3, 0]])
    tokens = Tokens(ids, ids > 0, ids)
    answer = TokenTargets(teacher, None, losses).answer(tokens, 0)
    terms = token_terms(student, losses, tokens, answer, Losses(1.0, 1.0, 1.0, 1.0))
    assert set(terms) == {"embedding", "hidden", "attention", "similarity", "own_similarity"}
    assert all(value.item() < 1e-9 for value in terms.values())
    # Position 0 is [CLS]: what the teacher makes of it is learnt too.
    with torch.no_grad():
        answer.states.hidden[3][:, 0] += 1.0
    again = token_terms(student, losses, tokens, answer, PAPER)["hidden"]
    # Two of the nine real positions are off by 1 in every direction.
    assert again.item() == pytest.approx(2 / 9, rel=1e-4)


def test_the_first_stage_learns_states_and_scores_and_leaves_what_the_second_needs(folder, settings, monkeypatch):
    monkeypatch.setattr(loop, "LOG_STEPS", 10)
    listener = Listener()
    out = make(settings, folder, "learnt", listener)
    first, last = listener.updates[0].losses, listener.updates[-1].losses
    assert set(first) == {"total", "embedding", "hidden", "attention"}
    assert last["hidden"] < 0.8 * first["hidden"]
    assert last["attention"] < 0.8 * first["attention"]
    # 3 -> 2 layers, uniform: the middle of 3 is 1.5, rounded half up.
    assert read_general(out) == General("encoder", 3, 32, (0, 2, 3))
    made = load_encoder(ModelConfig(server_model=str(out), max_length=32), 0)
    above = load_teacher(settings)
    assert made.tokenizer.get_vocab() == above.tokenizer.get_vocab()
    assert made.module.config.num_attention_heads == above.module.config.num_attention_heads
    card = (out / "README.md").read_text()
    assert "were compared with the teacher's 0, 2, 3." in card
    assert "of its teacher's tokenizer" in card


def test_pairs_are_read_in_one_pass_as_the_teacher_reads_them(folder, settings, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "LOG_STEPS", 10)
    texts = embedded_columns("paraphrase", "train")
    rows = list(zip(texts["sentence1"], texts["sentence2"], strict=True))[:40]
    table = tmp_path / "pairs.tsv"
    table.write_text("one\ttwo\n" + "".join(f"{one}\t{two}\n" for one, two in rows))
    settings = replace(settings, corpus=(str(table),), max_length=32, chunk_words=24, pairs=True)
    teacher = load_teacher(settings)
    corpus = read_corpus(settings.corpus, 24, settings.seed, pairs=True)
    pairs = [number for number, text in enumerate(corpus.texts) if not isinstance(text, str)]
    write_segments(tmp_path / "segments", corpus.texts, teacher.tokenizer, teacher.tokenizer, 32)
    segments = open_segments(tmp_path / "segments")
    side = DeviceSide(segments.teacher, 0, torch.device("cpu"), divider(teacher.tokenizer))
    _, losses = build_alike(fit_to_teacher(settings, teacher), teacher)
    tokens = side.take(torch.tensor(pairs[:3]), 32)
    states = TokenTargets(teacher, side, losses).hidden_states(tokens)[-1]
    for row, number in enumerate(pairs[:3]):
        known = teacher.tokenizer(*corpus.texts[number], return_tensors="pt")
        length = known["input_ids"].shape[1]
        assert known["token_type_ids"].sum() > 1
        alone = teacher.module(**known).last_hidden_state[0]
        torch.testing.assert_close(states[row, :length], alone, atol=1e-5, rtol=1e-5)
    # The second text's tokens have another type: without types the states differ.
    plain = TokenTargets(teacher, side, losses).hidden_states(replace(tokens, types=None))[-1]
    assert not torch.allclose(states, plain, atol=1e-3)
    listener = Listener()
    make(settings, folder, "paired", listener)
    assert listener.updates[-1].losses["total"] < listener.updates[0].losses["total"]


@pytest.mark.parametrize("changes", [{"vocab": 300}, {"altered": True}, {"mask_words": 0.2}])
def test_pairs_go_with_the_teachers_tokens_as_they_are(settings, changes):
    with pytest.raises(ConfigError, match=r"--pairs: .* --vocab teacher, --no-altered and no --mask-words"):
        check_settings(replace(settings, pairs=True, **changes))


def test_a_student_as_wide_begins_with_the_teachers_embeddings(settings):
    above = load_teacher(settings)
    alike, losses = build_alike(replace(settings, hidden=32), above)
    assert torch.equal(alike.encoder.embeddings.word_embeddings.weight, above.module.embeddings.word_embeddings.weight)
    assert not list(losses.projections.parameters())
    fresh, _ = build_alike(replace(settings, hidden=32, teacher_table=False), above)
    assert not torch.equal(
        fresh.encoder.embeddings.word_embeddings.weight, alike.encoder.embeddings.word_embeddings.weight
    )


def test_the_second_stage_goes_on_where_the_first_ended(teacher, student):
    listener, fresh = Listener(), Listener()
    made = go(teacher, student, "joined", listener)
    stages = [event.get("stage") for event in raw_events(made.run) if event["event"] == "round"]
    assert stages == ["start", "intermediate", "prediction"]
    recorded = json.loads((made.run.path / "distill.json").read_text())
    assert recorded["settings"]["layer_map"] == [0, 2, 3]
    assert recorded["start"] == "its files"
    go(teacher, student, "fresh", fresh, start="random")
    assert intermediate_loss(listener) < 0.8 * intermediate_loss(fresh)


def test_the_projections_go_on_too(teacher, student, tmp_path):
    # Without them the second stage begins with random ones, and the same encoder is further from its teacher.
    without = tmp_path / "without"
    without.mkdir()
    for path in student.iterdir():
        if path.name != PROJECTIONS:
            (without / path.name).write_bytes(path.read_bytes())
    listener, bare = Listener(), Listener()
    go(teacher, student, "projected", listener, stages="intermediate")
    go(teacher, without, "bare", bare, stages="intermediate")
    assert intermediate_loss(listener) < 0.8 * intermediate_loss(bare)


def test_a_map_that_is_given_wins(teacher, student):
    made = go(teacher, student, "top", layer_map="top", stages="intermediate")
    assert json.loads((made.run.path / "distill.json").read_text())["settings"]["layer_map"] == "top"


@pytest.mark.parametrize(
    ("other", "changes", "words"),
    [
        ("random-4x32", {}, r"was pretrained from 3 layers \(0,2,3\), and the teacher has 4; give a --layer-map"),
        ("random-3x64", {}, "was pretrained from a teacher 32 wide, and this one is 64 wide; pretrain it"),
    ],
)
def test_a_student_of_another_teacher_is_one_clear_line(folder, student, other, changes, words):
    teacher = run_teacher(folder, save_encoder(folder / other, other), f"of-{other}")
    with pytest.raises(ConfigError, match=words) as error:
        go(teacher, student, f"from-{other}", **changes)
    assert "\n" not in str(error.value)


def test_another_vocabulary_is_one_clear_line(folder, student, teacher):
    pieces = load_encoder(ModelConfig(server_model="random-3x32", max_length=32), 0).tokenizer.get_vocab()
    names = sorted(pieces, key=pieces.get)
    swapped = {name: number for number, name in enumerate([*names[:-2], names[-1], names[-2]])}
    other = save_encoder(folder / "swapped", tokenizer=wrap_tokenizer(swapped))
    with pytest.raises(ConfigError, match="with the vocabulary of encoder, and the teacher has another") as error:
        go(run_teacher(folder, other, "swapped-run"), student, "other-words")
    assert "\n" not in str(error.value)


def test_too_few_positions_are_one_clear_line(folder, encoder, settings, teacher):
    short = make(replace(settings, max_length=16, steps=2), folder, "short")
    with pytest.raises(ModelError, match=r"fewer positions than the 32 tokens .* --max-length 32") as error:
        go(teacher, short, "too-short")
    assert "\n" not in str(error.value)


def test_a_damaged_record_is_one_clear_line(teacher, student, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in student.iterdir():
        (broken / path.name).write_bytes(b"{}" if path.name == RECORD else path.read_bytes())
    with pytest.raises(ModelError, match="is no record of a general distillation; put back a copy"):
        go(teacher, broken, "broken")


def test_a_teacher_whose_answers_are_to_be_kept_is_refused(folder, settings):
    paths = PretrainPaths(folder / "kept", folder / "work")
    with pytest.raises(ConfigError, match="--keep-teacher: with --vocab teacher"):
        pretrain(settings, paths, Machine("cpu", keep_teacher=True), Disclosure(""), Listener())
