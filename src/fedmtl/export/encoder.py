"""Encoders as plain transformers and sentence-transformers load them: `AutoModel.from_pretrained(FOLDER)`.

Where tasks have layers of their own, every task has a folder. What several of them share is stored once on disk: values
are sorted into files by the tasks that use them, which transformers' index of a model in several files allows, and a
file that several folders have is one file with several names (hard links). A folder by itself is whole: copied or
uploaded, it needs no other. Where the disk has no hard links, files are copied.

LoRA's matrices are added to their layers; heads that were pruned away come back as heads of zeros, which add nothing,
since transformers builds all heads of a config. Adapters are no part of an encoder that transformers knows.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from fedmtl.config import Config
from fedmtl.errors import FedmtlError
from fedmtl.export.card import model_card
from fedmtl.foreign import excerpt, printable
from fedmtl.model.bert.layout import NUM_HEADS_KEY, attention_width, has_fewer_heads
from fedmtl.model.encoder import Encoder
from fedmtl.model.families import family_of
from fedmtl.model.lora import A, B, merge
from fedmtl.model.multitask import MultiTaskModel
from fedmtl.runs.folder import RunFolder, storage_error
from fedmtl.sharing.plan import ADAPTERS, HEADS, Key, SharingPlan, Weights, owner_task
from fedmtl.tasks.kinds.protocol import PlainHead
from fedmtl.tasks.task import Task

# An empty file that says whose folder it is: what has none is never written over.
MARK = ".fedmtl-export"
# Letters that are read of it; an export has some dozens of files.
MOST_MARK = 1 << 20
INDEX = "model.safetensors.index.json"
# sentence-transformers has both; `pooler` is not among its ways.
POOLING = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token"}
USAGE = """```python
from transformers import AutoModel, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
encoder = AutoModel.from_pretrained("FOLDER")
states = encoder(**tokenizer("a fine film", return_tensors="pt")).last_hidden_state
```

`SentenceTransformer("FOLDER").encode(["a fine film"])` gives one vector a text. No head is in this folder:
`fedmtl export` writes them, for transformers, sentence-transformers and ONNX."""
Origin = tuple[Key | None, ...]


@dataclass(frozen=True)
class TaskValues:
    """A task's values by canonical name as plain layers have them, and the keys that each of them was made of."""

    task: str
    values: Mapping[str, Tensor]
    origins: Mapping[str, Origin]

    @property
    def encoder(self) -> dict[str, Tensor]:
        """The encoder's values alone."""
        return {name: value for name, value in self.values.items() if owner_task(name) is None}

    @property
    def signature(self) -> tuple[Origin, ...]:
        """Equal for tasks whose encoders are equal."""
        return tuple(origin for name, origin in self.origins.items() if owner_task(name) is None)

    @property
    def has_adapters(self) -> bool:
        return any(name.startswith(ADAPTERS) for name in self.values)


def plain_values(model: MultiTaskModel, task: str, view: Mapping[str, Key], weights: Weights) -> TaskValues:
    """The values of a task, with LoRA merged and heads that were removed put back as zeros."""
    names = [name for name in view if owner_task(name) in (None, task)]
    values: dict[str, Tensor] = {name: weights[view[name]].detach().float() for name in names}
    if model.lora is not None:
        values = merge(values, model.lora)
    config = model.encoder.config
    if has_fewer_heads(config):
        values = _widened(values, config)
    origins = {name: tuple(view.get(each) for each in _made_of(name)) for name in values}
    return TaskValues(task, values, origins)


def _made_of(name: str) -> tuple[str, ...]:
    path = name.removesuffix(".weight")
    return (name, path + A, path + B) if path != name else (name,)


def _widened(values: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    family, missing = family_of(config), config.hidden_size - attention_width(config)
    wide = dict(values)
    for name, value in values.items():
        path, _, leaf = name.rpartition(".")
        if not name.startswith(family.layers):
            continue
        if path.endswith(family.attention):
            wide[name] = torch.cat([value, value.new_zeros(missing, *value.shape[1:])])
        elif path.endswith(family.attention_out) and leaf == "weight":
            wide[name] = torch.cat([value, value.new_zeros(len(value), missing)], dim=1)
    return wide


def plain_config(encoder: Encoder) -> dict[str, Any]:
    """The encoder's config as plain transformers need it."""
    config: dict[str, Any] = type(encoder.module.config).from_dict(encoder.module.config.to_dict()).to_diff_dict()
    config.pop(NUM_HEADS_KEY, None)
    return {**config, "dtype": "float32"}


def save_tokenizer(encoder: Encoder, max_length: int, folder: Path) -> None:
    """Write a tokenizer that gives the inputs our encoder gets, and with `truncation=True` cuts where we do."""
    encoder.tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    names = [name for name in ("input_ids", "token_type_ids", "attention_mask") if name in encoder.accepts]
    settings = json.loads(path.read_text()) | {"model_input_names": names, "model_max_length": max_length}
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False))


def _files_in(folder: Path) -> set[str]:
    """Every file and link below a folder, by its path in it, without what Python writes beside code that it ran."""
    found = set()
    for parent, folders, files in os.walk(folder):
        inner = Path(parent).relative_to(folder)
        links = [name for name in folders if (Path(parent) / name).is_symlink()]
        found |= {(inner / name).as_posix() for name in (*files, *links)}
        folders[:] = [name for name in folders if name != "__pycache__"]
    return found


def _check_target(target: Path, may_hold: Callable[[str], bool], *, needs_mark: bool) -> None:
    """Raise a FedmtlError unless nothing but an earlier export would be replaced."""
    if not target.is_symlink() and not target.exists():
        return
    found = _files_in(target) if target.is_dir() and not target.is_symlink() else None
    if found is None or (needs_mark and found and MARK not in found):
        raise FedmtlError(f"{target}: is there already and is no earlier export; name another folder, or remove it")
    known = {MARK}
    if MARK in found and not (target / MARK).is_symlink():
        with (target / MARK).open(encoding="utf-8", errors="replace") as file:
            known |= set(file.read(MOST_MARK).splitlines())
    strange = min((name for name in found - known if not may_hold(name)), default=None)
    if strange is not None:
        name = excerpt(printable(strange))
        raise FedmtlError(f"{target}: holds {name}, which no export wrote; move it away, or name another folder")


@contextmanager
def new_folder(
    target: Path, may_hold: Callable[[str], bool] = lambda name: False, *, needs_mark: bool = True
) -> Iterator[Path]:
    """A folder to write into that takes the target's name when all of it is written, in the stead of an older export.

    An export has a file that names all others of it. A folder that holds any file more is never replaced, unless
    `may_hold` says yes to its path in the folder; without `needs_mark` that also goes for a folder without such a file.
    """
    _check_target(target, may_hold, needs_mark=needs_mark)
    hidden = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    old = hidden.with_suffix(".old")
    try:
        try:
            hidden.mkdir(mode=0o700, parents=True)
            yield hidden
            (hidden / MARK).write_text("".join(f"{name}\n" for name in sorted(_files_in(hidden))), encoding="utf-8")
            # A file may have come while this one was written.
            _check_target(target, may_hold, needs_mark=needs_mark)
            if target.exists():
                target.rename(old)
            hidden.rename(target)
        except OSError as error:
            raise storage_error(error, target.parent) from error
    finally:
        for left in (hidden, old):
            shutil.rmtree(left, ignore_errors=True)


@dataclass(frozen=True)
class EncoderFiles:
    """What the folders of a model's encoders are written from; `pools` says how each task pools."""

    encoder: Encoder
    pools: Mapping[str, str]
    max_length: int
    card: str


def write_encoders(folder: Path, about: EncoderFiles, tasks: Sequence[TaskValues]) -> dict[str, Path]:
    """Write the encoder, or one folder for each task where they differ; by task, its folder.

    The folder appears whole, in the stead of an older one.
    """
    is_one = len({task.signature for task in tasks}) <= 1
    chosen = tasks[:1] if is_one else tasks
    if is_one and "mean" in {about.pools[task.task] for task in tasks}:
        # Of tasks that pool in several ways, the vector of a text is the one that sentence-transformers are used to.
        chosen = [next(task for task in tasks if about.pools[task.task] == "mean")]
    with new_folder(folder) as hidden:
        _write_folders([hidden if is_one else hidden / task.task for task in chosen], chosen, about)
    return {task.task: folder if is_one else folder / task.task for task in tasks}


def write_run_encoders(
    run: RunFolder, model: MultiTaskModel, encoder: Encoder, plan: SharingPlan, weights: Weights, config: Config
) -> dict[str, Path]:
    """Write `model/encoder/` of a run with its card; by task, its folder.

    A task whose encoder stays at the clients, in whole or in part, has none.
    """
    views = plan.keys(model.canonical(), list(model.tasks), "")
    known = {
        task: view
        for task, view in views.items()
        if all(key in weights for name, key in view.items() if owner_task(name) is None)
    }
    tasks = [
        plain_values(model, task, {name: key for name, key in view.items() if owner_task(name) is None}, weights)
        for task, view in known.items()
    ]
    if not tasks:
        return {}
    card = model_card(run, USAGE, config=config)
    about = EncoderFiles(encoder, model.pools, config.model.max_length, card)
    return write_encoders(run.model / "encoder", about, tasks)


def _write_folders(folders: Sequence[Path], tasks: Sequence[TaskValues], about: EncoderFiles) -> None:
    # Origin of a value -> the tasks that use it: values of the same tasks lie in one file.
    users: dict[tuple[str, Origin], list[int]] = {}
    for index, task in enumerate(tasks):
        for name in task.encoder:
            users.setdefault((name, task.origins[name]), []).append(index)
    written: dict[tuple[int, ...], Path] = {}
    for index, (folder, task) in enumerate(zip(folders, tasks, strict=True)):
        folder.mkdir(exist_ok=True)
        files: dict[tuple[int, ...], dict[str, Tensor]] = {}
        for name, value in task.encoder.items():
            files.setdefault(tuple(users[name, task.origins[name]]), {})[name] = value
        where: dict[str, str] = {}
        for number, (owners, values) in enumerate(files.items(), start=1):
            single = len(files) == 1
            name = "model.safetensors" if single else f"model-{number:05d}-of-{len(files):05d}.safetensors"
            where |= dict.fromkeys(values, name)
            if owners in written:
                _link(written[owners], folder / name)
            else:
                save_values(folder / name, values)
                written[owners] = folder / name
        if len(files) > 1:
            total = sum(value.numel() * value.element_size() for value in task.encoder.values())
            _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
        if index == 0:
            save_tokenizer(about.encoder, about.max_length, folder)
            tokenizer = [path for path in folder.iterdir() if path.suffix != ".safetensors" and path.name != INDEX]
        else:
            for path in tokenizer:
                _link(path, folder / path.name)
        _write_json(folder / "config.json", plain_config(about.encoder))
        write_modules(folder, about.pools.get(task.task, ""), about.encoder.hidden_size, about.max_length)
        (folder / "README.md").write_text(about.card)


def write_modules(
    folder: Path, pool: str, width: int, max_length: int, dense: Sequence[tuple[str, Mapping[str, Any]]] = ()
) -> None:
    """Write what makes sentence-transformers of the encoder in a folder: how it pools, and the layers behind that."""
    types = ["models.Transformer", "models.Pooling", *("models.Dense" for _ in dense)]
    paths = ["", "1_Pooling", *(path for path, _ in dense)]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.{kind}"}
        for index, (path, kind) in enumerate(zip(paths, types, strict=True))
    ]
    _write_json(folder / "modules.json", modules)
    _write_json(folder / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False})
    _write_json(folder / "config_sentence_transformers.json", {"prompts": {}, "similarity_fn_name": "cosine"})
    (folder / "1_Pooling").mkdir()
    chosen = POOLING.get(pool, POOLING["mean"])
    pooling = {"word_embedding_dimension": width, **{key: key == chosen for key in POOLING.values()}}
    _write_json(folder / "1_Pooling" / "config.json", pooling)
    for path, config in dense:
        (folder / path).mkdir(exist_ok=True)
        _write_json(folder / path / "config.json", config)


def save_values(path: Path, values: Mapping[str, Tensor]) -> None:
    """Write a safetensors file as transformers reads it."""
    save_file({name: value.cpu().contiguous() for name, value in values.items()}, path, {"format": "pt"})


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2))


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def heads_of(task: TaskValues) -> dict[str, Tensor]:
    """The values of the task's head, by the last parts of their names."""
    prefix = f"{HEADS}{task.task}."
    return {name.removeprefix(prefix): value for name, value in task.values.items() if name.startswith(prefix)}


def plain_head(task: Task, values: TaskValues) -> PlainHead:
    """The head with one output for each label, or one that is the score; as it is for a kind that has neither."""
    parts = heads_of(values)
    weight, bias = parts["weight"].double(), parts["bias"].double()
    head = task.kind_of.plain_head(task, weight, bias)
    return head or PlainHead(weight, bias, None, tuple(f"output {n}" for n in range(len(bias))))
