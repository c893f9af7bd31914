"""docs/seeds.md: every row of the five documents is there, and what it tells a reader to type or open is real.

The documents are not part of the project. ITEMS is what they contain, by document and section, in their order.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from fedmtl.cli.app import app
from fedmtl.cli.guide_main import as_command
from fedmtl.config.file import demo_config, load_config
from fedmtl.tasks.builtin import BUILTIN
from fedmtl_studies.folder import open_study
from fedmtl_studies.study import Study

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/seeds.md"
CODE = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
COMMENT = re.compile(r"<!--.*?-->")
PATH = re.compile(r"[\w.-]+/[\w./-]*\.\w+")
COMMANDS = typer.main.get_command(app)
# Fewer words say what is different, but not why.
SHORTEST_REASON = 4

ITEMS: dict[str, dict[str, tuple[str, ...]]] = {
    "The comparison": {
        "Header": ("model and architecture",),
        "Best results": (
            "a CSV of 30 rounds",
            "overall average, best round",
            "classification average, best round",
            "regression score, best round",
            "SST-2: best, final, trend",
            "QQP: best, final, trend",
            "STS-B: best, final, trend",
            "the model of the best round",
        ),
        "Published benchmarks": ("published scores by task",),
        "Detailed comparison": (
            "SST-2 against published",
            "QQP against published",
            "STS-B against published",
            "300 samples a client",
        ),
        "Key findings": (
            "the effect of training tasks together",
            "30 rounds, all clients, no failures",
            "the fall of STS-B after round 2",
            "why SST-2 is behind: few samples, two layers, no pretraining",
        ),
        "Recommendations": (
            "early stopping per task",
            "cosine or step schedule",
            "more samples a client",
            "learning rates per task",
            "distillation from a larger teacher",
            "auxiliary tasks",
        ),
        "Training efficiency": (
            "total time and time a round",
            "model size",
            "clients and samples",
            "faster than centralized training",
        ),
        "Overall assessment": (
            "a grade",
            "federated matches or exceeds centralized",
            "validation after every round",
            "raw data stays at the clients",
            "more clients and tasks",
        ),
        "Conclusion": ("ready for production",),
        "References": ("TinyBERT, GLUE, MT-DNN, bert-tiny",),
        "Next steps": ("early stopping, more samples, schedules",),
    },
    "The guide": {
        "Overview": ("one model at the server, slices at clients, averaging by task",),
        "Architecture": ("the diagram: encoder, three heads, three clients",),
        "Components": (
            "MTLServerModel and its five methods",
            "heads: Linear(hidden, 2), (hidden, 2), (hidden, 1)",
            "MTLAggregator.aggregate_mtl_updates",
            "the server's loop",
            "synchronization with task slices",
            "full-model synchronization, as before",
            "clients with a task label",
        ),
        "Training flow": (
            "1. slices go out",
            "2. local training",
            "3. updates with task and metrics come back",
            "4. encoder over all, heads within their task",
            "5. the model is updated",
        ),
        "Benefits": (
            "1. transfer between tasks",
            "2. heads of any output",
            "3. parameter efficiency",
            "4. better generalization on small tasks",
        ),
        "Configuration": (
            "the YAML",
            "client_model",
        ),
        "Running": (
            "start the server",
            "SST-2 client",
            "QQP client",
            "STSB client",
            "a client with files of its site",
        ),
        "Monitoring": (
            "MTL Server Model Summary, Base Model, Tasks",
            "Shared Parameters, head and Total Parameters",
            "=== Round 1/10 ===",
            "Aggregating updates from 3 clients across 3 tasks",
            "Task 'sst2': 1 clients",
            "Aggregated 285 shared parameters from ALL 3 clients",
            "Aggregated 2 parameters for task 'sst2' head",
            "per-task metrics",
        ),
        "Standard FL vs MTL FL": (
            "server model",
            "aggregation",
            "knowledge transfer",
            "parameters",
            "scalability with tasks",
            "performance",
        ),
        "References": ("MT-DNN, its PDF, FedAvg",),
        "Future": (
            "1. task weighting",
            "2. auxiliary tasks",
            "3. clients that switch tasks between rounds",
            "4. groups of tasks, of any depth",
            "5. layers that learn whether to be shared",
        ),
    },
    "The scaling paper": {
        "Abstract": (
            "three BERT variants, text classification, up to 32 clients",
            "DistilBERT converges slowly or falls to chance",
            "author identification",
        ),
        "1 Introduction": (
            "pretraining, then fine-tuning",
            "fixed budget, fixed data, clients vary",
            "a handful of clients, or millions of phones",
            "later: fixed data per client",
            "later: non-iid clients",
        ),
        "2 Related work": (
            "one-shot federated learning",
            "FedProx, SCAFFOLD and other adaptations",
            "non-iid client data",
            "user-level differential privacy",
            "federated named entity recognition",
            "federated pretraining",
            "FedDF, distillation at the server",
        ),
        "3.1 Federated learning": (
            "FedAvg: the mean weighted by data size (equation 1)",
            "SGD, E local epochs, batch size B, rounds",
            "distributed PyTorch",
        ),
        "3.2 Models": (
            "BERT, ALBERT, DistilBERT, base and cased",
            "110M, 11M and 65M parameters, 12, 12 and 6 layers",
            "DistilBERT's classifier: a hidden layer on the first token",
            "models with a trained head from transformers",
            "what works with which encoder",
            "encoders of other shapes without weights",
        ),
        "3.3 Datasets": (
            "IMDB",
            "Yelp F",
            "AG News",
            "the datasets as files",
            "the test set of the source",
        ),
        "3.4 Experiments": (
            "1, 2, 4, 8, 16, 32 clients, iid, even parts",
            "one client as the baseline",
            "100 rounds, 200 to reach 90%; Yelp 50 and 100",
            "SGD 2e-5, no momentum, decay or schedule, length 128, batch 32, 2 epochs",
            "failures are reported",
        ),
        "4.1 Fixed budget": ("figure 1: accuracy by clients, chance dashed",),
        "4.2 Rounds to target": ("figure 2: rounds to 90% of one client's",),
        "4.3 Dynamics": ("figure 3: test accuracy over rounds",),
        "5 Discussion": (
            "BERT and ALBERT scale, DistilBERT does not",
            "later: why DistilBERT is slower",
            "later: what affects communication efficiency",
            "later: smaller parts or contradicting models",
            "a steeper decline on IMDB",
        ),
    },
    "The TinyBERT slides": {
        "Introduction": ("a smaller student of a large teacher",),
        "Objective": (
            "attention",
            "hidden states through W_h",
            "embeddings through W_e",
            "prediction layer",
        ),
        "Two stages": (
            "1. general distillation from a plain BERT",
            "2. task distillation from a fine-tuned teacher",
            "augmented data in stage 2",
            "both stages, measured",
        ),
        "Data augmentation": (
            "words are replaced",
            "candidates of BERT",
            "candidates of GloVe",
        ),
        "Layer mapping": ("uniform, top, bottom",),
        "TinyBERT learning": (
            "teacher 12x768, student 4x312",
            "the sum over layers with weights (equation 6)",
            "L_embd, L_attn, L_hidn",
            "L_pred, soft cross-entropy at t",
        ),
        "Results TinyBERT": (
            "size, speed-up, share of the score",
            "parameters and FLOPs",
            "MNLI, QQP, QNLI, SST-2, CoLA, STS-B, MRPC, RTE and their average",
        ),
        "Test environment": (
            "SST-2, MRPC, RTE, CoLA; teacher and student",
            "uniform is the best map",
        ),
        "Tasks": (
            "CoLA, with Matthews",
            "RTE",
            "SST-2",
            "MRPC",
        ),
        "Extension 1": (
            "flexible maps, benchmarked",
            "the code of the three maps",
        ),
        "Extension 2": (
            "FP32 to INT8, smaller and faster",
            "static, with calibration data",
            "INT8 weights, INT8 or UINT8 activations",
            "for the fine-tuned teacher, not the students",
            "QDQ",
            "QOperator",
        ),
        "Extension 3": (
            "global magnitude over all linear layers",
            "in steps over the first epochs",
            "zeros stay: masked gradients, masked weights, baked in",
            "while distilling",
        ),
        "Results": (
            "teacher, student, paper, retention by task",
            "20 passes of the intermediate stage and 3 of the prediction",
            "size in MB and %, latency, speed-up",
            "QDQ and QOperator beside them",
        ),
        "Augmentation x30": (
            "CoLA, Matthews",
            "RTE, accuracy",
        ),
        "Pruning comparison": (
            "sparsity of 6%",
            "compressed file size",
        ),
        "Conclusion": (
            "strong compression, drops by task",
            "trends of the layer maps are reproducible",
            "quantization as an alternative to distillation",
            "pruning has little effect",
            "augmentation and distillation cost time",
            "results depend on the set-up",
        ),
    },
    "The minBERT report": {
        "Abstract": ("three tasks, one model, against one model a task",),
        "1 Key information": ("who did what",),
        "2 Introduction": ("small devices: memory, power and compute",),
        "3 Related work": ("BERT, LoRA, PALs, SMART",),
        "4 Approach": (
            "12 layers, self-attention and AdamW written anew",
            "heads: dropout and a linear layer, one output for PARA with BCE",
            "pairs joined with SEP",
            "cross-entropy, BCE, MSE",
            "a task drawn for every epoch",
            "the model of the best average is what counts",
        ),
        "4.1 Task scheduling": (
            "random",
            "round robin",
            "annealed sampling (equation 1)",
            "fixed seed, the same order in every test",
        ),
        "4.2 LoRAs": (
            "h = W_0 + alpha BA (equation 2)",
            "last-linear-layer mode",
            "full-model mode",
        ),
        "4.3 PALs": (
            "the BERT layer (equations 3 to 5)",
            "TS(h) beside the layer (equations 6 and 7)",
            "figure 1: the original and the alternative wiring",
            "low-rank, d_s = 100",
            "PALs, d_s = 204, nothing shared",
            "PALs, V^E and V^D shared across layers",
            "mixed",
            "shared attention",
        ),
        "4.4 SMART": (
            "the objective (equations 8 and 9)",
            "symmetric KL (equation 10)",
            "noise on the embeddings",
            "only the regularizer, no Bregman step",
        ),
        "5.1 Data": (
            "SST and CFIMDB combined, 0-1 as 0-4",
            "Quora and STS files of the course, csv with tabs",
            "SST-5 and CFIMDB as tasks",
        ),
        "5.2 Evaluation": (
            "accuracy, Pearson, their average",
            "loss and scores on dev after every epoch",
        ),
        "5.3 Details": (
            "30,000 steps, 100 epochs of 300, batch 16, 1e-5, dropout 0.3, AdamW without decay",
            "evaluation every n epochs",
        ),
        "5.4.1 Baselines": ("three models of one task, one of all",),
        "5.4.2 Scheduling": (
            "table 6 in words; passes over each dataset",
            "later: 0.8 as a hyperparameter",
        ),
        "5.4.3 LoRAs": (
            "table 1",
            "trainable parameters, to the unit",
            "training time, evaluation time",
            "size on disk",
        ),
        "5.4.4 PALs": (
            "table 2",
            "for SST only",
        ),
        "5.4.5 SMART": ("table 3",),
        "5.4.6 Combined": (
            "table 4, dev",
            "table 4, test",
            "configuration 1: PALs and SMART",
            "configuration 2: with LoRA",
            "configuration 3: large batches",
            "figure 2: confusion matrices, residuals",
        ),
        "6 Analysis": (
            "figure 3: training loss by hyperparameter",
            "predictions off by 3.0 or more",
            "memory while training",
            "LoRA makes evaluation slower: evaluate less often",
            "SMART's noise and weight may differ by dataset, task and layer",
            "later: the bug that perturbed both sides",
            "later: LoRA and paraphrase",
        ),
        "7 Conclusion": ("later: LoRA in chosen layers",),
        "8 Ethics": (
            "misuse of a model",
            "resources and energy",
            "personal data and bias in datasets",
            "reproducibility",
            "guidelines for responsible use",
        ),
        "A Dataset sizes": ("examples of train, dev and test",),
        "B Pearson": ("equation 11",),
        "C Baselines": ("table 5",),
        "D Scheduling": ("table 6",),
        "E LoRA": ("figure 4: the architecture",),
        "F PALs": ("figure 5: the architecture",),
        "G Confusion": ("figure 6: best and baseline model",),
        "H STS errors": ("table 7: MSE, RMSE, MAE, R2 with deviations",),
    },
}


@dataclass(frozen=True)
class Row:
    """One line of a table: which item of which document, what shows it, and where we differ."""

    document: str
    section: str
    item: str
    shown: str
    reason: str

    @property
    def commands(self) -> list[str]:
        return [code for code in CODE.findall(self.shown) if code.startswith(("fedmtl ", "python "))]

    @property
    def paths(self) -> list[Path]:
        """The files that the row names: links from the page, and paths from the root in backticks."""
        linked = [PAGE.parent / link.partition("#")[0] for link in LINK.findall(self.shown) if not link.startswith("#")]
        return linked + [ROOT / code for code in CODE.findall(self.shown) if PATH.fullmatch(code)]


def rows() -> Iterator[Row]:
    document = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            document = line.removeprefix("## ")
        elif line.startswith("| ") and not line.startswith(("| section |", "| slide |")):
            cells = [cell.strip() for cell in COMMENT.sub("", line).split("|")[1:-1]]
            assert len(cells) == 4, f"{line}: a row has four cells"
            yield Row(document, *cells)


ROWS = list(rows())


def parameter(row: Row) -> Any:
    return pytest.param(row, id=f"{row.section}: {row.item}")


def parse(words: list[str]) -> Any:
    """The context of the command as the app itself reads its options; nothing is run."""
    command: Any = COMMANDS
    context, name = None, "fedmtl"
    while True:
        context = command.make_context(name, list(words), parent=context)
        if not hasattr(command, "resolve_command"):
            return context
        words = [*context._protected_args, *context.args]
        assert words, "no command"
        name, command, words = command.resolve_command(context, words)


def check_command(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the app read the command, and the config its settings."""
    monkeypatch.chdir(ROOT)  # the files that a command names are of the project
    program, *words = shlex.split(line)
    if program == "python":
        assert (ROOT / words[0]).is_file(), f"{line}: no such script"
        words = as_command(words[1:])
    context = parse(words)
    options = context.params
    if words[0] == "study" and words[1] != "wire":
        check_tasks(filter(None, (options.get("tasks") or "").split(",")))
        context.command.callback(**options)  # with `plan_only` this makes the cells, and runs none
        return
    config = options.get("config") or options.get("file") if words[0] in ("run", "config", "server") else None
    settings = [value for option in context.command.params if "--set" in option.opts for value in options[option.name]]
    if config is not None or settings:
        read = demo_config(settings) if config is None else load_config(config, settings)
        check_tasks(name for name, task in read.tasks.items() if task.source is None)


def check_tasks(names: Iterable[str]) -> None:
    unknown = [name for name in names if name not in BUILTIN]
    assert not unknown, f"{', '.join(unknown)}: no built-in task"


@pytest.fixture(autouse=True)
def plan_only(monkeypatch, tmp_path):
    """A study makes its plan, where it needs no data, and trains nothing: names of rows and tables have to fit it."""

    def run_shown(study: Study[Any, Any], options: Any, grid: Any) -> None:
        if options.quick:
            assert study.plan(options, open_study(tmp_path, "study")).cells

    monkeypatch.setattr("fedmtl_studies.cli.run_shown", run_shown)


def test_every_item_of_the_documents_has_a_row():
    found: dict[str, dict[str, list[str]]] = {}
    for row in ROWS:
        found.setdefault(row.document, {}).setdefault(row.section, []).append(row.item)
    assert {d: {s: tuple(items) for s, items in sections.items()} for d, sections in found.items()} == ITEMS


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.section}: {row.item}")
def test_a_row_has_something_to_see_or_a_reason(row):
    assert row.commands or LINK.search(row.shown) or row.paths or len(row.reason.split()) >= SHORTEST_REASON


@pytest.mark.parametrize("row", [parameter(row) for row in ROWS if row.commands])
def test_commands_are_read_by_the_app_and_their_settings_by_the_config(row, monkeypatch):
    for line in row.commands:
        check_command(line, monkeypatch)


@pytest.mark.parametrize("row", [parameter(row) for row in ROWS if row.paths])
def test_files_exist(row):
    assert [path for path in row.paths if not path.exists()] == []


def test_the_commands_before_the_tables_are_read_too(monkeypatch):
    (block,) = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    for line in block.splitlines():
        check_command(line, monkeypatch)


@pytest.mark.parametrize(
    "line",
    [
        "fedmtl nothing",
        "fedmtl run --nothing",
        "fedmtl study nothing --quick",
        "fedmtl study federated --quick --rows nothing",
        "fedmtl study multitask --quick --tables 9",
        "fedmtl study compression --data DATA --tasks nothing",
        "fedmtl run --set training.nothing=1",
        "fedmtl run --set 'tasks={nothing: }'",
        "fedmtl run --set training.num_rounds=many",
        "fedmtl distill demo --student 1x128 --set nothing=1",
        "fedmtl quantize demo --scheme nothing",
        "fedmtl distill demo",
        "fedmtl config nothing.yaml",
        "python nothing.py --mode server",
        "python federated_main.py --mode client --nothing",
    ],
)
def test_the_check_finds_mistakes(line, monkeypatch):
    with pytest.raises((Exception, SystemExit)):
        check_command(line, monkeypatch)
