import math

import pytest
import torch

from fedmtl.training.distillation import attention_loss, hidden_loss, outputs_loss, relation_loss, similarity_loss

from .small_client import make_task

MASK = torch.tensor([[True, True, True], [True, False, False]])


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_mask():
    """Losses over states and a mask, each with the shape of its states."""
    return {
        "hidden": (hidden_loss, (2, 3, 8)),
        "relation": (lambda t, s, m: relation_loss(t, s, m, 2), (2, 3, 8)),
    }


def without_mask():
    return {
        "similarity": similarity_loss,
        "balanced similarity": lambda t, s: similarity_loss(t, s, balanced=True),
    }


@pytest.mark.parametrize("name", with_mask())
def test_equal_states_cost_nothing(name):
    loss, shape = with_mask()[name]
    states = draw(*shape)
    assert loss(states, states.clone(), MASK).item() == pytest.approx(0.0, abs=1e-6)
    assert loss(states, draw(*shape, seed=1), MASK).item() > 0.01


@pytest.mark.parametrize("name", without_mask())
def test_equal_outputs_cost_nothing_and_pull_nowhere(name):
    loss = without_mask()[name]
    teacher = draw(4, 3)
    student = teacher.clone().requires_grad_()
    value = loss(teacher, student)
    value.backward()
    assert value.item() == pytest.approx(0.0, abs=1e-6)
    assert student.grad.abs().max() < 1e-6
    assert loss(teacher, draw(4, 3, seed=1)).item() > 0.01


@pytest.mark.parametrize("name", with_mask())
def test_padding_changes_no_loss(name):
    loss, shape = with_mask()[name]
    teacher, student = draw(*shape), draw(*shape, seed=1)
    before = loss(teacher, student, MASK)
    # Two more positions hold anything.
    longer = [5 if size == 3 else size for size in shape]
    padded = [torch.full(longer, fill) for fill in (7.0, 9.0)]
    place = tuple(slice(0, size) for size in shape)
    for whole, part in zip(padded, (teacher, student), strict=True):
        whole[place] = part
    after = loss(*padded, torch.nn.functional.pad(MASK, (0, 2)))
    torch.testing.assert_close(after, before)


@pytest.mark.parametrize("name", with_mask())
def test_gradients_go_to_the_students_real_positions_only(name):
    loss, shape = with_mask()[name]
    teacher, student = draw(*shape).requires_grad_(), draw(*shape, seed=1).requires_grad_()
    loss(teacher, student, MASK).backward()
    assert teacher.grad is None
    assert student.grad.isfinite().all()
    assert student.grad[0].abs().sum() > 0
    padded = student.grad[1, ..., 1:, :]
    assert padded.abs().max() == 0


@pytest.mark.parametrize("name", without_mask())
def test_the_teachers_outputs_get_no_gradient(name):
    teacher, student = draw(4, 3).requires_grad_(), draw(4, 3, seed=1).requires_grad_()
    without_mask()[name](teacher, student).backward()
    assert teacher.grad is None
    assert student.grad.abs().sum() > 0


def test_hidden_loss_is_the_mean_over_real_positions():
    # Real: (1, 1) -> mean square 1, (3, 1) -> 5, (0, 2) -> 2; mean 8/3. Padded positions are far off.
    student = torch.tensor([[[1.0, 1.0], [3.0, 1.0]], [[0.0, 2.0], [9.0, 9.0]]])
    mask = torch.tensor([[True, True], [True, False]])
    assert hidden_loss(torch.zeros_like(student), student, mask).item() == pytest.approx(8 / 3)


def test_similarity_compares_angles_not_lengths_or_widths():
    # Cosine 0 between the teacher's two, 0.6 between the student's: two of four entries differ by 0.6.
    teacher = torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.0, 5.0]])
    student = torch.tensor([[1.0, 0.0], [3.0, 4.0]])
    assert similarity_loss(teacher, student).item() == pytest.approx(0.36 / 2)


def test_a_balanced_similarity_counts_levels_alike():
    # Teacher: 1 and 2 alike (cosine 1), 3 unlike both (0). Student: 1 and 2 have cosine 0, 3 has 0 and 1 with them.
    teacher = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    student = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    # Plain: four of nine entries are off by 1. Levels: the alike pair is off by 1; of the two unlike ones, one is.
    assert similarity_loss(teacher, student).item() == pytest.approx(4 / 9)
    assert similarity_loss(teacher, student, balanced=True).item() == pytest.approx((4 / 9 + (1 + 1 / 2) / 2) / 2)


def test_relations_of_unequal_widths_compare():
    # One head, three words alike: every relation is uniform, whatever the width.
    assert relation_loss(torch.ones(1, 3, 6), torch.ones(1, 3, 2), MASK[:1], 1).item() == pytest.approx(0.0, abs=1e-6)


def test_relation_loss_by_hand():
    # Words (1), (0); products row 1: 1, 0; row 2: 0, 0. Student (0), (0): uniform. Only row 1 differs:
    # p = e/(1+e); KL to (.5, .5) = p ln 2p + (1-p) ln 2(1-p); the mean over two words.
    p = math.e / (1 + math.e)
    expected = (p * math.log(2 * p) + (1 - p) * math.log(2 * (1 - p))) / 2
    teacher, student = torch.tensor([[[1.0], [0.0]]]), torch.zeros(1, 2, 1)
    assert relation_loss(teacher, student, torch.ones(1, 2, dtype=torch.bool), 1).item() == pytest.approx(expected)


CE, BCE = make_task("ce", labels=("x", "y", "z")), make_task("bce", outputs=1)
MSE = make_task("mse", kind="regression", labels=())


@pytest.mark.parametrize(("task", "width"), [(CE, 3), (BCE, 1), (MSE, 1)], ids=["classes", "one output", "scores"])
def test_a_student_with_its_teachers_outputs_has_nothing_to_learn(task, width):
    teacher = draw(5, width).double()
    student = teacher.clone().requires_grad_()
    loss = outputs_loss(task, teacher, student, 3.0)
    loss.backward()
    assert loss.item() == pytest.approx(0.0, abs=1e-15)
    assert student.grad.abs().max().item() == pytest.approx(0.0, abs=1e-15)
    assert outputs_loss(task, teacher, draw(5, width, seed=1), 3.0).item() > 0.01


def test_outputs_are_compared_by_kl_at_the_temperature_times_its_square():
    # Teacher 2 ln 3 at T = 2 is ln 3: (3/4, 1/4) against (1/2, 1/2); KL = 3/4 ln 3/2 + 1/4 ln 1/2, times 4.
    teacher, student = torch.tensor([[2 * math.log(3), 0.0]]), torch.zeros(1, 2)
    expected = 4 * (0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert outputs_loss(make_task("two"), teacher, student, 2.0).item() == pytest.approx(expected)
    # One output is the second class, here the one with 3/4.
    assert outputs_loss(BCE, teacher[:, :1], student[:, :1], 2.0).item() == pytest.approx(expected)


def test_the_gradient_keeps_its_size_as_the_temperature_grows():
    # For large T it tends to the difference of centred logits over the number of classes, whatever T is.
    teacher, sizes = torch.tensor([[1.0, 0.0, -1.0]], dtype=torch.float64), []
    for temperature in (100.0, 1000.0):
        student = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
        outputs_loss(CE, teacher, student, temperature).backward()
        sizes.append(student.grad)
    assert torch.allclose(sizes[0], torch.tensor([[-1 / 3, 0, 1 / 3]], dtype=torch.float64), atol=0.01)
    assert torch.allclose(sizes[1], sizes[0], atol=0.01)


def test_scores_are_compared_by_the_squared_difference_at_any_temperature():
    assert outputs_loss(MSE, torch.tensor([[0.5], [1.0]]), torch.tensor([[0.0], [0.75]]), 7.0).item() == 0.15625


def test_attention_scores_are_compared_over_pairs_of_real_positions():
    # One text of two positions, padded to three; one head. Of the four real pairs one differs by 2: 4 / 4 = 1.
    teacher = torch.zeros(1, 1, 3, 3)
    student = torch.zeros(1, 1, 3, 3)
    student[0, 0, 0, 1] = 2.0
    student[0, 0, 2, :] = student[0, 0, :, 2] = 50.0
    mask = torch.tensor([[True, True, False]])
    assert attention_loss(teacher, student, mask).item() == 1.0
    # A mask's score on either side says nothing.
    teacher[0, 0, 1, 1] = -1e4
    student[0, 0, 1, 0] = -1e2
    assert attention_loss(teacher, student, mask).item() == 1.0
    assert attention_loss(student, student.clone(), mask).item() == 0.0
