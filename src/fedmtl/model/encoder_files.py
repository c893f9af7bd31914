"""What an encoder's files tell before anything numeric is loaded."""

from __future__ import annotations

import json
from pathlib import Path

from fedmtl.config import ModelConfig

# The encoder in the box: `fedmtl pretrain` made it, its README.md says how.
SHIPPED = {"tiny": Path(__file__).parent / "tiny"}


def encoder_folder(name: str) -> Path:
    """Where the files of an encoder would be, if it is in the box or a folder."""
    return SHIPPED.get(name, Path(name))


def is_extended(config: ModelConfig) -> bool:
    """Whether parts are added to the encoder, so that its own code must compute it."""
    return config.lora is not None or config.adapters is not None


def holds_bert_values(config: ModelConfig) -> bool:
    """Whether the encoder starts from the values of a BERT in a folder, so that its code need not be imported."""
    folder = encoder_folder(config.server_model)
    if is_extended(config) or config.initial == "random" or not (folder / "model.safetensors").is_file():
        return False
    try:
        kind = json.loads((folder / "config.json").read_text())["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(kind == "bert")
