"""Which of a teacher's layers a smaller student learns from.

Hidden states are counted with the embeddings as 0, attention layers from 0: the attention that belongs to hidden
state n is n - 1. The names are TinyBERT's (Jiao et al. 2020): for 12 -> 4 layers, hidden states `uniform`
0,3,6,9,12, `top` 0,9,10,11,12 and `bottom` 0,1,2,3,4. Where the layers do not divide evenly, uniform takes the nearest.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedmtl.errors import ConfigError

NAMES = ("uniform", "top", "bottom")

LayerMap = str | Sequence[int]


def parse_layer_map(text: str) -> LayerMap:
    """A name, or numbers separated by commas."""
    if text in NAMES:
        return text
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"layer map {text!r}: is neither {', '.join(NAMES)} nor a list of numbers; write one such as 0,3,6"
        ) from None


def hidden_map(num_teacher: int, num_student: int, layer_map: LayerMap = "uniform") -> tuple[int, ...]:
    """The teacher's hidden state for each of the student's, embeddings first: one more than it has layers."""
    if not isinstance(layer_map, str):
        return _checked(layer_map, num_student + 1, num_teacher, "hidden states (embeddings first)")
    _check_sizes(num_teacher, num_student)
    if layer_map == "uniform":
        # Rounded in whole numbers, half up: round() would take 2.5 to 2 and 3.5 to 4.
        return tuple((2 * i * num_teacher + num_student) // (2 * num_student) for i in range(num_student + 1))
    if layer_map == "top":
        return (0, *range(num_teacher - num_student + 1, num_teacher + 1))
    if layer_map == "bottom":
        return tuple(range(num_student + 1))
    raise ConfigError(f"layer map {layer_map!r}: is unknown; choose {', '.join(NAMES)} or a list of numbers")


def attention_map(num_teacher: int, num_student: int, layer_map: LayerMap = "uniform") -> tuple[int, ...]:
    """The teacher's layer for the attention of each of the student's layers."""
    if not isinstance(layer_map, str):
        return _checked(layer_map, num_student, num_teacher - 1, "attention layers")
    return tuple(state - 1 for state in hidden_map(num_teacher, num_student, layer_map)[1:])


def _check_sizes(num_teacher: int, num_student: int) -> None:
    if num_teacher < 1 or num_student < 1:
        raise ConfigError(
            f"layer map: {num_teacher} -> {num_student} layers; both the teacher and the student need at least 1"
        )
    if num_student > num_teacher:
        raise ConfigError(
            f"layer map: the student has {num_student} layers, its teacher {num_teacher}; "
            f"give the student at most {num_teacher}, or list the teacher's layers, some of them twice"
        )


def _checked(numbers: Sequence[int], num_wanted: int, highest: int, what: str) -> tuple[int, ...]:
    listed = ",".join(map(str, numbers))
    if len(numbers) != num_wanted:
        raise ConfigError(f"layer map {listed}: has {len(numbers)} numbers; the student has {num_wanted} {what}")
    outside = [number for number in numbers if not 0 <= number <= highest]
    if outside:
        raise ConfigError(f"layer map {listed}: the teacher has no {outside[0]}; its {what} are 0 to {highest}")
    return tuple(numbers)
