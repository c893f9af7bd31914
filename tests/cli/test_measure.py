"""fedmtl measure: a run and its ONNX file side by side."""

import csv
import shutil
from pathlib import Path

import pytest

from fedmtl.compress.measure.variants import Load, Variant, measure, variants_of

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.fixture
def demo(exported_run, tmp_path):
    """The run, in a folder where `fedmtl` finds it."""
    return Path(shutil.copytree(exported_run, tmp_path / "runs" / "demo"))


@pytest.mark.slow
def test_a_run_and_its_file_are_measured_side_by_side(cli, demo):
    done = cli("measure", "demo", "--length", "16", "--threads", "1,2", "--repeats", "4", "--out", "here")
    assert done.code == 0, done.err
    with Path("here/measure.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["variant"], row["threads"]) for row in rows] == [
        ("demo", "1"), ("demo", "2"), ("demo/onnx", "1"), ("demo/onnx", "2"),
    ]  # fmt: skip
    run, file = rows[0], rows[2]
    assert int(file["bytes"]) == (demo / "export" / "onnx" / "model.onnx").stat().st_size
    files = [path for path in (demo / "model").iterdir() if path.is_file()]
    assert (demo / "model" / "encoder").is_dir(), "a copy, which does not count"
    assert int(run["bytes"]) == sum(path.stat().st_size for path in files)
    for name in ("parameters", "flops"):
        assert run[name] == file[name] != ""
    assert float(file["sentiment.accuracy"]) == pytest.approx(float(run["sentiment.accuracy"]), abs=1e-3)
    assert float(run["sentiment.retention"]) == 1
    assert 0 < float(run["median_seconds"]) <= float(run["p95_seconds"])
    # Without torch in its process.
    assert int(file["peak_bytes"]) < int(run["peak_bytes"])
    assert "demo/onnx" in done.out
    assert "speed-up" in done.out
    assert done.out.splitlines()[-1] == "written: here/measure.csv, here/measure.html, here/measure.svg"


@pytest.mark.slow
def test_a_file_alone_is_timed_without_torch_and_data(cli, demo, tmp_path):
    shutil.copy(demo / "export" / "onnx" / "model.onnx", tmp_path / "alone.onnx")
    assert cli("measure", "alone.onnx").error == (
        "alone.onnx: lies in no run's folder, which would name its data; measure it with --no-scores"
    )
    done = cli("measure", "alone.onnx", "--no-scores", "--length", "8", "--repeats", "2", "--threads", "99")
    assert done.code == 0, done.err
    assert "99 threads are more than this machine's" in done.out
    assert sorted(path.name for path in (tmp_path / "measure").iterdir()) == ["measure.csv", "measure.html"]


def test_a_text_longer_than_the_encoder_reads_is_one_line(demo):
    variant = Variant("file", demo / "export" / "onnx" / "model.onnx", "onnx")
    with pytest.raises(Exception, match="file: cannot take 1 x 5000 tokens; give a smaller --length"):
        measure([variant], Load(length=5000), scores=False)


def test_variants_are_named_by_run_and_scheme(demo):
    shutil.copy(demo / "export" / "onnx" / "model.onnx", demo / "export" / "onnx" / "model.dynamic.onnx")
    assert [(one.name, one.form) for one in variants_of(demo)] == [
        ("demo", "fedmtl"), ("demo/onnx", "onnx"), ("demo/dynamic", "onnx"),
    ]  # fmt: skip
    assert [one.name for one in variants_of(demo / "export" / "onnx" / "model.dynamic.onnx")] == ["demo/dynamic"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["none"], "none: no such run"),
        (["none.onnx"], "none.onnx: no such file; write it with `fedmtl export RUN --to onnx`"),
        (["demo", "--threads", "1,x"], "--threads 1,x: is not a list of numbers; write such as 1,2"),
        (["demo", "--teacher", "big"], "--teacher big: is not measured; it is one of demo, demo/onnx"),
        (["demo", "--teacher", "demo", "--no-scores"], "--teacher demo: there are no scores to compare"),
    ],
)
def test_what_cannot_be_measured(cli, demo, arguments, error):
    done = cli("measure", *arguments)
    assert done.code == 2
    assert done.error.startswith(error)
