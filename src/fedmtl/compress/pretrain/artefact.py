"""The folder that comes out: it appears whole, and plain transformers loads it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from fedmtl.compress.pretrain.card import CARD
from fedmtl.errors import FedmtlError

WEIGHTS = "model.safetensors"
FILES = {WEIGHTS, "config.json", "tokenizer.json", "tokenizer_config.json", CARD}


def check_place(folder: Path) -> None:
    """Raise an error where something that is not such an artefact would be overwritten."""
    if folder.exists() and not folder.is_dir():
        raise FedmtlError(f"--out: {folder} is a file; name a folder")
    strange = sorted(path.name for path in folder.iterdir() if path.name not in FILES) if folder.exists() else []
    if strange:
        raise FedmtlError(f"--out: {folder} holds {strange[0]}, which would be lost; name a new folder")


def write_artefact(folder: Path, encoder: Any, tokenizer: Any, card: str) -> None:
    """float16 weights, config, tokenizer and card; an earlier artefact there is replaced."""
    check_place(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
            whole = Path(temporary) / "new"
            _write(whole, encoder, tokenizer, card)
            if folder.exists():
                folder.rename(Path(temporary) / "old")
            whole.rename(folder)
    except OSError as error:
        raise FedmtlError(f"--out: {folder} cannot be written ({error.strerror or error}); name another") from error


def _write(folder: Path, encoder: Any, tokenizer: Any, card: str) -> None:
    folder.mkdir()
    config = type(encoder.config).from_dict(encoder.config.to_dict())
    config.architectures = ["BertModel"]
    config.dtype = torch.float16
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _name_plainly(folder / "tokenizer_config.json")
    weights = {name: value.detach().cpu().half().contiguous() for name, value in encoder.named_parameters()}
    (folder / WEIGHTS).write_bytes(save(weights, metadata={"format": "pt"}))
    (folder / CARD).write_text(card, encoding="utf-8")


def _name_plainly(path: Path) -> None:
    """Give the tokenizer the class name that every version of transformers knows."""
    values = json.loads(path.read_text(encoding="utf-8"))
    values.pop("backend", None)
    path.write_text(json.dumps({**values, "tokenizer_class": "PreTrainedTokenizerFast"}, indent=1), encoding="utf-8")
