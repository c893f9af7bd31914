"""Write docs/encoders.md: what works with which family of encoders, by trying every pair.

    python tests/encoder_matrix.py

Every feature is used with an encoder of every family, two layers deep, 32 wide and with random values, and has to have
its effect. A cell is `yes`, or the number of the error with which the feature is refused; any other error ends the
script. A minute and a half on one core; tests/test_encoders.py fails when the page is stale.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from fedmtl.compress.cut import Cut
from fedmtl.compress.distill.run import distill
from fedmtl.compress.distill.settings import DistillSettings, LossWeights
from fedmtl.compress.prune import prune_run
from fedmtl.compress.quantize import Quantization, quantize
from fedmtl.config.file import load_config
from fedmtl.errors import FedmtlError
from fedmtl.experiment.run import start_run
from fedmtl.export.hf import export_hf
from fedmtl.export.onnx import export_onnx
from fedmtl.model.lora import B
from fedmtl.model.saved import load_model
from fedmtl.model.tensor_files import load_safetensors
from fedmtl.predict.onnx import compute, open_onnx
from fedmtl.runs.folder import RunFolder
from fedmtl.sharing.plan import ADAPTERS, HEADS, weights_sha256
from model.tiny import KINDS, SINGLES, encode, write_encoder

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/encoders.md"
FAMILIES = {
    "bert": "BERT",
    "roberta": "RoBERTa",
    "electra": "ELECTRA",
    "mpnet": "MPNet",
    "distilbert": "DistilBERT",
    "albert": "ALBERT",
    "modernbert": "ModernBERT",
}
assert set(FAMILIES) == set(KINDS)
# How the encoder's folder, which is another one every time, is written on the page.
NAME = "ENCODER"
YES = "yes"
CONFIG = (
    "defaults=plain",
    "model.max_length=24",
    "model.pool=cls",
    *(f"tasks.{task}={{train_samples: 12, val_samples: 6}}" for task in ("sentiment", "paraphrase")),
    "federation.clients_per_task=2",
    "training.num_rounds=1",
    "training.batch_size=6",
    "training.learning_rate=1e-2",
    "compute.workers=0",
    "compute.device=cpu",
)
SETTINGS = {"student": "1x32", "start": "random", "epochs_intermediate": 1, "epochs_prediction": 1}


class Bench:
    """An encoder of one family, and small runs with it; runs that several features need are made once."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self.encoder = write_encoder(kind, folder / kind)
        self._made = 0

    def run(self, *overrides: str) -> RunFolder:
        """A finished run with these settings."""
        self._made += 1
        given = [*CONFIG, f"model.server_model={self.encoder}", f"output={self.folder / 'runs'}", *overrides]
        return start_run(load_config(None, given), f"run{self._made}")

    @cached_property
    def base(self) -> RunFolder:
        return self.run()

    def moved(self, run: RunFolder) -> set[str]:
        """The names of the encoder's values that training has changed, and of those that it added and are not zero."""
        start = load_safetensors(self.encoder / "model.safetensors")
        values = {key.name: value for key, value in load_model(run.model).weights.items()}
        return {
            name
            for name, value in values.items()
            if not name.startswith(HEADS)
            and (value.any() if name not in start else not torch.equal(value, start[name]))
        }

    def train(self, *overrides: str) -> RunFolder:
        """A run that trained the encoder."""
        run = self.run(*overrides)
        assert self.moved(run), "nothing was trained"
        return run

    def student(self, stage: str, **weights: float) -> None:
        settings = DistillSettings(**{**SETTINGS, "stages": stage, "weights": LossWeights(**weights)})  # type: ignore[arg-type]
        self._made += 1
        config = load_config(self.base.config, [f"output={self.folder / 'runs'}"])
        made = distill(self.base, config, settings, f"student{self._made}", _Silent())
        assert load_model(made.run.model).encoder.module.config.num_hidden_layers == 1

    def prune(self, wanted: Cut) -> None:
        self._made += 1
        pruned = prune_run(self.base, wanted, 1)
        model = load_model(start_run(pruned.config, f"pruned{self._made}").model)
        if wanted.amount:
            linear = [value for key, value in model.weights.items() if value.dim() == 2 and "embedding" not in key.name]
            zero = sum(int((value == 0).sum()) for value in linear) / sum(value.numel() for value in linear)
            assert zero > 0.4, "few weights are zero"
        else:
            # Layers that share their weights leave none behind.
            fewer = model.encoder.module.config.num_hidden_layers == 1
            assert pruned.parameters[1] < pruned.parameters[0] or fewer

    @cached_property
    def onnx(self) -> Path:
        saved = load_model(self.base.model)
        return export_onnx(saved, saved.bind(), self.folder / f"{self.kind}.onnx")

    def outputs(self) -> np.ndarray:
        """The outputs of the task `sentiment` for four texts."""
        saved = load_model(self.base.model)
        inputs = encode(saved.encoder.tokenizer, saved.tasks["sentiment"], SINGLES)
        with torch.no_grad():
            found: np.ndarray = saved.bind().use("sentiment")("sentiment", inputs).numpy()
        return found


class _Silent:
    def say(self, line: str) -> None:
        pass

    def update(self, update: object) -> None:
        pass


def _slices(bench: Bench) -> None:
    whole = bench.run("federation.vocabulary_slices=false")
    first, second = (weights_sha256(load_model(run.model).weights) for run in (bench.base, whole))
    assert first == second, "slices change the weights"


def _lora(bench: Bench, *more: str) -> None:
    run = bench.run("model.lora.rank=2", *more)
    moved = bench.moved(run)
    assert any(name.endswith(B) for name in moved), "no LoRA was trained"
    assert not any("lora" not in name for name in moved), "the encoder moved"


def _adapters(bench: Bench) -> None:
    run = bench.run("model.adapters={size: 8, heads: 2}")
    assert any(name.startswith(ADAPTERS) and ".decoder." in name for name in bench.moved(run)), "no adapter was trained"


def _smart(bench: Bench) -> None:
    with_noise = bench.train("training.smart={weight: 1, radius: 0.1}")
    digests = {weights_sha256(load_model(run.model).weights) for run in (bench.base, with_noise)}
    assert len(digests) == 2, "noise changes nothing"


def _adaptive(bench: Bench) -> None:
    options = "{split_below: 0.98, merge_above: 0.99, patience: 1, warmup_rounds: 0}"
    run = bench.train("training.num_rounds=2", f"sharing.adaptive={options}")
    # Tasks with random heads do not agree to 98%: their layers split.
    assert {key.scope for key in load_model(run.model).weights} - {"all", "task:sentiment", "task:paraphrase"} == set()
    assert any(
        not name.startswith(HEADS) and scope.startswith("task:") for scope, name in load_model(run.model).weights
    )


def _hf(bench: Bench) -> None:
    saved = load_model(bench.base.model)
    made = export_hf(saved, saved.bind(), bench.folder / "hf")
    folder, is_plain = made.folders["sentiment"], "sentiment" not in made.reasons
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=not is_plain)
    inputs = tokenizer([text for (text,) in SINGLES], padding=True, return_tensors="pt")
    with torch.no_grad():
        if is_plain:
            logits = AutoModelForSequenceClassification.from_pretrained(folder)(**inputs).logits.numpy()
        else:
            model = AutoModel.from_pretrained(folder, trust_remote_code=True)
            logits = model(**inputs, tasks=["sentiment"]).logits["sentiment"].numpy()
    assert np.abs(_margins(logits) - _margins(bench.outputs())).max() < 1e-4


def _margins(outputs: np.ndarray) -> np.ndarray:
    """What decides between two labels, of one output or two."""
    margins: np.ndarray = outputs[:, -1] - (outputs[:, 0] if outputs.shape[1] > 1 else 0)
    return margins


def _onnx(bench: Bench) -> None:
    found = compute(open_onnx(bench.onnx, threads=1), ["sentiment"], SINGLES)["sentiment"]
    assert np.abs(found - bench.outputs()).max() < 1e-4


def _int8(bench: Bench) -> None:
    file = bench.folder / "int8.onnx"
    quantize(bench.onnx, file, Quantization(), [])
    found = compute(open_onnx(file, threads=1), ["sentiment"], SINGLES)["sentiment"]
    error = np.abs(_margins(found) - _margins(bench.outputs())).max()
    assert 0 < error < 0.5, f"INT8 is {error} away"


@dataclass(frozen=True)
class Feature:
    """A row of the table: how a user turns it on, and what tries it; it raises a FedmtlError where it is refused."""

    words: str
    how: str
    check: Callable[[Bench], object]


FEATURES: Mapping[str, Feature] = {
    "federated": Feature("train over clients", "`fedmtl run`", lambda bench: bench.train()),
    "cls": Feature("first-position pooling", "`pool: cls`", lambda bench: bench.train("model.pool=cls")),
    "mean": Feature("mean pooling", "`pool: mean`", lambda bench: bench.train("model.pool=mean")),
    "pooler": Feature("pooler", "`pool: pooler`", lambda bench: bench.train("model.pool=pooler")),
    "dual": Feature("pairs apart", "`pair: dual`", lambda bench: bench.train("model.pair=dual")),
    "slices": Feature("vocabulary slices, the same bits", "`federation.vocabulary_slices`", _slices),
    "stacked": Feature(
        "clients at once", "`compute.stack`", lambda bench: bench.train("compute.stack=2", "compute.precision=fp32")
    ),
    "adaptive": Feature("layers that split and merge", "`sharing.adaptive`", _adaptive),
    "lora": Feature("LoRA", "`model.lora`", _lora),
    "lora_layers": Feature(
        "LoRA in chosen layers", "`model.lora.layers`", lambda bench: _lora(bench, "model.lora.layers=[1]")
    ),
    "adapters": Feature("PALs, adapters", "`model.adapters`", _adapters),
    "smart": Feature("SMART", "`training.smart`", _smart),
    "prediction": Feature(
        "distil predictions", "`distill --stages prediction`", lambda bench: bench.student("prediction")
    ),
    "hidden": Feature(
        "distil hidden states",
        "`distill --weights attention=0`",
        lambda bench: bench.student("intermediate", attention=0.0),
    ),
    "attention": Feature(
        "distil attention",
        "`distill`",
        lambda bench: bench.student("intermediate", embedding=0.0, hidden=0.0),
    ),
    "magnitude": Feature("prune weights", "`prune --amount`", lambda bench: bench.prune(Cut(amount=0.5))),
    "heads": Feature("remove heads", "`prune --heads`", lambda bench: bench.prune(Cut(heads=0.5))),
    "ffn": Feature("remove neurons", "`prune --ffn`", lambda bench: bench.prune(Cut(ffn=0.5))),
    "layers": Feature("remove layers", "`prune --layers`", lambda bench: bench.prune(Cut(layers=1))),
    "hf": Feature("export to transformers", "`export --to hf`", _hf),
    "onnx": Feature("export to ONNX", "`export --to onnx`", _onnx),
    "int8": Feature("INT8", "`quantize`", _int8),
}


def try_feature(bench: Bench, name: str) -> str:
    """`yes`, or the line with which the feature is refused."""
    try:
        FEATURES[name].check(bench)
    except FedmtlError as error:
        return " ".join(str(error).split()).replace(str(bench.encoder), NAME)
    return YES


def column(kind: str, folder: Path, names: Sequence[str] = tuple(FEATURES)) -> dict[str, str]:
    """What comes of these features for one family."""
    bench = Bench(kind, folder)
    return {name: try_feature(bench, name) for name in names}


def page(found: Mapping[str, Mapping[str, str]]) -> str:
    """The page for all families: a table, and under it the refusals, each once."""
    refusals = list(dict.fromkeys(cell for name in FEATURES for kind in FAMILIES if (cell := found[kind][name]) != YES))
    lines = [
        "# Which encoder does what",
        "",
        "<!-- Written by tests/encoder_matrix.py; tests/test_encoders.py compares. -->",
        "",
        "Every pair was tried with an encoder of that family, two layers deep and 32 wide, with random values. A",
        "number is the error with which the feature is refused, below the table. A family that is not here is taken",
        "for one laid out as BERT, as many are; a part that is then not there is named in an error.",
        "",
        "| feature | how | " + " | ".join(FAMILIES.values()) + " |",
        "|---|---|" + "---|" * len(FAMILIES),
    ]
    for name, feature in FEATURES.items():
        cells = (found[kind][name] for kind in FAMILIES)
        shown = (cell if cell == YES else f"[{refusals.index(cell) + 1}](#refusals)" for cell in cells)
        lines.append(f"| {feature.words} | {feature.how} | " + " | ".join(shown) + " |")
    lines += ["", "## Refusals", ""]
    lines += [f"{number}. {text}" for number, text in enumerate(refusals, start=1)]
    lines += [
        "",
        "BERT is also computed by code of fedmtl, faster than transformers' on a CPU and in stacks on a GPU; others",
        "by transformers' (`compute.encoder`). How a family names its layers is in `src/fedmtl/model/families.py`.",
    ]
    return "\n".join(lines) + "\n"


def read_page(text: str) -> dict[str, dict[str, str]]:
    """Family -> feature -> `yes` or the refusal, as a page says."""
    head, _, below = text.partition("## Refusals\n\n")
    listed = [line.partition(". ")[2] for line in below.splitlines() if line.partition(". ")[0].isdigit()]
    rows = [line.strip("| ").split(" | ") for line in head.splitlines() if line.startswith("| ")][1:]
    cells = dict(zip(FEATURES, (row[2:] for row in rows), strict=True))
    return {
        kind: {
            name: YES if row[at] == YES else listed[int(row[at].partition("]")[0].strip("[")) - 1]
            for name, row in cells.items()
        }
        for at, kind in enumerate(FAMILIES)
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write docs/encoders.md.")
    parser.add_argument("--only", nargs="*", choices=list(FAMILIES), help="try these alone, and write no page")
    given: Any = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FEDMTL_CACHE"] = f"{folder}/cache"
        torch.set_num_threads(1)
        found = {}
        for kind in given.only or FAMILIES:
            found[kind] = column(kind, Path(folder) / kind)
            print(kind, {name: cell for name, cell in found[kind].items() if cell != YES}, flush=True)
    if not given.only:
        PAGE.write_text(page(found), encoding="utf-8")
        print(PAGE.relative_to(ROOT))


if __name__ == "__main__":
    main()
