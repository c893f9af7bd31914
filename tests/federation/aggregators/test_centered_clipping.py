import pytest
import torch

from fedmtl.federation.aggregators.centered_clipping import CenteredClipping
from fedmtl.sharing.plan import Extra, Key

from .made_updates import SHARED, TABLE, combined, update


def extra(center, bound, key=SHARED):
    return Extra({"norms": {key.scope: bound}}, {"center": {key: torch.tensor(center)}})


def test_differences_from_the_last_step_are_clipped_to_the_last_median():
    rule = CenteredClipping({SHARED: torch.zeros(1)}, extra([10.0], 2.0))
    updates = [update("a", {SHARED: [11.0]}), update("b", {SHARED: [14.0]}), update("c", {SHARED: [-90.0]})]
    # 10 + (1 + 2 - 2) / 3
    assert combined(rule, updates)[SHARED].item() == pytest.approx(31 / 3)
    # Distances are 1, 4 and 100; the next center is the result.
    assert rule.remember().values["norms"] == {"all": 4.0}
    assert rule.remember().slot("center")[SHARED].item() == pytest.approx(31 / 3)


def test_the_first_round_has_no_center_and_waits_for_the_median_norm():
    updates = [update("a", {SHARED: [1.0]}), update("b", {SHARED: [2.0]}), update("c", {SHARED: [-90.0]})]
    # (1 + 2 - 2) / 3
    assert combined(CenteredClipping({SHARED: torch.zeros(1)}), updates)[SHARED].item() == pytest.approx(1 / 3)


def test_a_missing_token_row_is_a_zero_as_far_from_the_center_as_zero_is():
    before = {TABLE: torch.zeros(2, 1)}
    sliced = update("a", {TABLE: [[3.0]]}, rows=[0])
    whole = update("a", {TABLE: [[3.0], [0.0]]})
    for bound in (100.0, 2.5):
        one, other = (
            combined(CenteredClipping(before, extra([[0.0], [4.0]], bound, TABLE)), [each])[TABLE].flatten()
            for each in (sliced, whole)
        )
        assert torch.allclose(one, other)
    # The distance is 5, the bound 2.5: half of the way from (0, 4) to (3, 0).
    assert one.tolist() == pytest.approx([1.5, 2.0])


def test_a_value_that_nobody_moved_has_the_center_it_had():
    other = Key("all", "other")
    rule = CenteredClipping(
        {SHARED: torch.zeros(1), other: torch.zeros(1)},
        Extra({"norms": {"all": 2.0}}, {"center": {other: torch.tensor([5.0])}}),
    )
    combined(rule, [update("a", {SHARED: [1.0]})])
    assert rule.remember().slot("center") == {SHARED: torch.tensor([1.0]), other: torch.tensor([5.0])}


@pytest.mark.parametrize(
    "wrong",
    [Extra({"norms": {"all": -1.0}}), Extra({"other": 1}), Extra(tensors={"other": {SHARED: torch.zeros(1)}})],
)
def test_a_checkpoint_with_another_state_is_refused(wrong):
    CenteredClipping.check(extra([1.0], 2.0))
    with pytest.raises(ValueError):
        CenteredClipping.check(wrong)
