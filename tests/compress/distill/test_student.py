import pytest
import torch

from compress.distill.small_teacher import TASKS, make_teacher
from fedmtl.compress.distill.settings import DistillSettings
from fedmtl.compress.distill.student import build_student
from fedmtl.config import ModelConfig
from fedmtl.errors import ConfigError


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return make_teacher(tmp_path_factory.mktemp("teacher"))


def values(model):
    return {name: getattr(module, leaf) for name, (module, leaf) in model.canonical().items()}


@pytest.mark.parametrize(("layer_map", "layer"), [("top", 1), ("bottom", 0), ((0, 1), 0)])
def test_starts_from_the_mapped_layers_and_the_heads(teacher, layer_map, layer):
    own = values(build_student(DistillSettings("1x32", layer_map), teacher, ModelConfig(), 0).model)
    above = {key.name: value for key, value in teacher.weights.items()}
    assert set(own) == {name for name in above if ".layer.1." not in name}
    for name, value in own.items():
        assert torch.equal(value, above[name.replace(".layer.0.", f".layer.{layer}.")]), name


def test_a_random_start_follows_from_the_seed(teacher):
    settings = DistillSettings("1x32", start="random")
    first, again, other = (values(build_student(settings, teacher, ModelConfig(), seed).model) for seed in (0, 0, 1))
    name = "encoder.layer.0.output.dense.weight"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])
    assert not any(torch.equal(first[f"heads.{task.name}.weight"], teacher.weights[key]) for task in TASKS for key in
                   teacher.weights if key.name == f"heads.{task.name}.weight")  # fmt: skip


def test_another_width_starts_at_random_and_is_as_wide_in_proportion(teacher):
    student = build_student(DistillSettings("1x64"), teacher, ModelConfig(), 0)
    assert student.start == "random"
    # 48 for a width of 32.
    assert student.model.encoder.config.intermediate_size == 96
    with pytest.raises(ConfigError, match="64 wide and its teacher 32"):
        build_student(DistillSettings("1x64", start="teacher"), teacher, ModelConfig(), 0)


def test_files_have_a_start_of_their_own(teacher):
    with pytest.raises(ConfigError, match="comes with weights"):
        build_student(DistillSettings("tiny", start="teacher"), teacher, ModelConfig(), 0)
