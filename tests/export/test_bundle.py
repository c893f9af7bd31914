"""The bundle of `export --to onnx` answers as the model does, with three packages and no fedmtl."""

import io
import json
import re
import shutil
import subprocess
import venv
from importlib import metadata
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest
import torch

from compress.onnx_models import make_saved
from fedmtl.config.file import load_config
from fedmtl.errors import FedmtlError
from fedmtl.export.onnx import _readme, export_bundle, write_beside
from fedmtl.predict.answers import to_prediction
from fedmtl.predict.onnx import open_onnx, predict_texts
from fedmtl.sharing.plan import SharingPlan, mode_plan
from fedmtl.tasks.load import known_tasks
from model.tiny import PAIRS, SINGLES, encode, make_task, write_encoder

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

CONFIGS = Path(__file__).parents[2] / "configs"
# Of a task on words the answer is spans of a text: tests/export/test_words.py.
ON_WORDS = {"biomedical"}
PACKAGES = ("numpy", "tokenizers", "onnxruntime")
CLOSE = 1e-5


@torch.inference_mode()
def ours(saved, rows):
    """Every fitting task's answer by torch, as `fedmtl predict --json` has it."""
    tasks = [task for task in saved.tasks.values() if len(task.text) == len(rows[0])]
    bound = saved.bind()
    outputs = [bound.use(task.name)(task.name, encode(saved.encoder.tokenizer, task, rows)).numpy() for task in tasks]
    return [
        [to_prediction(task, values[row]).to_json() for task, values in zip(tasks, outputs, strict=True)]
        for row in range(len(rows))
    ]


def check_alike(found, wanted):
    assert len(found) == len(wanted) > 0
    for one, other in zip(found, wanted, strict=True):
        assert [answer["task"] for answer in one] == [answer["task"] for answer in other]
        for answer, expected in zip(one, other, strict=True):
            assert answer.keys() == expected.keys()
            assert answer.get("label") == expected.get("label")
            assert answer.get("probabilities", {}) == pytest.approx(expected.get("probabilities", {}), abs=CLOSE, rel=0)
            assert answer.get("score", 0) == pytest.approx(expected.get("score", 0), abs=CLOSE, rel=0)


@pytest.fixture(scope="module")
def bundle(exported, tmp_path_factory):
    saved, file = exported
    folder = tmp_path_factory.mktemp("bundle")
    shutil.copy(file, folder / "model.onnx")
    write_beside(saved, list(saved.tasks), folder)
    return saved, folder


@pytest.fixture
def script(bundle):
    """The bundle's predict.py as a module."""
    spec = spec_from_file_location("bundle_script", bundle[1] / "predict.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_single_joint_and_dual_tasks_answer_as_the_model(bundle, script):
    saved, folder = bundle
    model = script.Model(threads=1)
    check_alike(model.predict(SINGLES), ours(saved, SINGLES))
    check_alike(model.predict(PAIRS), ours(saved, PAIRS))
    assert [len(row) for row in model.predict(PAIRS)] == [3] * len(PAIRS)
    one = model.predict(PAIRS, "score")
    assert [[answer["task"] for answer in row] for row in one] == [["score"]] * len(PAIRS)
    # `fedmtl predict BUNDLE` opens the folder.
    again = predict_texts(open_onnx(folder, threads=1), PAIRS, ["cross", "dual", "score"])
    check_alike([[answer.to_json() for answer in row] for row in again], model.predict(PAIRS))


def test_the_facts_are_those_of_the_graph(bundle, script):
    saved, folder = bundle
    facts = json.loads((folder / "model.json").read_text())
    model = script.Model(threads=1)
    assert list(facts["inputs"]) == [given.name for given in model.session.get_inputs()]
    assert {name: task["labels"] for name, task in facts["tasks"].items() if "labels" in task} == {
        name: list(task.labels) for name, task in saved.tasks.items() if task.labels
    }
    assert facts["tasks"]["score"]["score_range"] == [1.0, 5.0]
    four = {name: np.ones((4, 6), np.int64) for name in facts["inputs"]}
    for task in facts["tasks"].values():
        (values,) = model.session.run([task["output"]], four)
        assert list(values.shape) == [{"batch": 4, "batch / 2": 2}[task["shape"][0]], task["shape"][1]]
    readme = (folder / "README.md").read_text()
    assert "| `cross` | `a`, `b` | `x`, `y`, `z` |" in readme
    assert "| `score` | `a`, `b` | 1 to 5 |" in readme


def test_a_score_lies_in_its_range_in_both(bundle, script):
    task = bundle[0].tasks["score"]
    facts = {"kind": "regression", "score_range": [1.0, 5.0]}
    for output, score in ((-0.5, 1.0), (1.7, 5.0), (0.5, 3.0)):
        assert script.answer(facts, np.array([output])) == {"score": score}
        assert to_prediction(task, np.array([output])).score == score


def test_the_command_reads_texts_files_and_stdin(script, bundle, tmp_path, capsys, monkeypatch):
    lines = tmp_path / "lines.txt"
    lines.write_text("the plot is dull\n\ngood\n")
    assert script.main(["the plot is dull"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["texts"] == ["the plot is dull"]
    assert script.main(["--file", str(lines), "--threads", "1"]) == 0
    from_file = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    check_alike([from_file[0]["predictions"]], [alone["predictions"]])
    monkeypatch.setattr("sys.stdin", io.StringIO("what\tsame\n"))
    assert script.main(["--task", "dual"]) == 0
    assert json.loads(capsys.readouterr().out)["texts"] == ["what", "same"]


def test_labels_are_no_markdown_in_the_readme():
    facts = {"encoder": "e", "tasks": {"t": {"texts": ["a"], "labels": ["![x](http://evil/p.png)", "a|b`c"]}}}
    text = _readme(facts, None)
    assert "| `t` | `a` | `![x](http://evil/p.png)`, `a\\|b'c` |" in text
    assert "\n## " not in text


def test_a_bundle_replaces_a_bundle_alone_and_leaves_quantized_graphs(bundle, tmp_path, monkeypatch):
    saved, _ = bundle
    monkeypatch.setattr("fedmtl.export.onnx.export_onnx", lambda saved, bound, file: file.write_text("graph"))

    def write(folder, **how):
        return export_bundle(saved, saved.bind(), folder, **how)

    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "README.md").write_text("mine")
    for how in ({}, {"is_ours": True}):
        (foreign / "thesis.txt").touch()
        with pytest.raises(FedmtlError, match=f"^{foreign}: "):
            write(foreign, **how)
    assert (foreign / "README.md").read_text() == "mine"
    made = write(tmp_path / "made")
    (made / "model.int8.onnx").write_text("small")
    write(made)
    assert (made / "model.int8.onnx").read_text() == "small"
    # One of a version that did not name its files, where it wrote them.
    (made / ".fedmtl-export").unlink()
    with pytest.raises(FedmtlError, match="is no earlier export"):
        write(made)
    assert (write(made, is_ours=True) / ".fedmtl-export").is_file()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["a", "b", "c"], "takes one text, or two for a pair; 3 given. Use --file for many"),
        (["a", "--file", "x"], "found texts and --file; give one of them"),
        (["--file", "none.txt"], "[Errno 2] No such file or directory: 'none.txt'"),
        (["a", "--task", "mood"], "there is no task mood; there are single, cross, dual, score"),
        (["a", "--task", "dual"], "task dual takes a and b; 1 given"),
        (["a", "--graph", "none"], "FOLDER/none: no such file; give a graph that lies in this folder"),
        ([" "], "a text is empty; give some words"),
    ],
)
def test_a_wrong_command_is_one_line(script, bundle, capsys, arguments, error):
    assert script.main(arguments) == 2
    assert capsys.readouterr().err == f"predict.py: {error.replace('FOLDER', str(bundle[1]))}\n"


def _environment(folder):
    """A virtual environment with what pip would install for the three packages, linked from this one, and no more."""
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    wanted = list(PACKAGES)
    while wanted:
        try:
            found = metadata.distribution(wanted.pop())
        except metadata.PackageNotFoundError:
            continue  # for another platform
        tops = {file.parts[0] for file in found.files} - {"..", "__pycache__"}
        new = [top for top in tops if not (site / top).exists()]
        for top in new:
            (site / top).symlink_to(found.locate_file(top))
        wanted += [_name(line) for line in found.requires or () if new and "extra ==" not in line]
    return folder / "bin" / "python"


def _name(requirement):
    return re.match(r"[\w.-]+", requirement)[0]


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    return _environment(tmp_path_factory.mktemp("three") / "venv")


def _ask(python, folder, rows):
    lines = "\n".join("\t".join(row) for row in rows)
    done = subprocess.run(
        [python, "-I", folder / "predict.py", "--threads", "1"], input=lines, capture_output=True, text=True, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["predictions"] for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_the_environment_has_nothing_else(bare_python):
    for absent in ("fedmtl", "torch", "transformers", "onnx", "pydantic"):
        done = subprocess.run([bare_python, "-I", "-c", f"import {absent}"], capture_output=True, text=True)
        assert f"No module named '{absent}'" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({path.stem for path in CONFIGS.glob("*.yaml")} - ON_WORDS))
def test_every_model_of_the_configs_folder_answers_in_an_environment_of_three_packages(bare_python, tmp_path, name):
    # As deep as the encoder it names, since its plan names layers.
    encoder = "random-6x32" if name == "glue-minilm" else "random-2x32"
    config = load_config(CONFIGS / f"{name}.yaml", [f"model.server_model={encoder}"])
    saved = make_saved(encoder, list(known_tasks(config).values()), mode_plan(config))
    folder = export_bundle(saved, saved.bind(), tmp_path / "bundle")
    for rows in (SINGLES, PAIRS):
        check_alike(_ask(bare_python, folder, rows), ours(saved, rows))


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys", [{"lora": {"rank": 2, "alpha": 4.0}}, {"adapters": {"kind": "pals", "size": 8, "heads": 2}}]
)
def test_lora_and_adapters_are_in_the_bundle(bare_python, tmp_path, keys):
    if "lora" in keys:
        pytest.importorskip("peft")
    tasks = [make_task("single", pool="mean"), make_task("dual", pool="mean", text=("a", "b"), pair="dual")]
    plan = SharingPlan((("heads.*", "task"), ("adapters.*", "task"), ("*", "all")))
    saved = make_saved(write_encoder("bert", tmp_path / "encoder"), tasks, plan, **keys)
    folder = export_bundle(saved, saved.bind(), tmp_path / "bundle")
    for rows in (SINGLES, PAIRS):
        check_alike(_ask(bare_python, folder, rows), ours(saved, rows))
