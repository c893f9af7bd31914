"""The benchmark of tagging cuts its splits by sentence, goes on where it was stopped, and chooses by what it cut."""

import argparse
import gzip
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
tagging = pytest.importorskip("tagging")


@pytest.fixture
def data(tmp_path):
    for task in tagging.TASKS:
        for split, count in (("train", 60), ("dev", 5)):
            tag = f"B-{task}"
            lines = [json.dumps({"tokens": [f"word{n}", split], "tags": [tag, "O"]}) + "\n" for n in range(count)]
            tagging.write(tmp_path / "data" / task / f"{split}.jsonl.gz", lines)
    return tmp_path


def sentences(folder, task, split):
    with gzip.open(folder / task / f"{split}.jsonl.gz", "rt") as file:
        return {" ".join(json.loads(line)["tokens"]) for line in file}


def test_tasks_with_the_same_sentences_are_cut_alike(data):
    tagging.prepare(data / "data", data / "out", 1.0)
    choice = data / "out" / "data" / "choice"
    cut = sentences(choice, "bc5cdr_chem", "dev")
    assert 0 < len(cut) < 20
    assert cut == sentences(choice, "bc5cdr_disease", "dev")
    assert not cut & sentences(choice, "bc5cdr_chem", "train")
    assert len(cut | sentences(choice, "bc5cdr_chem", "train")) == 60
    # What is scored in the end is dev, and all of train is trained on.
    final = data / "out" / "data" / "final"
    assert sentences(final, "bc2gm", "dev") == sentences(data / "data", "bc2gm", "dev")
    assert len(sentences(final, "bc2gm", "train")) == 60


def test_a_share_of_the_sentences_leaves_the_files_of_another_alone(data):
    tagging.prepare(data / "data", data / "out", 0.5)
    half = len(sentences(tagging.data_folder(data / "out", "final", 0.5), "bc2gm", "train"))
    tagging.prepare(data / "data", data / "out", 1.0)
    whole = sentences(tagging.data_folder(data / "out", "final", 1.0), "bc2gm", "train")
    assert whole == sentences(data / "data", "bc2gm", "train")
    assert half < len(whole)


def test_the_best_recipe_of_what_was_cut_is_used(tmp_path):
    given = argparse.Namespace(
        encoders=["tiny"], setups=["federated"], seeds=[0, 1], choose=False, out=tmp_path, share=1.0
    )
    names = list(tagging.RECIPES["tiny"]["federated"])
    best = names[2]
    lines = [
        {"encoder": "tiny", "setup": "federated", "seed": 0, "recipe": name, "is_choice": True, "share": 1.0,
         "f1": {"bc2gm": 0.9 if name == best else 0.7, "ncbi_disease": None}}
        for name in names
    ]  # fmt: skip
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert tagging.best_recipes(given) == {("tiny", "federated"): best}
    made = list(tagging.cells(given, tagging.best_recipes(given)))
    assert [(cell.seed, cell.recipe, cell.is_choice) for cell in made] == [(0, best, False), (1, best, False)]
    given.choose = True
    assert [cell.recipe for cell in tagging.cells(given, {})] == names


def test_a_single_task_in_one_place_has_the_recipe_of_all_tasks_there():
    assert tagging.recipes("tiny", "single task, one place") == tagging.RECIPES["tiny"]["one place"]
