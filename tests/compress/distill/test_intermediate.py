import pytest
import torch

from compress.distill.small_teacher import TASKS, bind, make_teacher
from fedmtl.compress.distill.intermediate import Intermediate, Projections, attention_layers
from fedmtl.compress.distill.settings import DistillSettings, LossWeights
from fedmtl.compress.distill.student import build_student
from fedmtl.config import ModelConfig
from fedmtl.errors import ConfigError
from fedmtl.model.multitask import Inputs
from fedmtl.training.distillation import outputs_loss
from model.tiny import PAIRS, SINGLES, encode

NAMES = ("embedding", "attention", "hidden")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return make_teacher(tmp_path_factory.mktemp("teacher"))


def intermediate(teacher, shape, **changes):
    settings = DistillSettings(shape, **changes)
    student = build_student(settings, teacher, ModelConfig(), 0)
    return Intermediate(teacher.bind(), bind(student.model), settings, 0)


def batch(teacher, task):
    return encode(teacher.encoder.tokenizer, task, PAIRS if task.is_pair else SINGLES)


def padded(inputs, more=5):
    parts = (inputs.ids, inputs.mask, inputs.segments)
    return Inputs(*(torch.nn.functional.pad(part, (0, more)) for part in parts))


@pytest.mark.parametrize("attention", ["scores", "relations"])
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_student_that_is_its_teacher_has_nothing_to_learn(teacher, task, attention):
    inner = intermediate(teacher, "2x32", attention=attention)
    inputs = batch(teacher, task)
    losses = inner.losses(task.name, inputs)
    assert {name: loss.item() for name, loss in losses.items()} == dict.fromkeys(NAMES, 0.0)
    # Both by the same kernels: others round otherwise.
    inner.teacher.model.adds_gradients = True
    answers = inner.teacher.use(task.name)(task.name, inputs).detach()
    own = inner.student.use(task.name)(task.name, inputs)
    outputs_loss(task, answers, own, 2.0).backward()
    for parameter in inner.student.parameters.values():
        assert parameter.grad is None or parameter.grad.abs().max() < 1e-6


@pytest.mark.parametrize("shape", ["1x32", "1x48"])
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_padding_changes_no_loss(teacher, task, shape):
    inner = intermediate(teacher, shape, start="random")
    inputs = batch(teacher, task)
    plain, longer = inner.losses(task.name, inputs), inner.losses(task.name, padded(inputs))
    for name in NAMES:
        assert plain[name].item() > 1e-4
        assert longer[name].item() == pytest.approx(plain[name].item(), rel=1e-5)


def test_heads_get_no_gradient_and_every_layer_does(teacher):
    inner = intermediate(teacher, "1x32", start="random")
    inner.total(inner.losses("single", batch(teacher, TASKS[0]))).backward()
    moved = {key.name for key, value in inner.student.parameters.items() if value.grad is not None}
    assert not [name for name in moved if name.startswith(("heads.", "pooler."))]
    assert {"embeddings.word_embeddings.weight", "encoder.layer.0.attention.self.query.weight"} <= moved
    assert all(value.grad is None for value in inner.teacher.parameters.values())


def test_a_loss_of_weight_0_is_not_computed(teacher):
    inner = intermediate(teacher, "1x32", weights=LossWeights(embedding=0.0, attention=0.0, hidden=2.0))
    losses = inner.losses("single", batch(teacher, TASKS[0]))
    assert list(losses) == ["hidden"]
    assert inner.total(losses).item() == pytest.approx(2 * losses["hidden"].item())


def test_other_numbers_of_heads_need_relations(teacher):
    # 2 heads do not divide 33, and 33 // 64 is none: one head.
    with pytest.raises(ConfigError, match="the teacher has 2 and the student 1"):
        intermediate(teacher, "1x33", attention="scores")
    assert not intermediate(teacher, "1x33").uses_scores
    assert intermediate(teacher, "1x48").uses_scores


def test_two_projections_or_one_and_none_for_equal_widths():
    assert sum(p.numel() for p in Projections(4, 6, "two", 0).parameters()) == 2 * 4 * 6
    assert sum(p.numel() for p in Projections(4, 6, "one", 0).parameters()) == 4 * 6
    states = (torch.ones(1, 2, 4), torch.zeros(1, 2, 4))
    same = Projections(4, 4, "two", 0)
    assert not list(same.parameters())
    assert all(map(torch.equal, same(states), states))


def test_projections_of_a_general_distillation_go_on():
    values = {"embedding.weight": torch.full((6, 4), 1.0), "hidden.weight": torch.full((6, 4), 2.0)}
    states = (torch.ones(1, 1, 4), torch.ones(1, 1, 4))
    two, one = Projections(4, 6, "two", 0), Projections(4, 6, "one", 0)
    two.take_over(values)
    assert [state[0, 0, 0].item() for state in two(states)] == [4.0, 8.0]
    # With one matrix for both, that of the hidden states is taken.
    one.take_over(values)
    assert [state[0, 0, 0].item() for state in one(states)] == [8.0, 8.0]
    with pytest.raises(ConfigError, match=r"is \(6, 4\), and \(6, 8\) is needed"):
        Projections(8, 6, "two", 0).take_over(values)


def test_a_listed_map_names_hidden_states():
    assert attention_layers(12, 4, (0, 3, 6, 9, 12)) == (2, 5, 8, 11)
    assert attention_layers(12, 4, "top") == (8, 9, 10, 11)
    with pytest.raises(ConfigError, match="have no attention"):
        attention_layers(12, 2, (0, 0, 12))
