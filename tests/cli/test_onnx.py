"""export --to onnx, quantize, and an ONNX file in place of a run."""

import json
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.fixture
def file(exported_run, tmp_path):
    """Its name, in a folder where `fedmtl` finds the run."""
    shutil.copytree(exported_run, tmp_path / "runs" / "demo")
    return "runs/demo/export/onnx/model.onnx"


def test_the_file_predicts_and_scores_as_its_run(cli, file):
    for texts in (["a fine film"], ["a film", "the film"]):
        ours, theirs = (json.loads(cli("predict", name, *texts, "--json").out) for name in ("demo", file))
        assert ours["texts"] == theirs["texts"]
        for one, other in zip(ours["predictions"], theirs["predictions"], strict=True):
            assert one.keys() == other.keys()
            assert other.get("label") == one.get("label")
            assert other.get("probabilities", {}) == pytest.approx(one.get("probabilities", {}), abs=1e-5)
            assert other.get("score", 0) == pytest.approx(one.get("score", 0), abs=1e-4)
    ours, theirs = (json.loads(cli("evaluate", name, "--json").out)["metrics"] for name in ("demo", file))
    assert list(ours) == list(theirs)
    for task, metrics in ours.items():
        # Answers of a model that hardly learned lie so near each other that their last digits order them.
        assert theirs[task] == pytest.approx(metrics, abs=0.02 if task == "similarity" else 1e-4)


def test_the_file_needs_neither_its_run_nor_torch(cli, file, tmp_path):
    shutil.copy(tmp_path / file, tmp_path / "alone.onnx")
    (tmp_path / "new.tsv").write_text("sentence\tlabel\na good film\tpositive\na dull film\tnegative\n")
    code = """
import sys
from fedmtl.cli import main
scored = ["evaluate", "alone.onnx", "--task", "sentiment", "--file", "new.tsv"]
for arguments in (["predict", "alone.onnx", "good"], scored):
    sys.argv[1:] = arguments
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, ended.code
print([name for name in ("torch", "transformers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines()[0].startswith("sentiment: ")
    assert done.stdout.splitlines()[-1] == "[]"
    assert cli("evaluate", "alone.onnx").error == (
        "alone.onnx: lies in no run's folder, which would name its data; give --task and --file"
    )


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["predict", "none.onnx", "x"], "none.onnx: no such file; write it with `fedmtl export RUN --to onnx`"),
        (["predict", "FILE", "x", "--client", "a"], "--client a: an ONNX file has one set of values"),
        (["predict", "FILE", "x", "--task", "mood"], "model.onnx has no task mood; it has sentiment, paraphrase"),
        (["predict", "FILE", "x", "--task", "similarity"], "task similarity takes two texts (sentence1, sentence2)"),
        (["quantize", "none.onnx"], "none.onnx: no such file"),
        (
            ["quantize", "FILE", "--client", "a"],
            "--client a: an ONNX file has one set of values; export it with --client",
        ),
        (["quantize", "FILE", "--texts", "none.txt"], "none.txt: "),
    ],
)
def test_what_a_file_cannot_answer(cli, file, arguments, error):
    done = cli(*(file if argument == "FILE" else argument for argument in arguments))
    assert done.code == 2
    assert done.error.startswith(error)


def test_a_bundle_stands_for_its_graph(cli, file):
    folder = file.removesuffix("/model.onnx")
    assert cli("predict", folder, "a fine film").out == cli("predict", file, "a fine film").out != ""
    assert cli("predict", folder, "x", "--round", "best").error.startswith("--round best: an ONNX file has one set")


def test_quantize_says_what_it_brings_and_costs(cli, file, tmp_path):
    done = cli("quantize", file, "--samples", "4", "--threads", "1")
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0].startswith("runs/demo/export/onnx/model.dynamic.onnx: ")
    assert lines[1].startswith("one text of ")
    assert lines[2].startswith("sentiment: same label for ")
    assert cli("predict", "runs/demo/export/onnx/model.dynamic.onnx", "a fine film").out.startswith("sentiment: ")
    shutil.copy(tmp_path / file, tmp_path / "alone.onnx")
    assert "no texts with labels: how often it agrees" in cli("quantize", "alone.onnx", "--threads", "1").out
    assert cli("quantize", "alone.onnx", "--scheme", "qdq").error.startswith(
        "quantize --scheme qdq: ranges are measured"
    )
