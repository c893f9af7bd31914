"""The files of a measurement."""

import csv
import io
import re

from compress.measure.made_up import make_measured
from fedmtl.compress.measure.measured import Load, Teacher
from fedmtl.report.variants import csv_text, large, write_measures
from fedmtl.report.variants_plot import heights, variants_plot

LOAD = Load(1, 128, (1, 2))
MEASURED = [
    make_measured("big", {"x": 0.9}, milliseconds=(20.0, 12.0), size=90_000_000),
    make_measured("small/<onnx>", {"x": 0.72}, milliseconds=(1.0, 0.8), size=10_000_000),
]
TEACHER = Teacher("big", {"x": 0.9})


def test_a_row_has_everything_of_a_variant_and_number_of_threads():
    rows = list(csv.DictReader(io.StringIO(csv_text(MEASURED, LOAD, TEACHER))))
    assert len(rows) == 4
    last = rows[3]
    assert (last["variant"], last["threads"], last["median_seconds"]) == ("small/<onnx>", "2", "0.0008")
    assert float(last["x.retention"]) == float(last["mean_retention"]) == 0.72 / 0.9
    assert (last["x.accuracy"], last["x.f1"], last["x.majority"]) == ("0.72", "0.25", "0.5")


def test_up_is_retention_and_a_mean_score_where_one_has_none():
    values, words = heights(MEASURED, TEACHER)
    assert [round(value, 6) for value in values] == [100.0, 80.0]
    assert words == "mean retention, % of big"
    assert heights(MEASURED, Teacher("big", {"x": 0.0})) == ([0.9, 0.72], "mean score")


def test_the_area_of_a_dot_is_the_size_and_left_is_fast():
    picture = variants_plot(MEASURED, LOAD, TEACHER)
    (x1, r1), (x2, r2) = re.findall(r'class="variant" cx="([\d.]+)" cy="[\d.]+" r="([\d.]+)"', picture)
    # Nine times the size is three times as wide.
    assert abs(float(r1) / float(r2) - 3) < 0.05
    assert float(x1) > float(x2)


def test_the_page_opens_offline_and_names_are_text(tmp_path):
    written = write_measures(tmp_path, MEASURED, LOAD, TEACHER, "a machine")
    assert [path.name for path in written] == ["measure.csv", "measure.html", "measure.svg"]
    page = written[1].read_text()
    assert "small/&lt;onnx&gt;" in page
    assert "small/<onnx>" not in page
    assert "20.00x" in page
    assert "80.0%" in page
    assert not re.search(r'(src|href)="http', page)
    assert written[2].read_text().startswith("<svg xmlns=")


def test_without_scores_there_is_no_picture(tmp_path):
    written = write_measures(tmp_path, [make_measured("a", None)], Load(), None, "a machine")
    assert [path.name for path in written] == ["measure.csv", "measure.html"]


def test_large_numbers_have_three_digits():
    assert [large(n) for n in (2_869_200_384, 117_473_792, 12_345, 7, None)] == ["2.87 G", "117 M", "12.3 k", "7", "–"]
