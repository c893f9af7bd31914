import csv
import io

from fedmtl_studies.page import Column, Table, to_csv, to_html, to_markdown, words
from fedmtl_studies.results import Spread, spread

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
