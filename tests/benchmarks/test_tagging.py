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


def test_the_best_rate_of_what_was_cut_is_used(tmp_path):
    given = argparse.Namespace(
        encoders=["tiny"], setups=["federated"], seeds=[0, 1], choose=False, out=tmp_path, share=1.0
    )
    rates = tagging.RATES["tiny"]["federated"]
    lines = [
        {"encoder": "tiny", "setup": "federated", "seed": 0, "rate": rate, "is_choice": True, "share": 1.0,
         "f1": {"bc2gm": score, "ncbi_disease": None}}
        for rate, score in zip(rates, (0.5, 0.7, 0.9), strict=True)
    ]  # fmt: skip
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert tagging.best_rates(given) == {("tiny", "federated"): rates[2]}
    made = list(tagging.cells(given, tagging.best_rates(given)))
    assert [(cell.seed, cell.rate, cell.is_choice) for cell in made] == [(0, rates[2], False), (1, rates[2], False)]
    given.choose = True
    assert [cell.rate for cell in tagging.cells(given, {})] == list(rates)
