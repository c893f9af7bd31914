import pytest

from fedmtl.errors import ConfigError
from fedmtl.training.layer_maps import attention_map, hidden_map, parse_layer_map


@pytest.mark.parametrize(
    ("name", "hidden", "attention"),
    [
        ("uniform", (0, 3, 6, 9, 12), (2, 5, 8, 11)),
        ("top", (0, 9, 10, 11, 12), (8, 9, 10, 11)),
        ("bottom", (0, 1, 2, 3, 4), (0, 1, 2, 3)),
    ],
)
def test_twelve_layers_to_four(name, hidden, attention):
    assert hidden_map(12, 4, name) == hidden
    assert attention_map(12, 4, name) == attention


def test_minilm_to_two_layers_is_the_default():
    assert hidden_map(6, 2) == (0, 3, 6)


def test_uneven_numbers_take_the_nearest_and_keep_both_ends():
    # 0, 5/3 = 1.67, 10/3 = 3.33, 5
    assert hidden_map(5, 3) == (0, 2, 3, 5)
    # 0, 2.5 (half up), 5
    assert hidden_map(5, 2) == (0, 3, 5)


@pytest.mark.parametrize("name", ["uniform", "top", "bottom"])
def test_as_many_layers_is_the_identity(name):
    assert hidden_map(4, 4, name) == (0, 1, 2, 3, 4)
    assert attention_map(4, 4, name) == (0, 1, 2, 3)


def test_a_list_is_taken_as_it_is():
    assert hidden_map(12, 2, parse_layer_map("0,4,12")) == (0, 4, 12)
    assert attention_map(12, 2, (3, 11)) == (3, 11)
    # The only way to a student that is deeper than its teacher.
    assert hidden_map(2, 3, (0, 1, 1, 2)) == (0, 1, 1, 2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: hidden_map(2, 3), "give the student at most 2"),
        (lambda: hidden_map(12, 2, (0, 6)), "has 2 numbers; the student has 3 hidden states"),
        (lambda: attention_map(12, 2, (0, 6, 11)), "has 3 numbers; the student has 2 attention layers"),
        (lambda: hidden_map(6, 2, (0, 3, 7)), "the teacher has no 7; its hidden states .embeddings first. are 0 to 6"),
        (lambda: attention_map(6, 2, (-1, 5)), "the teacher has no -1; its attention layers are 0 to 5"),
        (lambda: hidden_map(6, 0), "at least 1"),
        (lambda: hidden_map(6, 2, "middle"), "choose uniform, top, bottom"),
        (lambda: parse_layer_map("0,x"), "write one such as 0,3,6"),
    ],
)
def test_impossible_maps_say_what_would_be_right(make, words):
    with pytest.raises(ConfigError, match=words):
        make()
