"""The benchmark of labels cuts its splits by the words of an example, and chooses by what it cut."""

import argparse
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
labels = pytest.importorskip("labels")


@pytest.fixture
def data(tmp_path):
    for split, count in (("train", 80), ("dev", 5)):
        rows = [f"{split} text {n % 70}\t{'joy' if n % 2 else 'fear,joy'}\n" for n in range(count)]
        labels.write(tmp_path / "goemotions" / f"{split}.tsv.gz", ["text\tlabels\n", *rows])
        sentences = [f"{split}{n}\tB-person\nsang\tO\n\n" for n in range(count)]
        labels.write(tmp_path / "wnut17" / f"{split}.conll.gz", sentences)
    return tmp_path


@pytest.mark.parametrize("task", labels.FILES)
def test_what_is_cut_is_not_trained_on(data, task):
    labels.prepare(data, data / "out", [task], 1.0)

    def examples(folder, split):
        header, found = labels.read(data / "out" / "data" / folder / task / f"{split}.{labels.FILES[task][0]}")
        assert header == ("text\tlabels\n" if task == "goemotions" else "")
        return [labels.position(example) for example in found]

    cut, rest = examples("choice", "dev"), examples("choice", "train")
    assert 0 < len(cut) < 25
    # Ten texts stand there twice: both are on one side.
    assert not set(cut) & set(rest)
    assert len(cut) + len(rest) == 80
    # What is scored in the end is dev, and all of train is trained on.
    assert (len(examples("final", "train")), len(examples("final", "dev"))) == (80, 5)


def test_the_best_recipe_of_what_was_cut_is_used(tmp_path):
    given = argparse.Namespace(
        encoders=["tiny"], tasks=["goemotions"], seeds=[0, 1], choose=False, out=tmp_path, share=1.0
    )
    names = list(labels.RECIPES["tiny"]["goemotions"])
    lines = [
        {"encoder": "tiny", "task": "goemotions", "seed": 0, "recipe": name, "is_choice": True, "share": 1.0,
         "metrics": {"f1": 1 - score, "macro_f1": score}}
        for name, score in zip(names, (None, 0.5, 0.7), strict=False) if score is not None
    ]  # fmt: skip
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert labels.best_recipes(given) == {("tiny", "goemotions"): names[2]}
    made = list(labels.cells(given, labels.best_recipes(given)))
    assert [(cell.seed, cell.recipe, cell.is_choice) for cell in made] == [(0, names[2], False), (1, names[2], False)]
    given.choose = True
    assert [cell.recipe for cell in labels.cells(given, {})] == names
