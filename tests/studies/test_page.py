import csv
import io

import pytest

from fedmtl_studies.folder import StudyFolder
from fedmtl_studies.library import EvaluationEvent, Html
from fedmtl_studies.page import (
    Column,
    Page,
    Table,
    leading_rows,
    to_csv,
    to_html,
    to_markdown,
    with_chance,
    words,
    write_pages,
)
from fedmtl_studies.results import Spread, chance_of, spread

FOUND = Table(
    "table1",
    "Table 1",
    (
        Column("configuration", "configuration", "words"),
        Column("average", "average"),
        Column("steps", "steps", "count"),
    ),
    (("a|b", Spread(0.5, 0.25, 2), Spread(1000.0, 0.0, 2)), ("<c>", Spread(0.75, None, 1), None)),
    ("A note.",),
)


def test_a_spread_is_mean_and_sample_deviation():
    # mean of 1, 2, 6 is 3; deviations -2, -1, 3: (4 + 1 + 9) / 2 = 7
    found = spread([1.0, 2.0, 6.0])
    assert found is not None
    assert (found.mean, found.count) == (3.0, 3)
    assert found.deviation == 7**0.5
    assert spread([0.5]) == Spread(0.5, None, 1)


def test_a_seed_that_is_missing_leaves_no_mean():
    assert spread([0.5, None]) is None
    assert spread([]) is None


def test_the_csv_has_numbers_in_full_and_their_deviation():
    rows = list(csv.DictReader(io.StringIO(to_csv(FOUND))))
    assert rows == [
        {"configuration": "a|b", "average": "0.5", "average_sd": "0.25", "steps": "1000"},
        {"configuration": "<c>", "average": "0.75", "average_sd": "", "steps": ""},
    ]


def test_the_markdown_is_one_table_with_its_notes():
    assert to_markdown(FOUND).splitlines() == [
        "### Table 1",
        "",
        "| configuration | average | steps |",
        "| --- | ---: | ---: |",
        "| a/b | .500 ± .250 | 1,000 |",
        "| <c> | .750 | – |",
        "",
        "* A note.",
    ]


def test_the_page_escapes_what_it_shows():
    page = to_html(FOUND)
    assert "&lt;c&gt;" in page
    assert "<small>± .250</small>" in page


def test_values_are_worded_by_their_kind():
    assert words(Spread(4_000_000.0, None, 1), "bytes") == "4 MB"
    assert words(Spread(61.0, None, 1), "seconds") == "61 s"
    assert words(Spread(1.5, 0.25, 3), "number") == "1.50 ± 0.25"
    assert words(None, "score") == "–"


def scored(*means: float, name: str = "table1") -> Table:
    columns = (Column("setup", "setup", "words"), Column("sst2 accuracy", "sst2_accuracy"))
    return Table(name, "Scores", columns, tuple((f"s{at}", Spread(value, None, 1)) for at, value in enumerate(means)))


def test_scores_of_chance_are_marked_in_the_table_and_on_the_page():
    page = with_chance(Page("Opening.", "Guide.", [scored(0.5, 0.51, 0.8)], {}), {"sst2_accuracy": 0.51})
    (table,) = page.tables
    lines = to_markdown(table).splitlines()
    assert lines[4:7] == ["| s0 | .500† |", "| s1 | .510† |", "| s2 | .800 |"]
    assert lines[-1] == "* † no better than one answer for every example: sst2 accuracy .510."
    assert to_html(table).count("<sup") == 2
    # A dagger is for readers: the CSV has numbers.
    assert "†" not in to_csv(table)
    (warning,) = page.warnings
    assert warning.startswith("2 of 3 scores")


def test_a_page_without_scores_of_chance_is_unmarked():
    page = with_chance(Page("Opening.", "Guide.", [scored(0.6, 0.8)], {}), {"sst2_accuracy": 0.51, "qqp_f1": 0.9})
    assert not page.warnings
    assert "†" not in to_html(page.tables[0])


def test_chance_is_the_majority_class_and_no_correlation():
    # 30 of 50 examples are of the second class, whatever was answered.
    classes = EvaluationEvent(round=1, task="sst2", metrics={"accuracy": 0.5, "f1": 0.5}, confusion=[[20, 0], [25, 5]])
    assert chance_of(classes) == {"sst2_accuracy": pytest.approx(0.6)}
    assert chance_of(EvaluationEvent(round=1, task="stsb", metrics={"pearson": 0.3, "mse": 1.0})) == {
        "stsb_pearson": 0.0
    }


def test_the_first_table_is_summed_up_in_a_sentence():
    assert leading_rows(scored(0.5, 0.8, 0.7)) == (
        "Scores: the highest sst2 accuracy is that of s1 (.800), then s2 (.700); the lowest of 3 is s0 (.500)."
    )
    assert leading_rows(scored(0.5)) == ""


def test_a_page_begins_with_the_answer_and_a_figure_and_folds_its_tables(tmp_path):
    folder = StudyFolder(tmp_path / "mine")
    figures = {f"f{n}": (f"Figure {n}", Html("<svg></svg>")) for n in range(5)}
    tables = [scored(0.5, 0.8), scored(0.6, 0.7, name="table2")]
    write_pages(folder, "federated", "a study", Page("Opening.", "Guide.", tables, figures, answer="Yes."), {})
    text = folder.page.read_text()
    positions = [
        text.index(part) for part in ("Yes.", "Figure 0", "2 more figures", "Figure 3", "<table", "<summary>Scores")
    ]
    assert positions == sorted(positions)
    assert text.count("<table") == 2
    assert folder.markdown.read_text().startswith("**Yes.**")
