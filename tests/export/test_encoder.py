import json

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from export.test_every_task import make_tasks, with_layers_by_task
from export.test_hf import saved_model
from fedmtl.errors import FedmtlError
from fedmtl.export.encoder import EncoderFiles, new_folder, plain_values, write_encoders
from fedmtl.export.sentence_transformers import export_sentence_transformers
from fedmtl.predict.run import load_run
from model.tiny import LENGTH, SINGLES, encode, write_encoder

TEXTS = [text for (text,) in SINGLES]
RULES = "sharing.rules=[{heads.*: task}, {embeddings.LayerNorm.*: task}, {'*': all}]"


@torch.inference_mode()
def loaded_states(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
    return AutoModel.from_pretrained(folder)(**inputs).last_hidden_state


@torch.inference_mode()
def our_states(saved, bound, task):
    inputs = encode(saved.encoder.tokenizer, saved.tasks["sentiment" if "sentiment" in saved.tasks else task], SINGLES)
    return bound.use(task).encode(task, inputs)[0]


def test_a_finished_run_has_an_encoder_that_transformers_loads(run_once):
    run = run_once()
    loaded = load_run(run)
    folder = run.model / "encoder"
    ours = our_states(loaded.saved, loaded.bound, "paraphrase")
    torch.testing.assert_close(loaded_states(folder), ours, rtol=0, atol=1e-5)
    assert json.loads((folder / "1_Pooling/config.json").read_text())["pooling_mode_cls_token"] is True
    assert AutoTokenizer.from_pretrained(folder).model_max_length == loaded.saved.max_length
    assert "AutoModel.from_pretrained" in (folder / "README.md").read_text()


def test_with_layers_by_task_each_task_has_a_folder_and_shared_values_are_stored_once(run_once):
    run = run_once(RULES)
    loaded = load_run(run)
    inodes = {}
    for task in loaded.tasks:
        folder = run.model / "encoder" / task
        ours = our_states(loaded.saved, loaded.bound, task)
        torch.testing.assert_close(loaded_states(folder), ours, rtol=0, atol=1e-5)
        where = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        for name in ("embeddings.word_embeddings.weight", "embeddings.LayerNorm.weight", "tokenizer.json"):
            inodes.setdefault(name, set()).add((folder / where.get(name, name)).stat().st_ino)
    assert {name: len(found) for name, found in inodes.items()} == {
        "embeddings.word_embeddings.weight": 1,
        "embeddings.LayerNorm.weight": 3,
        "tokenizer.json": 1,
    }


def test_values_that_stay_at_clients_are_in_no_encoder_of_the_server(run_once):
    run = run_once("sharing.rules=[{heads.*: client}, {embeddings.*: client}, {'*': all}]", "training.num_rounds=1")
    assert (run.model / "tasks.json").is_file()
    assert not (run.model / "encoder").exists()


def test_an_encoder_replaces_an_older_one_whole_and_nothing_else(tmp_path):
    saved = saved_model(write_encoder("bert", tmp_path / "bert"), make_tasks(), 0.2)
    about = EncoderFiles(saved.encoder, saved.model.pools, LENGTH, "card")

    def write(model):
        views = model.plan.keys(model.model.canonical(), list(model.tasks), "")
        tasks = [plain_values(model.model, task, view, model.weights) for task, view in views.items()]
        return write_encoders(tmp_path / "encoder", about, tasks)

    assert set(write(with_layers_by_task(saved)).values()) == {tmp_path / "encoder" / name for name in saved.tasks}
    assert set(write(saved).values()) == {tmp_path / "encoder"}
    assert not (tmp_path / "encoder" / "first").exists()
    with pytest.raises(RuntimeError), new_folder(tmp_path / "encoder"):
        raise RuntimeError
    assert (tmp_path / "encoder" / "model.safetensors").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bert", "encoder"]
    (tmp_path / "link").symlink_to(tmp_path / "encoder")
    with pytest.raises(FedmtlError, match="is there already"), new_folder(tmp_path / "link"):
        pass


def test_a_file_that_no_export_wrote_is_never_lost(tmp_path):
    def write(folder):
        with new_folder(folder) as hidden:
            (hidden / "inner").mkdir()
            (hidden / "inner" / "a.txt").write_text("words")

    folder = tmp_path / "ex"
    write(folder)
    (folder / "inner" / "__pycache__").mkdir()
    (folder / "inner" / "__pycache__" / "a.pyc").write_text("")
    write(folder)
    for name in ("mynotes.txt", "inner/mynotes.txt"):
        (folder / name).write_text("mine")
        with pytest.raises(FedmtlError) as no:
            write(folder)
        assert str(no.value) == (f"{folder}: holds {name}, which no export wrote; move it away, or name another folder")
        assert (folder / name).read_text() == "mine"
        (folder / name).unlink()
    (folder / "link").symlink_to(tmp_path)
    with pytest.raises(FedmtlError, match="holds link, which no export wrote"):
        write(folder)
    (folder / "link").unlink()
    with pytest.raises(FedmtlError, match=r"holds late\.txt"), new_folder(folder):
        (folder / "late.txt").write_text("mine")
    assert (folder / "late.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["ex"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "mpnet", "modernbert"])
def test_sentence_transformers_gives_our_vectors_and_outputs(tmp_path, kind):
    library = pytest.importorskip("sentence_transformers", reason="the extra sentence-transformers is not installed")
    shared = saved_model(write_encoder(kind, tmp_path / kind), make_tasks(), 0.2)
    for name, saved in {"shared": shared, "apart": with_layers_by_task(shared)}.items():
        bound = saved.bind()
        written = export_sentence_transformers(saved, bound, tmp_path / name, lambda usage: usage)
        assert "reads two texts in one pass" in written.pop("joined")
        for task, folder in written.items():
            inputs = encode(saved.encoder.tokenizer, saved.tasks["first"], SINGLES)
            with torch.inference_mode():
                ours = bound.use(task).vectors(task, inputs)
                outputs = None if saved.tasks[task].is_pair else bound.use(task).outputs(task, ours)
            model = library.SentenceTransformer(str(folder), device="cpu")
            found = model.encode(TEXTS, convert_to_tensor=True)
            torch.testing.assert_close(found, ours, rtol=0, atol=1e-6)
            if outputs is not None:
                rows = model.encode(TEXTS, output_value=None)
                heads = torch.stack([row[task] for row in rows])
                torch.testing.assert_close(heads.softmax(-1), outputs.softmax(-1), rtol=0, atol=1e-6)
                labels = json.loads((folder / "labels.json").read_text())[task]["labels"]
                assert labels == list(saved.tasks[task].labels)
        library.SentenceTransformer(str(written["first"]))


@pytest.mark.slow
def test_sentence_transformers_loads_the_encoder_of_a_run(run_once):
    library = pytest.importorskip("sentence_transformers", reason="the extra sentence-transformers is not installed")
    run = run_once()
    loaded = load_run(run)
    found = library.SentenceTransformer(str(run.model / "encoder"), device="cpu").encode(TEXTS, convert_to_tensor=True)
    ours = our_states(loaded.saved, loaded.bound, "sentiment")[:, 0]
    torch.testing.assert_close(found, ours, rtol=0, atol=1e-6)
