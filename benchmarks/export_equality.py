"""Compare a run's predictions with those of its exported folders in plain transformers.

    python benchmarks/export_equality.py RUN --data FOLDER [--texts 400]

FOLDER has <task>/dev.tsv.gz. Prints, for every exported task, the largest difference of a probability or score through
AutoModelForSequenceClassification and through pipeline, and how many answers are the same.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from fedmtl.predict.run import LoadedRun, Prediction, load_run, predict_texts
from fedmtl.runs.folder import find_run
from fedmtl.tasks.sources import read_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=400)
    given = parser.parse_args()
    loaded = load_run(find_run(given.run))
    for name in loaded.saved.tasks:
        folder = loaded.run.path / "export" / name
        if folder.is_dir():
            compare(loaded, name, folder, given.data / name / "dev.tsv.gz", given.texts)


def compare(loaded: LoadedRun, name: str, folder: Path, file: Path, num_texts: int) -> None:
    table = read_table(file)
    columns = [table.columns[column][:num_texts] for column in loaded.saved.tasks[name].text]
    ours = [row[0] for row in predict_texts(loaded, list(zip(*columns, strict=True)), [name])]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        logits = model(**tokenizer(*columns, padding=True, truncation=True, return_tensors="pt")).logits
    through_model = max(difference(prediction, row) for prediction, row in zip(ours, logits, strict=True))
    texts = [dict(zip(("text", "text_pair"), row, strict=False)) for row in zip(*columns, strict=True)]
    answers = pipeline("text-classification", model=str(folder), device="cpu")(texts, truncation=True)
    pairs = list(zip(ours, answers, strict=True))
    through_pipeline = max(abs(value(prediction) - answer["score"]) for prediction, answer in pairs)
    same = sum(prediction.label in (None, answer["label"]) for prediction, answer in pairs)
    print(
        f"{name}: AutoModel {through_model:.1e}, pipeline {through_pipeline:.1e}, {same} of {len(ours)} answers equal"
    )


def value(prediction: Prediction) -> float:
    if prediction.label is not None:
        return prediction.probabilities[prediction.label]
    assert prediction.score is not None
    return prediction.score


def difference(prediction: Prediction, logits: torch.Tensor) -> float:
    if prediction.label is None:
        return abs(value(prediction) - logits[0].item())
    shares = logits.softmax(-1).tolist()
    return max(abs(a - b) for a, b in zip(shares, prediction.probabilities.values(), strict=True))


if __name__ == "__main__":
    main()
