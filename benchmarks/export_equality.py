"""Compare a run's answers with those of everything that `fedmtl export` writes, each in an environment without fedmtl.

    python benchmarks/export_equality.py RUN... --data FOLDER --three PYTHON --sentence PYTHON [--texts 400]

FOLDER has <task>/dev.tsv.gz. PYTHON after `--three` is that of an environment with numpy, tokenizers and onnxruntime,
the one after `--sentence` has torch, transformers and sentence-transformers; an environment that has fedmtl is refused.
Every run is exported three times into a folder that is removed again. Prints, for every run and task, the largest
difference of a probability or a score of its dev texts: through a plain class of transformers where one can hold the
task, through the modelling file of `every-task`, and through `predict.py` of the ONNX bundle; and, for tasks that
sentence-transformers can pool, of a coordinate of its vectors and of the probabilities of its Dense modules.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import fedmtl
from fedmtl.model.multitask import Inputs
from fedmtl.predict.run import LoadedRun, Prediction, load_run, predict_texts
from fedmtl.runs.folder import find_run
from fedmtl.tasks.sources import read_table

LIMIT = 1e-5
ALONE = """
import importlib.util, json, sys
assert importlib.util.find_spec("fedmtl") is None, "this environment has fedmtl"
given = json.load(sys.stdin)
"""
# Every program reads {"folder", "rows", "task"} and prints a list with an item for each row.
BUNDLE = """
sys.path.insert(0, given["folder"])
from predict import Model
print(json.dumps([row[0] for row in Model(threads=1).predict([tuple(row) for row in given["rows"]], given["task"])]))
"""
EVERY_TASK = """
from transformers import AutoModel, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(given["folder"], trust_remote_code=True)
model = AutoModel.from_pretrained(given["folder"], trust_remote_code=True).eval()
answers = model.answer(tokenizer, *map(list, zip(*given["rows"])))
print(json.dumps([row[given["task"]] for row in answers]))
"""
PLAIN = """
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(given["folder"])
model = AutoModelForSequenceClassification.from_pretrained(given["folder"]).eval()
texts = tokenizer(*map(list, zip(*given["rows"])), padding=True, truncation=True, return_tensors="pt")
with torch.inference_mode():
    logits = model(**texts).logits
names = model.config.id2label
shares = logits.double().softmax(-1).tolist()
print(json.dumps([
    {"score": row.item()} if len(row) == 1 else {"probabilities": {names[n]: p for n, p in enumerate(share)}}
    for row, share in zip(logits, shares)
]))
"""
VECTORS = """
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(given["folder"], device="cpu")
found = model.encode([row[0] for row in given["rows"]], output_value=None)
print(json.dumps([
    {"vector": row["sentence_embedding"].tolist(),
     "shares": row[given["task"]].double().softmax(-1).tolist() if given["task"] in row else None}
    for row in found
]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--three", required=True)
    parser.add_argument("--sentence", required=True)
    parser.add_argument("--texts", type=int, default=400)
    given = parser.parse_args()
    largest = 0.0
    for name in given.runs:
        with tempfile.TemporaryDirectory() as folder:
            for line, difference in compare(name, Path(folder), given):
                largest = max(largest, difference)
                print(f"{name}: {line} {difference:.1e}", flush=True)
    print(f"largest difference {largest:.1e}, {'within' if largest <= LIMIT else 'BEYOND'} {LIMIT:.0e}")
    raise SystemExit(largest > LIMIT)


def compare(name: str, folder: Path, given: argparse.Namespace) -> list[tuple[str, float]]:
    """What was compared, and the largest difference, for every export of a run and every task of it."""
    run, loaded = fedmtl.Run.open(name), load_run(find_run(name))
    made = run.export_hf(folder / "hf")
    vectors = run.export_sentence_transformers(folder / "vectors")
    bundle = run.export_onnx(folder / "onnx")
    found = []
    for task in loaded.tasks:
        rows = dev_rows(given.data / task / "dev.tsv.gz", loaded.saved.tasks[task].text, given.texts)
        ours = [row[0] for row in predict_texts(loaded, rows, [task])]
        ways = [("onnx", given.three, BUNDLE, bundle)]
        if task in made.folders and task not in made.reasons:
            ways.append(("plain class", given.sentence, PLAIN, made.folders[task]))
        if made.every_task is not None:
            ways.append(("every-task", given.sentence, EVERY_TASK, made.every_task))
        for what, python, program, place in ways:
            theirs = ask(python, program, place, task, rows)
            found.append((f"{task}, {what}", max(map(difference, ours, theirs))))
        place = vectors.get(task)
        if isinstance(place, Path) and place.is_dir():
            rows = [(text,) for row in rows for text in row]
            theirs = ask(given.sentence, VECTORS, place, task, rows)
            found += vector_differences(loaded, task, rows, theirs)
    return found


def dev_rows(file: Path, columns: Sequence[str], num_texts: int) -> list[tuple[str, ...]]:
    table = read_table(file)
    return list(zip(*(table.columns[column][:num_texts] for column in columns), strict=True))


def ask(python: str, program: str, folder: Path, task: str, rows: Sequence[tuple[str, ...]]) -> list[dict[str, Any]]:
    """Run a program in an environment of its own, without this one's paths; its answers, one for each row."""
    given = json.dumps({"folder": str(folder), "task": task, "rows": rows})
    done = subprocess.run(
        [python, "-I", "-c", ALONE + program], input=given, capture_output=True, text=True, cwd="/", check=False
    )
    if done.returncode:
        raise SystemExit(f"{task}: {done.stderr[-2000:]}")
    answers: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    assert len(answers) == len(rows), f"{len(answers)} answers to {len(rows)} rows"
    return answers


def difference(ours: Prediction, theirs: dict[str, Any]) -> float:
    if ours.label is None:
        assert ours.score is not None
        return abs(ours.score - theirs["score"])
    return max(abs(share - theirs["probabilities"][label]) for label, share in ours.probabilities.items())


def vector_differences(
    loaded: LoadedRun, task: str, rows: Sequence[tuple[str, ...]], theirs: Sequence[dict[str, Any]]
) -> list[tuple[str, float]]:
    """Of the vectors of single texts, and of the probabilities where the task is one on single texts."""
    vectors, shares = 0.0, 0.0
    for row, found in zip(rows, theirs, strict=True):
        with torch.inference_mode():
            bound = loaded.bound.use(task)
            tokens = loaded.saved.encoder.tokenizer(
                list(row), truncation=True, max_length=loaded.saved.max_length, return_tensors="pt"
            )
            ids, mask = tokens["input_ids"], tokens["attention_mask"]
            vector = bound.vectors(task, Inputs(ids, mask, tokens.get("token_type_ids", torch.zeros_like(ids))))[0]
            vectors = max(vectors, (vector - torch.tensor(found["vector"])).abs().max().item())
            if found["shares"] is not None:
                ours = bound.outputs(task, vector[None])[0].double().softmax(-1)
                shares = max(shares, (ours - torch.tensor(found["shares"], dtype=torch.float64)).abs().max().item())
    heads = [] if theirs[0]["shares"] is None else [(f"{task}, sentence-transformers' Dense", shares)]
    return [(f"{task}, sentence-transformers' vectors", vectors), *heads]


if __name__ == "__main__":
    main()
