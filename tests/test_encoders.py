"""docs/encoders.md says what works with which family of encoders: every pair is tried."""

import pytest

from encoder_matrix import FAMILIES, FEATURES, PAGE, YES, column, page, read_page
from model.tiny import KINDS

# Less than a second for a family, where tracing an encoder for ONNX takes five.
QUICK = ("lora", "adapters", "attention", "heads")
STALE = "docs/encoders.md is stale: run `python tests/encoder_matrix.py`"


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """Small tensors are slower with several."""


def test_the_page_has_a_cell_for_every_pair_and_is_written_as_it_is_read():
    text = PAGE.read_text(encoding="utf-8")
    found = read_page(text)
    assert set(found) == set(FAMILIES) == set(KINDS)
    assert all(set(cells) == set(FEATURES) for cells in found.values())
    assert page(found) == text, STALE


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_quick_features_are_what_the_page_says(kind, tmp_path):
    known = read_page(PAGE.read_text(encoding="utf-8"))[kind]
    assert column(kind, tmp_path, QUICK) == {name: known[name] for name in QUICK}, STALE


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_every_feature_is_what_the_page_says(kind, tmp_path):
    assert column(kind, tmp_path) == read_page(PAGE.read_text(encoding="utf-8"))[kind], STALE


def test_a_refusal_is_one_line_that_says_what_to_do():
    refusals = {cell for cells in read_page(PAGE.read_text(encoding="utf-8")).values() for cell in cells.values()} - {
        YES
    }
    for text in refusals:
        assert "\n" not in text
        assert "; " in text, text


def test_a_feature_without_its_effect_is_no_yes(tmp_path, monkeypatch):
    monkeypatch.setattr("fedmtl.training.optimizer.FlatOptimizer.step", lambda *given: None)
    with pytest.raises(AssertionError, match="nothing was trained"):
        column("bert", tmp_path, ["federated"])
