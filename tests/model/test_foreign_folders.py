"""Folders from other hands: their code is never run, their pickles never opened, and no file outside them is read."""

import json
import pickle
import shutil
from pathlib import Path
from random import Random

import pytest
import torch

from fedmtl.config import ModelConfig
from fedmtl.errors import FedmtlError, ModelError
from fedmtl.model.encoder import load_encoder, load_tokenizer
from fedmtl.model.saved import load_model, save_model
from fedmtl.predict.run import load_run
from fedmtl.runs.folder import RunFolder
from fedmtl.sharing.plan import SharingPlan
from fedmtl.sharing.weights import initial_weights

from .tiny import LENGTH, load, make_task

PLAN = SharingPlan((("heads.*", "task"), ("*", "all")))
CODE = """
from pathlib import Path
Path({marker!r}).write_text("ran")
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast
class Config(BertConfig):
    model_type = "odd"
class Model(BertModel):
    config_class = Config
class Tokens(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def run(folders, tmp_path: Path) -> RunFolder:
    """A run folder with a finished model, as it comes from somebody else."""
    run = RunFolder(tmp_path / "theirs")
    encoder, model = load(folders["bert"], [make_task(pool="cls")])
    save_model(run.model, encoder, model.tasks, PLAN, initial_weights(model, PLAN), ModelConfig(max_length=LENGTH))
    return run


@pytest.fixture
def encoder_folder(folders, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders["bert"], tmp_path / "encoder"))


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def with_code(folder: Path, name: str, marker: Path) -> None:
    (folder / "odd.py").write_text(CODE.format(marker=str(marker)))
    if name == "config.json":
        change(folder / name, auto_map={"AutoConfig": "odd.Config", "AutoModel": "odd.Model"}, model_type="odd")
    else:
        change(folder / name, auto_map={"AutoTokenizer": [None, "odd.Tokens"]}, tokenizer_class="Tokens")


@pytest.fixture
def _yes(monkeypatch):
    """A person, or a script, that says yes to whatever transformers asks."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")


@pytest.mark.usefixtures("_yes")
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
class TestCode:
    def test_of_a_run_is_never_run(self, run, tmp_path, name):
        with_code(run.model, name, tmp_path / "marker")
        with pytest.raises(ModelError, match=rf"{name} asks for Python code of its own \(auto_map\), which is never"):
            load_run(run)
        assert not (tmp_path / "marker").exists()

    def test_of_an_encoder_is_never_run(self, encoder_folder, tmp_path, name):
        with_code(encoder_folder, name, tmp_path / "marker")
        with pytest.raises(ModelError, match=r"model\.server_model: .* asks for Python code of its own") as caught:
            load_encoder(ModelConfig(server_model=str(encoder_folder)), seed=0)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "marker").exists()


class Poison:
    """A pickle that writes a file when it is opened."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.write_text, (self.marker, "ran")


def test_weights_in_a_pickle_are_refused_with_what_to_do(encoder_folder, tmp_path):
    (encoder_folder / "model.safetensors").unlink()
    (encoder_folder / "pytorch_model.bin").write_bytes(pickle.dumps(Poison(tmp_path / "marker")))
    with pytest.raises(ModelError, match=r"pytorch_model\.bin, a pickle, which can run code; convert it to"):
        load_encoder(ModelConfig(server_model=str(encoder_folder)), seed=0)
    assert not (tmp_path / "marker").exists()


def test_a_folder_with_both_kinds_of_weights_is_read_from_the_safe_one(encoder_folder, tmp_path):
    (encoder_folder / "pytorch_model.bin").write_bytes(pickle.dumps(Poison(tmp_path / "marker")))
    load_encoder(ModelConfig(server_model=str(encoder_folder), max_length=LENGTH), seed=0)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("name", ["weights.safetensors", "config.json", "tokenizer.json", "tasks.json"])
def test_a_link_that_leads_out_of_the_run_is_refused(run, tmp_path, name):
    shutil.move(run.model / name, tmp_path / name)
    (run.model / name).symlink_to(tmp_path / name)
    with pytest.raises(FedmtlError, match=rf"{name}: leads out of"):
        load_run(run)


def test_a_model_folder_that_is_elsewhere_is_refused_and_a_link_to_the_run_is_not(run, tmp_path):
    shutil.move(run.model, tmp_path / "elsewhere")
    run.model.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FedmtlError, match="model: leads out of"):
        load_run(run)
    run.model.unlink()
    shutil.move(tmp_path / "elsewhere", run.model)
    (tmp_path / "mine").symlink_to(run.path)
    load_run(RunFolder(tmp_path / "mine"))


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("tokenizer_config.json", {"tokenizer_file": "/etc/hostname"}, "names a file"),
        ("tokenizer_config.json", {"vocab_file": "/etc/hostname"}, "names a file"),
        ("config.json", {"num_hidden_layers": 10**7}, "which no encoder has"),
        ("config.json", {"vocab_size": 10**12}, "which no encoder has"),
        ("config.json", {"hidden_size": 10**6, "intermediate_size": 10**6}, "are the most"),
        ("config.json", {"hidden_size": 7}, "theirs/model: "),
        ("config.json", {"hidden_size": "x"}, "cannot be loaded"),
        ("config.json", {"model_type": "none such"}, "cannot be loaded"),
        ("config.json", {"vocab_size": 3}, "does not fit the model its files describe"),
        ("config.json", {"_attn_implementation": "somebody/kernel"}, "code from the hub"),
        ("tasks.json", {"max_length": -1}, "max_length"),
        ("tasks.json", {"plan": {"rules": [["*", "nobody"]], "groups": []}}, "plan.rules"),
        ("tasks.json", {"plan": {"rules": [["x", "all"]], "groups": []}}, "no rule matches"),
        ("tasks.json", {"plan": {"rules": [["*", "group"]], "groups": []}}, "groups that it does not have"),
        ("tasks.json", {"tasks": {}}, "has no task"),
        ("tasks.json", {"tasks": {"single": {"name": "single"}}}, "its tasks are not ours"),
        ("tasks.json", {"lora": {"rank": "x"}}, "cannot be built"),
        ("tasks.json", {"surprise": 1}, "is not one of our files"),
        ("tasks.json", {"weights_sha256": "0" * 64}, "is broken, its sha256"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_files_that_do_not_fit_are_one_line(run, name, values, message):
    change(run.model / name, **values)
    with pytest.raises(FedmtlError) as caught:
        load_run(run)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_value_of_another_shape_is_refused(run):
    from fedmtl.model.tensor_files import load_tensors, save_tensors

    path = run.model / "weights.safetensors"
    slots = {slot: {key: value.clone() for key, value in own.items()} for slot, own in load_tensors(path).items()}
    key = next(iter(slots["weights"]))
    slots["weights"][key] = torch.zeros(3)
    change(run.model / "tasks.json", weights_sha256=save_tensors(path, slots))
    with pytest.raises(ModelError, match="does not fit the model its files describe"):
        load_model(run.model)


@pytest.mark.parametrize("name", ["tasks.json", "config.json", "tokenizer_config.json", "tokenizer.json"])
def test_mutated_files_are_read_or_refused_in_one_line(run, name):
    random = Random(7)
    path = run.model / name
    whole = path.read_bytes()
    refused: list[str] = []
    for _ in range(40):
        changed = bytearray(whole)
        place = random.randrange(len(changed))
        changed[place : place + random.choice((0, 1, 4))] = random.choice(
            [b"", b"9", b"null", b'"', b"[[", b"-1", b"{}"]
        )
        path.write_bytes(changed)
        try:
            load_model(run.model)
        except FedmtlError as error:
            refused.append(str(error))
    assert refused
    assert not any("\n" in message for message in refused)


def test_a_tokenizer_alone_is_checked_too(encoder_folder, tmp_path):
    with_code(encoder_folder, "tokenizer_config.json", tmp_path / "marker")
    with pytest.raises(ModelError, match="asks for Python code"):
        load_tokenizer(ModelConfig(server_model=str(encoder_folder)))
