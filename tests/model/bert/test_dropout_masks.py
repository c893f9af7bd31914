import math

import pytest
import torch

from fedmtl.model.bert.layout import no_masks, random_masks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("p", [0.001, 0.1, 0.25, 0.3, 0.999])
def test_a_value_is_dropped_with_probability_p_and_scaled_otherwise(p, dtype):
    torch.manual_seed(3)
    size = 1_000_001
    mask = random_masks(torch.zeros((), dtype=dtype))("here", (size,), p)
    assert mask.dtype == dtype
    assert set(mask.unique().tolist()) == {0.0, torch.tensor(1 / (1 - p), dtype=dtype).item()}
    # Four standard deviations of a binomial count.
    assert abs((mask == 0).sum().item() - p * size) < 4 * math.sqrt(p * (1 - p) * size)


def test_the_edge_byte_is_split_exactly():
    # p = 1/512: no byte decides to drop by itself; half of the zero bytes do.
    torch.manual_seed(0)
    size = 4_000_000
    dropped = (random_masks(torch.zeros(()))("here", (size,), 1 / 512) == 0).sum().item()
    assert abs(dropped - size / 512) < 4 * math.sqrt(size / 512)


def test_masks_follow_from_torchs_generator_and_differ_between_sites_and_passes():
    torch.manual_seed(5)
    first = random_masks(torch.zeros(()))
    a, b = first("a", (64, 8), 0.5), first("b", (64, 8), 0.5)
    c = random_masks(torch.zeros(()))("a", (64, 8), 0.5)
    torch.manual_seed(5)
    assert torch.equal(random_masks(torch.zeros(()))("a", (64, 8), 0.5), a)
    assert not torch.equal(a, b)
    assert not torch.equal(a, c)


def test_nothing_and_everything():
    masks = random_masks(torch.zeros(()))
    assert masks("a", (3,), 0.0) is None
    assert masks("a", (3,), 1.0).tolist() == [0, 0, 0]
    assert no_masks("a", (3,), 0.5) is None
