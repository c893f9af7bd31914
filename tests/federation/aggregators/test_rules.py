"""What holds for every rule, and what each of them needs of memory."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmtl.federation.aggregators.by_coordinate import CoordinateMedian, TrimmedMean
from fedmtl.federation.aggregators.centered_clipping import CenteredClipping
from fedmtl.federation.aggregators.clipped_mean import ClippedMean
from fedmtl.federation.aggregators.mean import Mean
from fedmtl.federation.aggregators.multi_krum import MultiKrum
from fedmtl.federation.messages import Update
from fedmtl.sharing.plan import NO_EXTRA, Key

from .made_updates import SHARED, Decoded, Held, combined, head, update

STREAMING = {"mean": Mean, "clipped_mean": ClippedMean, "centered_clipping": CenteredClipping}
WAITING = {
    "coordinate_median": CoordinateMedian,
    "trimmed_mean": partial(TrimmedMean, hostile=0.34),
    "multi_krum": partial(MultiKrum, hostile=0.34),
}
RULES = {**STREAMING, **WAITING}
BEFORE = {SHARED: torch.zeros(2), head("sst2"): torch.zeros(1)}
# Without numbers that a factor makes zero: a row of zeros is one that a client did not return.
numbers = st.floats(-100, 100, width=32).filter(lambda number: number == 0 or abs(number) > 1e-30)
deltas = st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=7)


def updates_of(values) -> list[Update]:
    """Of one task, client by client."""
    return [update(f"c{i}", {SHARED: [a, b], head("sst2"): [c]}) for i, (a, b, c) in enumerate(values)]


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=30, deadline=None)
@given(values=deltas, seed=st.randoms())
def test_the_order_of_clients_does_not_matter(rule, values, seed):
    updates = updates_of(values)
    shuffled = seed.sample(updates, len(updates))
    one, other = combined(RULES[rule](BEFORE), updates), combined(RULES[rule](BEFORE), shuffled)
    for key in BEFORE:
        torch.testing.assert_close(one[key], other[key], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=30, deadline=None)
@given(value=st.tuples(numbers, numbers, numbers), count=st.integers(1, 9))
def test_of_equal_updates_every_rule_makes_their_mean(rule, value, count):
    result = combined(RULES[rule](BEFORE), updates_of([value] * count))
    torch.testing.assert_close(result[SHARED], torch.tensor(value[:2]))
    torch.testing.assert_close(result[head("sst2")], torch.tensor(value[2:]))


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=30, deadline=None)
@given(values=deltas, factor=st.sampled_from([0.25, 4.0]))
def test_of_scaled_updates_a_rule_makes_its_scaled_result(rule, values, factor):
    plain = combined(RULES[rule](BEFORE), updates_of(values))
    scaled = combined(RULES[rule](BEFORE), updates_of([[factor * one for one in row] for row in values]))
    for key in BEFORE:
        torch.testing.assert_close(scaled[key], factor * plain[key], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rule", ["coordinate_median", "trimmed_mean"])
@settings(max_examples=30, deadline=None)
@given(honest=st.lists(st.tuples(numbers, numbers, numbers), min_size=2, max_size=6), wrong=numbers)
def test_fewer_hostile_clients_than_the_rule_allows_cannot_leave_the_range_of_the_honest(rule, honest, wrong):
    total = 2 * len(honest) - 1 if rule == "coordinate_median" else len(honest) + len(honest) // 2
    hostile = [(1e4 * wrong, -1e4 * wrong, wrong)] * (total - len(honest))
    if len(hostile) > {"coordinate_median": (total - 1) // 2, "trimmed_mean": int(0.34 * total)}[rule] or total < 3:
        return
    result = combined(RULES[rule](BEFORE), updates_of([*honest, *hostile]))[SHARED]
    low, high = torch.tensor(honest)[:, :2].aminmax(dim=0)
    assert bool((result >= low - 1e-3).all())
    assert bool((result <= high + 1e-3).all())


def sizes_of(num_keys: int, size: int, num_clients: int) -> tuple[list[Key], list[Update]]:
    keys = [Key("all", f"layer.{number}") for number in range(num_keys)]
    return keys, [
        Update(1, f"c{number}", ("sst2",), Decoded(keys, size, 1.0 + number), None, {"sst2": 1}, {})
        for number in range(num_clients)
    ]


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_holds_one_model_and_at_most_one_value_of_every_client(rule):
    num_keys, size, num_clients = 8, 1 << 17, 6
    keys, updates = sizes_of(num_keys, size, num_clients)
    before = {key: torch.zeros(size) for key in keys}
    made, extra = RULES[rule](before), NO_EXTRA
    if rule in STREAMING:
        # A second round: the bounds are known, so that updates pass by.
        combined(made, updates)
        extra = made.remember()
    made = RULES[rule](before, extra)
    with Held() as held:
        result = combined(made, updates)
    value = 4 * size
    # The result, and beside it a decoded value and what is computed of it; all updates would be 48 values.
    allowed = num_keys + 3 + (0 if rule in STREAMING else num_clients)
    assert num_keys <= held.most / value <= allowed
    assert set(result) == set(keys)


@pytest.mark.parametrize("rule", RULES)
def test_a_client_that_counts_nothing_moves_nothing(rule):
    result = combined(RULES[rule](BEFORE), updates_of([(1.0, 2.0, 3.0)] * 3), weight=0.0)
    assert result == {}
