"""The student's word pieces as the teacher knows them, in fewer dimensions: where its training begins."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedmtl.model.encoder import Encoder
from fedmtl.model.wordpiece import INSIDE

# Like BERT's own start: added to positions of that size and then normalised.
DEVIATION = 0.02


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
