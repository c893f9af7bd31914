"""Noise that a GPU draws, by its moments; it runs where there is a GPU, or under TRITON_INTERPRET=1."""

from __future__ import annotations

import math
import os

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton comes with torch for GPUs")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
pytestmark = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="needs a GPU or TRITON_INTERPRET=1")

SPAN = slice(48, 48 + 50_001)


def drawn(keys: list[int], *, rates: list[float], deviations: list[float] | None = None, step: int = 1) -> Tensor:
    from fedmtl.methods.triton_noise import add_noise

    gradients = torch.full((len(keys), 50_112), 10.0, device=DEVICE)
    given = torch.tensor(keys, device=DEVICE), torch.tensor(deviations or [1.0] * len(keys), device=DEVICE)
    add_noise(gradients, SPAN, *given, torch.full_like(given[1], 0.5), torch.tensor(rates, device=DEVICE), step)
    return gradients - 10.0


def test_noise_is_normal_and_of_each_client_its_own() -> None:
    noise = drawn([1 << 60, -5, 77], rates=[0.1, 0.0, 0.2], deviations=[4.0, 4.0, 1.0])[:, SPAN].double()
    noise /= torch.tensor([[2.0], [2.0], [0.5]], dtype=torch.float64, device=DEVICE)
    count = noise.shape[1]
    for power, expected, spread in ((1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0)):
        # Five standard errors: the variance of a power p of a normal number is E[x^2p] - E[x^p]^2.
        found = (noise**power).mean(1)
        assert float((found - expected).abs().max()) < 5 * math.sqrt(spread / count)
    # Two in a million are further than 4.75.
    assert float((noise.abs() > 3).double().mean()) == pytest.approx(0.0027, rel=0.25)
    together = torch.corrcoef(noise)
    assert float((together - torch.eye(3, device=DEVICE, dtype=torch.float64)).abs().max()) < 5 / math.sqrt(count)


def test_no_number_of_a_stream_depends_on_another() -> None:
    """A kernel that draws four numbers at a time and puts them apart."""
    (noise,) = drawn([3], rates=[1.0])[:, SPAN].double() / 0.5
    assert len(noise.unique()) > 0.95 * len(noise)
    for shift in (1, 256, 512, 1024, 1536, 2048):
        assert abs(float((noise[shift:] * noise[:-shift]).mean())) < 5 / math.sqrt(len(noise) - shift)


def test_steps_differ_and_a_step_is_drawn_again() -> None:
    first, second, again = (drawn([3], rates=[1.0], step=step)[0, SPAN] for step in (1, 2, 1))
    assert torch.equal(first, again)
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 5 / math.sqrt(len(first))


def test_a_client_that_makes_no_step_and_values_that_do_not_move_get_none() -> None:
    noise = drawn([1, 2, 3], rates=[-1.0, 0.1, 0.1], deviations=[1.0, 0.0, 1.0])
    assert not noise[:2].any()
    assert not noise[2, : SPAN.start].any()
    assert not noise[2, SPAN.stop :].any()
    assert noise[2, SPAN].all()
