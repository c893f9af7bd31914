import json

import pytest

from fedmtl.config import ComputeConfig, Config, ModelConfig
from fedmtl.engines.start_up import ENCODER_CODE, ENGINE, worker_imports


def imports(encoder="auto", **model):
    keys = {"tasks": {"sst2": {}}, "compute": ComputeConfig(encoder=encoder), "model": ModelConfig(**model)}
    return worker_imports(Config(**keys))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    return tmp_path


def test_a_bert_in_a_folder_or_in_the_box_needs_no_code(folder):
    assert imports(server_model=str(folder)) == [ENGINE]
    assert imports(server_model="tiny") == [ENGINE]


@pytest.mark.parametrize("name", ["random-2x64", "some/name-on-the-hub"])
def test_whatever_else_does(folder, name):
    assert imports(server_model=name) == [ENGINE, ENCODER_CODE]


def test_so_does_a_bert_that_starts_at_random_or_computes_itself(folder):
    assert imports(server_model=str(folder), initial="random") == [ENGINE, ENCODER_CODE]
    assert imports("plain", server_model=str(folder)) == [ENGINE, ENCODER_CODE]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model_type": "roberta"}'])
def test_so_does_a_folder_of_something_else(folder, text):
    (folder / "config.json").write_text(text)
    assert imports(server_model=str(folder)) == [ENGINE, ENCODER_CODE]
