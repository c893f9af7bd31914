"""The student: a small BERT without a pooler, where its training begins, and the folder that comes out.

Its word pieces begin as the teacher knows them, in fewer dimensions. Projections into the teacher's width are thrown
away later. The folder appears whole, and plain transformers loads it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from fedmtl.compress.general import PROJECTIONS, RECORD, General, write_general
from fedmtl.compress.pretrain.card import CARD
from fedmtl.compress.pretrain.settings import PretrainSettings
from fedmtl.errors import FedmtlError
from fedmtl.model.encoder import Encoder
from fedmtl.model.multitask import is_decayed
from fedmtl.model.wordpiece import INSIDE
from fedmtl.seeds import derive_seed

# As in BERT's initialisation: added to positions of that size and then normalised.
DEVIATION = 0.02
WEIGHTS = "model.safetensors"
FILES = {WEIGHTS, "config.json", "tokenizer.json", "tokenizer_config.json", CARD, RECORD, PROJECTIONS}


@torch.no_grad()
def table_from_teacher(pieces: Mapping[str, int], teacher: Encoder, width: int) -> Tensor:
    """A table [piece, width]: the principal components of the teacher's rows.

    A piece the teacher does not have is the mean of the pieces it has for it.
    """
    rows = teacher.module.get_parameter(teacher.table).float().cpu()
    known = teacher.tokenizer.get_vocab()
    vectors = torch.stack([rows[_ids(piece, known, teacher)].mean(0) for piece in pieces])
    vectors = vectors - vectors.mean(0)
    if vectors.shape[1] <= width:
        vectors = torch.nn.functional.pad(vectors, (0, width - vectors.shape[1]))
    else:
        directions = torch.linalg.eigh((vectors.T @ vectors).double()).eigenvectors[:, -width:]
        vectors = vectors @ directions.float()
    return vectors * (DEVIATION / vectors.std())


def _ids(piece: str, known: Mapping[str, int], teacher: Encoder) -> list[int]:
    if piece in known:
        return [known[piece]]
    text = piece.removeprefix(INSIDE)
    ids = teacher.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    return ids or [int(teacher.tokenizer.unk_token_id or 0)]


class Student(nn.Module):
    """An encoder with the projections of its hidden states into the teacher's width."""

    def __init__(self, encoder: Any, projections: nn.Module) -> None:
        super().__init__()
        self.encoder: Any = encoder
        self.projections: Any = projections

    def forward(self, ids: Tensor, mask: Tensor, types: Tensor | None = None) -> tuple[Tensor, ...]:
        """All hidden states [batch, token, width], embeddings first."""
        # Four dimensions: of two, the encoder would ask the device whether any is padded, and wait for it.
        output = self.encoder(
            ids, attention_mask=mask[:, None, None, :], token_type_ids=types, output_hidden_states=True
        )
        states: tuple[Tensor, ...] = output.hidden_states
        return states


def build_student(
    settings: PretrainSettings, num_pieces: int, teacher_width: int, table: Tensor | None = None
) -> Student:
    """A student in evaluation mode, so without dropout, whose bits follow from the settings and the table given.

    It has one projection for each of its hidden states, embeddings first.
    """
    config = BertConfig(
        vocab_size=num_pieces,
        hidden_size=settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.num_heads,
        intermediate_size=4 * settings.hidden,
        max_position_embeddings=settings.max_length,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(settings.seed, "student"))
        encoder = BertModel(config, add_pooling_layer=False)
        widths = config.hidden_size, teacher_width
        projections = nn.ModuleList(nn.Linear(*widths) for _ in range(config.num_hidden_layers + 1))
        student = Student(encoder, projections).float().eval()
    if table is not None:
        with torch.no_grad():
            student.encoder.get_input_embeddings().weight.copy_(table)
    return student


def build_optimizer(student: Student, settings: PretrainSettings) -> torch.optim.Optimizer:
    """AdamW; tables, norms and biases are not decayed."""
    owned = [(module, p) for module in student.modules() for p in module.parameters(recurse=False)]
    groups = [
        {"params": [p for module, p in owned if is_decayed(module, p)], "weight_decay": settings.weight_decay},
        {"params": [p for module, p in owned if not is_decayed(module, p)], "weight_decay": 0.0},
    ]
    device = next(student.parameters()).device
    if device.type != "cuda":
        return torch.optim.AdamW(groups, lr=0.0, fused=True)
    # On the device, so that a recorded step takes the rate it has when it is replayed.
    return torch.optim.AdamW(groups, lr=torch.zeros((), device=device), fused=True, capturable=True)


def check_output_folder(folder: Path) -> None:
    """Raise a FedmtlError where the folder has files that are no artefact of a pretraining, which would be lost."""
    if folder.exists() and not folder.is_dir():
        raise FedmtlError(f"--out: {folder} is a file; name a folder")
    strange = sorted(path.name for path in folder.iterdir() if path.name not in FILES) if folder.exists() else []
    if strange:
        raise FedmtlError(f"--out: {folder} holds {strange[0]}, which would be lost; name a new folder")


def write_artefact(folder: Path, student: Student, tokenizer: Any, card: str, general: General | None = None) -> None:
    """Write float16 weights, config, tokenizer and card; an earlier artefact there is replaced.

    With a record of general distillation, it and the projections are written for `fedmtl distill`.
    """
    check_output_folder(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
            whole = Path(temporary) / "new"
            _write(whole, student.encoder, tokenizer, card)
            if general is not None:
                write_general(whole, general, student.projections.state_dict())
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
    _name_plainly(folder / "tokenizer_config.json", tokenizer, int(config.max_position_embeddings))
    weights = {name: value.detach().cpu().half().contiguous() for name, value in encoder.named_parameters()}
    (folder / WEIGHTS).write_bytes(save(weights, metadata={"format": "pt"}))
    (folder / CARD).write_text(card, encoding="utf-8")


def _name_plainly(path: Path, tokenizer: Any, max_length: int) -> None:
    """Give the tokenizer the class name that every version of transformers knows, and say what its class implied."""
    values = json.loads(path.read_text(encoding="utf-8"))
    values.pop("backend", None)
    values |= {"model_max_length": max_length, "model_input_names": list(tokenizer.model_input_names)}
    plain = {**values, "tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(plain, indent=1), encoding="utf-8")
