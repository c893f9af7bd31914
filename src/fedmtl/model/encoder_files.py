"""What an encoder's files tell before anything numeric is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedmtl.config import ModelConfig
from fedmtl.errors import FedmtlError, ModelError
from fedmtl.foreign import excerpt, read_json

# Passed to every from_pretrained: code that comes with a model is never run, and weights are never pickles.
NO_CODE = {"trust_remote_code": False}
NO_PICKLE = {"use_safetensors": True}
CONFIGS = ("config.json", "tokenizer_config.json")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
# No encoder of text has more; a number in config.json would else decide how much memory is allocated.
MOST_LAYERS = 1000
LARGEST_SIZE = 10**8

# The encoder in the box: `fedmtl pretrain` made it, its README.md says how.
SHIPPED = {"tiny": Path(__file__).parent / "tiny"}


def quiet_transformers() -> Any:
    """Return the package transformers, imported when it is first needed: that takes about as long as importing torch.

    What it warns of while loading, such as a missing pooler, is decided and checked by us, so it is silent.
    """
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return transformers


def encoder_folder(name: str) -> Path:
    """Where the files of an encoder would be, if it is in the box or a folder."""
    return SHIPPED.get(name, Path(name))


def check_encoder_files(folder: Path, where: str, *, weights: bool = True) -> None:
    """Raise a ModelError unless the folder is only data: nothing of it is imported or unpickled before this.

    `where` is the setting that names it. Without `weights`, ours are in another file.
    """
    for name in CONFIGS:
        if (folder / name).is_file():
            _check_config(folder / name, where)
    if (folder / "adapter_config.json").exists():
        raise ModelError(
            f"{where}: {folder} holds an adapter that names another model; merge it into its encoder first"
        )
    if not weights:
        return
    if not any(folder.glob("*.safetensors")):
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
        if pickles:
            raise ModelError(
                f"{where}: {folder} has its weights in {pickles[0]}, a pickle, which can run code; convert it to"
                " model.safetensors (load it where you trust it, and `save_pretrained` it again)"
            )


def _check_config(path: Path, where: str) -> None:
    config = read_json(path, f"cannot load it as {where}, so put back a copy of the file", ModelError)
    if not isinstance(config, dict):
        raise ModelError(f"{path}: is no config; put back a copy of the file")
    if "auto_map" in config:
        raise ModelError(
            f"{where}: {path} asks for Python code of its own (auto_map), which is never run here; take an encoder that"
            " transformers knows by itself"
        )
    for name, value in config.items():
        if "attn_implementation" in name and "/" in str(value):
            raise ModelError(
                f"{where}: {path} asks for code from the hub ({name}), which is never run here; drop the key"
            )
        if path.name == "config.json" and _is_endless(name, value):
            raise ModelError(
                f"{where}: {path} has a {name} of {excerpt(value)}, which no encoder has; put back a copy of the file"
            )


def _is_endless(name: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return abs(value) > (MOST_LAYERS if "layer" in name else LARGEST_SIZE)


def check_inside(folder: Path, root: Path) -> None:
    """Raise where a folder has a link that leads out of `root`: a foreign folder opens only files inside it."""
    resolved = root.resolve()
    for path in (folder, *folder.rglob("*")):
        if path.is_symlink() and not path.resolve().is_relative_to(resolved):
            raise FedmtlError(f"{path}: leads out of {root}; copy the file there instead of linking it")


def is_extended(config: ModelConfig) -> bool:
    """Whether parts are added to the encoder, so that transformers' code must compute it."""
    return config.lora is not None or config.adapters is not None


def holds_bert_values(config: ModelConfig) -> bool:
    """Whether the encoder starts from the values of a BERT in a folder, so that its code need not be imported."""
    folder = encoder_folder(config.server_model)
    if is_extended(config) or config.initial == "random" or not (folder / "model.safetensors").is_file():
        return False
    try:
        kind = json.loads((folder / "config.json").read_text())["model_type"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
    return bool(kind == "bert")
