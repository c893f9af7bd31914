"""docs/privacy-matrix.md says which protections go with which methods: every pair is tried."""

import pytest

import privacy_matrix
from fedmtl.config.privacy import PrivacyConfig
from privacy_matrix import METHODS, PAGE, PROTECTIONS, YES, column_of, page, read_page

# Half a second each; the others are tried by the slow tests.
QUICK = ("plain", "scaffold")
STALE = "docs/privacy-matrix.md is stale: run `python tests/privacy_matrix.py`"


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """Small tensors are slower with several."""


@pytest.fixture(scope="module")
def known():
    return read_page(PAGE.read_text(encoding="utf-8"))


def test_the_page_has_a_cell_for_every_pair_and_is_written_as_it_is_read(known):
    assert set(known) == set(PROTECTIONS)
    assert all(set(cells) == set(METHODS) for cells in known.values())
    assert page(known) == PAGE.read_text(encoding="utf-8"), STALE


@pytest.mark.slow
@pytest.mark.parametrize("protection", PROTECTIONS)
def test_quick_pairs_are_what_the_page_says(protection, known, tmp_path):
    assert column_of(protection, tmp_path, QUICK) == {name: known[protection][name] for name in QUICK}, STALE


@pytest.mark.slow
@pytest.mark.parametrize("protection", PROTECTIONS)
def test_every_pair_is_what_the_page_says(protection, known, tmp_path):
    assert column_of(protection, tmp_path) == known[protection], STALE


def test_every_section_of_privacy_is_a_column():
    keys = {column.words.strip("`") for column in PROTECTIONS.values()}
    sections = {f"privacy.{name}" for name, field in PrivacyConfig.model_fields.items() if field.default is None}
    assert sections == {key for key in keys if key.startswith("privacy.")}


def test_a_refusal_is_one_line_that_says_what_to_do(known):
    for text in {cell for cells in known.values() for cell in cells.values()} - {YES}:
        assert "\n" not in text
        assert "; " in text, text


def test_a_protection_without_its_effect_is_no_yes(tmp_path, monkeypatch):
    nothing = privacy_matrix.Protection("nothing", ("federation.min_clients=1",))
    monkeypatch.setitem(privacy_matrix.PROTECTIONS, "nothing", nothing)
    with pytest.raises(AssertionError, match="nothing with nothing else: the protection has no effect"):
        column_of("nothing", tmp_path, ["plain"])


def test_a_method_without_its_effect_is_no_yes(tmp_path, monkeypatch):
    monkeypatch.setitem(
        privacy_matrix.METHODS, "idle", privacy_matrix.Method("idle", "", ("federation.min_clients=1",))
    )
    with pytest.raises(AssertionError, match="with idle: the method has no effect"):
        column_of("clipped_mean", tmp_path, ["idle"])
