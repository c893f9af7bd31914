import ast
import json
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from export.test_hf import plain_answers, saved_model
from fedmtl.config import AdaptersConfig, ModelConfig
from fedmtl.config.file import load_config
from fedmtl.export.hf import MODELING, export_hf
from fedmtl.model.encoder import load_encoder
from fedmtl.model.multitask import build_model, open_model
from fedmtl.model.saved import SavedModel
from fedmtl.sharing.plan import Key, SharingPlan, mode_plan
from fedmtl.sharing.weights import initial_weights
from fedmtl.tasks.load import known_tasks
from fedmtl.tasks.task import HiddenLayer
from model.tiny import KINDS, LENGTH, PAIRS, SINGLES, encode, load, make_task, write_encoder

BY_TASK = SharingPlan((("heads.*", "task"), ("*layer*.1.*", "task"), ("*layers.1.*", "task"), ("*", "all")))


@pytest.fixture(autouse=True)
def _modules(tmp_path, monkeypatch):
    """The code of exported models is copied into the test's folder."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


def make_tasks():
    return [
        make_task("first", pool="mean", labels=("negative", "positive")),
        make_task("type", pool="cls", labels=("x", "y", "z"), head=HiddenLayer(8, "gelu")),
        make_task("joined", pool="cls", outputs=1, text=("a", "b"), labels=("other", "same")),
        make_task("apart", pool="mean", pair="dual", text=("a", "b"), labels=("x", "y", "z")),
        make_task("score", pool="mean", pair="dual", kind="regression", text=("a", "b"), score_range=(1.0, 5.0)),
    ]


def with_layers_by_task(saved):
    """The same model, in which every task has other values in its second layer."""
    names = list(saved.model.canonical())
    rules = [rule for rule in BY_TASK.rules if any(fnmatchcase(name, rule[0]) for name in names)]
    plan = SharingPlan(tuple(rules))
    weights = initial_weights(saved.model, plan)
    generator = torch.Generator().manual_seed(0)
    for key, value in weights.items():
        if key.scope.startswith("task:"):
            weights[key] = value + 0.1 * torch.randn(value.shape, generator=generator)
    return SavedModel(saved.model, saved.encoder, saved.tasks, plan, weights, LENGTH)


@torch.inference_mode()
def our_answers(saved, bound):
    found = {}
    for name, task in saved.tasks.items():
        rows = PAIRS if task.is_pair else SINGLES
        outputs = bound.use(name)(name, encode(saved.encoder.tokenizer, task, rows)).numpy()
        found[name] = [task.kind_of.answer(task, row) for row in outputs]
    return found


def their_answers(folder):
    model = AutoModel.from_pretrained(folder, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    return model.answer(tokenizer, [text for (text,) in SINGLES]), model.answer(tokenizer, *zip(*PAIRS, strict=True))


def largest_difference(ours, singles, pairs):
    """The largest difference of a probability, or of a score."""
    largest = 0.0
    for name, answers in ours.items():
        rows = singles if name in singles[0] else pairs
        for ours_one, theirs in zip(answers, rows, strict=True):
            if ours_one.label is None:
                largest = max(largest, abs(ours_one.score - theirs[name]["score"]))
            else:
                assert theirs[name]["label"] == ours_one.label
                shares = theirs[name]["probabilities"]
                assert list(shares) == list(ours_one.probabilities)
                largest = max(largest, *(abs(shares[label] - p) for label, p in ours_one.probabilities.items()))
    return largest


def bring_into_range(saved):
    """Change the head of `score` so that its outputs lie between .3 and .7, and no answer is cut off."""
    task = saved.tasks["score"]
    outputs = saved.bind().use("score")("score", encode(saved.encoder.tokenizer, task, PAIRS))
    middle = outputs.mean()
    scale = 0.2 / (outputs - middle).abs().max()
    for name, shift in (("weight", 0.0), ("bias", middle)):
        key = Key("task:score", f"heads.score.{name}")
        saved.weights[key] = (saved.weights[key] - shift) * scale + (0.5 if name == "bias" else 0.0)


def check(saved, folder):
    with torch.inference_mode():
        bring_into_range(saved)
    bound = saved.bind()
    made = export_hf(saved, bound, folder)
    ours = our_answers(saved, bound)
    spread = np.ptp([answer.score for answer in ours["score"]])
    assert spread > 100 * 1e-5, "the texts are told apart"
    assert largest_difference(ours, *their_answers(made.every_task)) < 1e-5
    return made


def test_one_folder_answers_every_task_with_and_without_layers_by_task(tmp_path):
    saved = saved_model(write_encoder("bert", tmp_path / "bert"), make_tasks(), 0.2)
    made = check(saved, tmp_path / "shared")
    passes = json.loads((made.every_task / "config.json").read_text())["passes"]
    # One pass of the encoder serves all heads.
    assert [each["heads"] for each in passes] == [[0, 1, 2, 3, 4]]
    made = check(with_layers_by_task(saved), tmp_path / "apart")
    passes = json.loads((made.every_task / "config.json").read_text())["passes"]
    assert [each["heads"] for each in passes] == [[0], [1], [2], [3], [4]]
    assert all(name.startswith("encoder.layer.1.") for each in passes for name in each["values"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_family_answers_alike(tmp_path, kind):
    saved = saved_model(write_encoder(kind, tmp_path / kind), make_tasks(), 0.2)
    check(saved, tmp_path / "shared")
    if kind != "albert":  # its layers are one
        check(with_layers_by_task(saved), tmp_path / "apart")


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"kind": "pals"}, {"kind": "pals", "share": "all"}, {"kind": "mixed"}])
@pytest.mark.parametrize("wiring", ["parallel", "alternative"])
def test_adapters_answer_alike(tmp_path, settings, wiring):
    adapters = AdaptersConfig(**settings, size=8, heads=2, wiring=wiring, tasks=["first", "apart"])
    config = ModelConfig(server_model=str(write_encoder("bert", tmp_path / "bert")), adapters=adapters)
    config = config.model_copy(update={"max_length": LENGTH})
    encoder = load_encoder(config, 0, False)
    model = build_model(encoder, {task.name: task for task in make_tasks()}, 0, config)
    plan = SharingPlan((("heads.*", "task"), ("adapters.*", "task"), ("*", "all")))
    generator = torch.Generator().manual_seed(0)
    weights = {
        key: value + 0.2 * torch.randn(value.shape, generator=generator)
        for key, value in initial_weights(model, plan).items()
    }
    made = check(SavedModel(model, encoder, model.tasks, plan, weights, LENGTH), tmp_path / "made")
    assert made.reasons["first"] == "pooled by the mean"


def test_the_modelling_file_needs_torch_and_transformers_alone():
    tree = ast.parse(MODELING.read_text())
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {name.split(".")[0] for name in names} <= {
        "torch",
        "transformers",
        "collections",
        "dataclasses",
        "re",
        "typing",
    }


ALONE = """
import json, sys
sys.modules["fedmtl"] = None
from transformers import AutoModel, AutoTokenizer
folder, texts, others = json.loads(sys.argv[1])
model = AutoModel.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
print(json.dumps([model.answer(tokenizer, texts), model.answer(tokenizer, *others)]))
"""


@pytest.mark.slow
def test_a_process_that_cannot_import_fedmtl_gives_our_answers(tmp_path):
    _, model = load(write_encoder("bert", tmp_path / "bert"), make_tasks())
    saved = with_layers_by_task(saved_model(tmp_path / "bert", list(model.tasks.values()), 0.2))
    bound = saved.bind()
    folder = export_hf(saved, bound, tmp_path / "made").every_task
    given = json.dumps([str(folder), [text for (text,) in SINGLES], list(zip(*PAIRS, strict=True))])
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", ALONE, given], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    assert largest_difference(our_answers(saved, bound), *json.loads(done.stdout)) < 1e-5


CONFIGS = {
    "glue": "random-2x128",
    "glue-dual": "random-2x128",
    "glue-minilm": "random-6x64",
    "glue-tiny": "tiny",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_every_model_of_the_configs_folder_leaves_and_answers_alike(tmp_path, name):
    folder = Path(__file__).parents[2] / "configs"
    # Of a task on words the answer is spans of a text: tests/export/test_words.py.
    assert {path.stem for path in folder.glob("*.yaml")} == {*CONFIGS, "biomedical"}
    given = [f"model.server_model={CONFIGS[name]}", f"model.max_length={LENGTH}"]
    config = load_config(folder / f"{name}.yaml", given)
    encoder, model = open_model(config.model, known_tasks(config), 0)
    plan = mode_plan(config)
    generator = torch.Generator().manual_seed(0)
    weights = {
        key: value + 0.05 * torch.randn(value.shape, generator=generator)
        for key, value in initial_weights(model, plan).items()
    }
    saved = SavedModel(model, encoder, model.tasks, plan, weights, config.model.max_length)
    bound = saved.bind()
    made = export_hf(saved, bound, tmp_path / "made")
    assert set(made.reasons) == (set() if name == "glue" else {"sst2", "qqp", "stsb"})
    ours = our_answers(saved, bound)
    assert largest_difference(ours, *their_answers(made.every_task)) < 1e-5
    for task, folder in made.folders.items():
        if task not in made.reasons:
            plain = plain_answers(folder, saved.tasks[task]).tolist()
            for row, answer in zip(plain, ours[task], strict=True):
                expected = list(answer.probabilities.values())
                if answer.label is None:
                    # A plain class gives the score as the head does, whether it lies in its range or not.
                    low, high = saved.tasks[task].score_range
                    row, expected = np.clip(row, low, high).tolist(), [float(np.clip(answer.score, low, high))]
                assert row == pytest.approx(expected, abs=1e-5)
