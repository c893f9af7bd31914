"""One ONNX graph with a head for every task.

Its inputs are what the encoder takes of `input_ids`, `attention_mask` and `token_type_ids`, of any number of rows and
columns, padded on the right. Its outputs are called `heads.<task>` and are what our model gives: logits, or scores
scaled to 0..1. Two texts that are encoded apart (`pair: dual`) are rows of one call: of 2n rows the first n are first
texts, the others their partners, and the output has n rows. Outputs that do not fit the rows of a call mean nothing;
whoever calls names those that do. With `model.windows` a text may be several rows: `windows` (texts, most of one) has
the rows of each, filled up with -1, and outputs have a row for every text; those of tags have one for every token.

Tasks whose encoder has the same values share one pass. Where a plan gives them separate layers, the graph has a
branch for each, and what comes before the first such layer is there once. LoRA's matrices become part of their layers.
The tasks and the tokenizer are in the file's metadata, so that it answers texts alone.

A bundle is a folder for programs without fedmtl: the graph, `tokenizer.json`, `model.json` with labels and shapes, a
`predict.py` (`bundle_predict.py`) and a README.
"""

from __future__ import annotations

import copy
import json
import logging
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from fedmtl import __version__
from fedmtl.errors import ModelError
from fedmtl.export.card import code, label_list, table
from fedmtl.export.encoder import new_folder
from fedmtl.model.lora import merge
from fedmtl.model.multitask import BoundModel, Inputs, MultiTaskModel, pair_features
from fedmtl.model.saved import SavedModel
from fedmtl.predict.onnx import (
    FORMAT,
    FORMAT_KEY,
    GRAPH,
    INPUTS,
    MODEL_KEY,
    TOKENIZER_KEY,
    WINDOWS,
    output_name,
    require,
)
from fedmtl.runs.folder import write_atomic
from fedmtl.sharing.plan import HEADS
from fedmtl.tasks.task import windows_of

# The first with Gelu as one operator, which ONNX Runtime fuses with the bias before it.
OPSET = 20
# The limit of a protocol buffer.
MOST_BYTES = 2**31 - 1
SHAPES = {WINDOWS: ("texts", "most")}
BESIDE = ("tokenizer.json", "model.json", "predict.py", "README.md")
USAGE = """TABLE

It needs `pip install numpy tokenizers onnxruntime`, and nothing else:

    python predict.py "a fine film"
    python predict.py --file lines.txt

`model.onnx` has every head, `tokenizer.json` pads and truncates, and `model.json` has labels, ranges and shapes. Of a
task with `"pair": "dual"` a call has 2n rows, first texts and then second. A regression's output lies around 0..1 and
stands for its score range; one output z of two labels stands for the logits (0, z). `fedmtl predict`, `evaluate`,
`quantize`, `measure` and `serve` take this folder too, and run no code of it.
"""


def export_onnx(saved: SavedModel, bound: BoundModel, file: Path) -> Path:
    """Write the tasks that `bound` has values for as one file."""
    require("export --to onnx", "onnx", "onnxscript")
    branches = [_branch(bound, tasks) for tasks in same_values(bound)]
    graph = EveryHead(branches).eval()
    size = sum(value.nbytes for value in {id(value): value for value in graph.parameters()}.values())
    if size > MOST_BYTES:
        raise ModelError(f"{saved.encoder.name}: its values take {size / 2**30:.1f} GiB, an ONNX file holds 2 at most")
    model = _trace(graph, _inputs(saved))
    # Branches share the memory of what they have in common.
    num_parameters = sum({value.data_ptr(): value.numel() for value in graph.parameters()}.values())
    model.metadata_props.update(_metadata(saved, graph.tasks, num_parameters))
    import onnx_ir

    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, onnx_ir.to_proto(model).SerializeToString())
    return file


# A model card for what says how to use the files beside it, both in Markdown.
Card = Callable[[str], str]


def export_bundle(
    saved: SavedModel, bound: BoundModel, folder: Path, card: Card | None = None, *, is_ours: bool = False
) -> Path:
    """Write a folder that answers without fedmtl, and return it; `card` makes its README from how to use it.

    It appears whole, in the stead of an older bundle; graphs that `quantize` wrote into that one stay. `is_ours` says
    that the folder is the run's, where a bundle may be of a version that did not name its files.
    """
    own = {GRAPH, *BESIDE} if is_ours else set()
    with new_folder(folder, lambda name: name in own or _is_further(name), needs_mark=not is_ours) as hidden:
        export_onnx(saved, bound, hidden / GRAPH)
        write_beside(saved, list(bound.views), hidden, card)
        for graph in filter(lambda path: _is_further(path.name) and path.is_file(), folder.glob("*.onnx")):
            shutil.copyfile(graph, hidden / graph.name, follow_symlinks=False)
    return folder


def _is_further(name: str) -> bool:
    """Whether it is what `quantize` calls the graphs that it writes into a bundle."""
    return re.fullmatch(r"model\.[\w-]+\.onnx", name) is not None


def write_beside(saved: SavedModel, tasks: Sequence[str], folder: Path, card: Card | None = None) -> None:
    """Write the files of a bundle that lie beside its graph."""
    facts = _facts(saved, tasks)
    write_atomic(folder / "tokenizer.json", _tokenizer(saved).to_str(pretty=True).encode())
    write_atomic(folder / "model.json", (json.dumps(facts, indent=2, ensure_ascii=False) + "\n").encode())
    write_atomic(folder / "predict.py", Path(__file__).with_name("bundle_predict.py").read_bytes())
    write_atomic(folder / "README.md", _readme(facts, card).encode())


def _inputs(saved: SavedModel) -> list[str]:
    """What the graph takes."""
    has_windows = windows_of(saved.tasks) is not None
    return [name for name in INPUTS if name in saved.model.accepts or (name == WINDOWS and has_windows)]


def _facts(saved: SavedModel, tasks: Sequence[str]) -> dict[str, Any]:
    """What a program without fedmtl has to know of the graph: its inputs, and each task's texts, labels and output."""
    known = {}
    windows = windows_of(saved.tasks)
    for name in tasks:
        task = saved.tasks[name]
        batch = "batch" if windows is None or task.kind_of.by_word else "texts"
        rows = f"{batch} / 2" if task.is_dual else batch
        facts: dict[str, Any] = {
            "kind": task.kind,
            "texts": list(task.text),
            "pair": task.pair if task.is_pair else None,
            "output": output_name(name),
            "shape": [rows, *(["length"] if task.kind_of.by_word else []), task.kind_of.num_outputs(task)],
        }
        if task.labels:
            facts["labels"] = list(task.labels)
        scale = task.kind_of.scale(task)
        if scale is not None:
            facts["score_range"] = list(scale)
        known[name] = facts
    cut = {} if windows is None else {"windows": {"stride": windows.stride, "most": windows.most}}
    return {
        "format": FORMAT,
        "made_by": f"fedmtl {__version__}",
        "encoder": Path(saved.encoder.name).name,
        "graph": GRAPH,
        "max_length": saved.max_length,
        **cut,
        "inputs": {name: list(SHAPES.get(name, ("batch", "length"))) for name in _inputs(saved)},
        "tasks": known,
    }


def _readme(facts: Mapping[str, Any], card: Card | None) -> str:
    rows = [(code(name), ", ".join(map(code, task["texts"])), _range(task)) for name, task in facts["tasks"].items()]
    usage = USAGE.replace("TABLE", table(("task", "texts", "answers"), rows))
    return card(usage) if card else f"# {code(facts['encoder'])} with {len(facts['tasks'])} tasks\n\n{usage}"


def _range(task: Mapping[str, Any]) -> str:
    if "labels" in task:
        return label_list(task["labels"])
    return " to ".join(f"{end:g}" for end in task["score_range"]) if "score_range" in task else task["kind"]


class EveryHead(nn.Module):
    """All tasks' outputs for one batch, one encoder pass a branch."""

    def __init__(self, branches: Sequence[tuple[MultiTaskModel, Sequence[str]]]) -> None:
        super().__init__()
        self.models = nn.ModuleList(model for model, _ in branches)
        self.branches = [list(tasks) for _, tasks in branches]

    @property
    def tasks(self) -> list[str]:
        return [task for tasks in self.branches for task in tasks]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
        windows: Tensor | None = None,
    ) -> list[Tensor]:
        inputs = Inputs(input_ids, attention_mask, input_ids if token_type_ids is None else token_type_ids)
        outputs = []
        for model, tasks in zip(self.models, self.branches, strict=True):
            assert isinstance(model, MultiTaskModel)
            encoded = model.encode(tasks[0], inputs)
            for task in tasks:
                vectors = model.pool(task, *encoded)
                if windows is not None and not model.tasks[task].kind_of.by_word:
                    vectors = model.windows(task, vectors, windows)
                outputs.append(_head(model, task, vectors))
        return outputs


def _head(model: MultiTaskModel, task: str, vectors: Tensor) -> Tensor:
    if model.tasks[task].is_dual:
        # Also defined, if without meaning, for an odd number of rows, such as one: another task's call may have it, and
        # ONNX Runtime does not reduce what is empty.
        num_rows = vectors.shape[0]
        firsts = torch.arange((num_rows + 1) // 2)
        vectors = pair_features(vectors[firsts], vectors[firsts + num_rows // 2])
    return model.outputs(task, vectors)


def same_values(bound: BoundModel) -> list[list[str]]:
    """Group the tasks whose encoder values, adapters included, are all the same."""
    groups: dict[Any, list[str]] = {}
    for task, view in bound.views.items():
        encoder = tuple(key for name, key in view.items() if not name.startswith(HEADS))
        groups.setdefault(encoder, []).append(task)
    return list(groups.values())


def _branch(bound: BoundModel, tasks: Sequence[str]) -> tuple[MultiTaskModel, Sequence[str]]:
    """Copy the model into a plain one with these tasks' values and heads alone."""
    model = copy.deepcopy(bound.use(tasks[0]))
    parameters = model.canonical()
    values: dict[str, Tensor] = {}
    for task in tasks:
        values |= {name: bound.parameters[key].detach() for name, key in bound.views[task].items()}
    if model.lora is not None:
        values = merge(values, model.lora)
        _unwrap(model)
    for name, value in values.items():
        module, leaf = parameters[name]
        module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    for part in (model.heads, model.hidden, model.windows):
        for name in [name for name in part._modules if name not in tasks]:
            del part._modules[name]
    # Its masks and products are operators that quantization and ONNX Runtime's fusions know.
    model.encoder.set_attn_implementation("eager")
    return model.eval(), tasks


def _unwrap(model: nn.Module) -> None:
    """Put back every layer that LoRA had wrapped."""
    for module in list(model.modules()):
        for name, child in module._modules.items():
            plain = getattr(child, "base_layer", None)
            if isinstance(plain, nn.Module):
                module._modules[name] = plain


def _trace(graph: EveryHead, names: Sequence[str]) -> Any:
    """The graph as onnx_ir has it, with rows and columns of any number."""
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    # Two of anything, or an even number, might be taken for a rule.
    ids = torch.ones(6, 9, dtype=torch.long)
    offered = {"input_ids": ids, "attention_mask": ids, "token_type_ids": torch.zeros_like(ids)}
    given = {name: offered[name].clone() for name in names if name in offered}
    shapes = {name: {0: batch, 1: length} for name in given}
    if WINDOWS in names:
        given[WINDOWS] = torch.tensor([[0, 1, -1], [2, -1, -1], [3, 4, 5], [0, 5, -1]])
        shapes[WINDOWS] = {0: torch.export.Dim("texts"), 1: torch.export.Dim("most")}
    with _quiet():
        program = torch.onnx.export(
            graph,
            kwargs=given,
            dynamo=True,
            verbose=False,
            opset_version=OPSET,
            input_names=list(names),
            output_names=[output_name(task) for task in graph.tasks],
            dynamic_shapes=shapes,
        )
    assert program is not None
    return _once(program.model) if len(graph.models) > 1 else program.model


def _once(model: Any) -> Any:
    """Merge the nodes by which several branches compute the same from the same values."""
    from onnx_ir.passes import common

    common.DeduplicateInitializersPass(size_limit=MOST_BYTES)(model)
    common.CommonSubexpressionEliminationPass()(model)
    common.RemoveUnusedNodesPass()(model)
    return model


def _metadata(saved: SavedModel, tasks: Sequence[str], num_parameters: int) -> dict[str, str]:
    record = {
        "encoder": Path(saved.encoder.name).name,
        "max_length": saved.max_length,
        "parameters": num_parameters,
        "tasks": {name: asdict(task) for name, task in saved.tasks.items() if name in tasks},
    }
    return {
        FORMAT_KEY: str(FORMAT),
        MODEL_KEY: json.dumps(record),
        TOKENIZER_KEY: _tokenizer(saved).to_str(),
    }


def _tokenizer(saved: SavedModel) -> Tokenizer:
    """A tokenizer that pads and cuts by itself, as ours does by arguments of every call."""
    ours = saved.encoder.tokenizer
    if not ours.is_fast:
        raise ModelError(f"{saved.encoder.name}: its tokenizer has no tokenizer.json; save it with a fast tokenizer")
    tokenizer = Tokenizer.from_str(ours.backend_tokenizer.to_str())
    # Where texts have windows whoever calls cuts them; the length and the side say how.
    tokenizer.enable_truncation(saved.max_length, direction=ours.truncation_side)
    padding = {"pad_id": saved.model.pad_id, "pad_type_id": ours.pad_token_type_id}
    tokenizer.enable_padding(**padding, pad_token=ours.pad_token or "[PAD]")
    return tokenizer


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's log and warnings inside the block; errors are still raised."""
    # The second one writes down where every symbol came from, if anybody listens, which takes longer than the export.
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.__trace")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
