"""A WordPiece vocabulary of the student's own, lower case; the same texts give the same pieces and ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tokenizers import Tokenizer, trainers

from fedmtl.compress.pretrain.settings import FEWEST_PIECES
from fedmtl.model.wordpiece import INSIDE, SPECIAL, make_tokenizer


def train_vocabulary(texts: Sequence[str], num_pieces: int) -> dict[str, int]:
    """Piece -> id, special tokens first; fewer than `num_pieces` where the texts do not hold as many."""
    tokenizer = make_tokenizer({token: number for number, token in enumerate(SPECIAL)})
    first, inside = _alphabet(tokenizer, texts, num_pieces)
    # The trainer numbers pieces inside words as it meets them in a hash table, and ids break ties between merges.
    # Numbering them beforehand makes it deterministic. They are special to the trainer only, not to the tokenizer.
    numbered = [*SPECIAL, *(INSIDE + character for character in inside)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=num_pieces,
        special_tokens=numbered,
        initial_alphabet=first,
        limit_alphabet=len(first),
        continuing_subword_prefix=INSIDE,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    ids = tokenizer.get_vocab()
    return dict(sorted(ids.items(), key=lambda item: item[1]))


def _alphabet(tokenizer: Tokenizer, texts: Sequence[str], num_pieces: int) -> tuple[list[str], list[str]]:
    """The characters that begin words and those inside them; rare ones are left to [UNK]."""
    words: Counter[str] = Counter()
    for text in texts:
        words.update(tokenizer.normalizer.normalize_str(text).split())
    first: Counter[str] = Counter()
    inside: Counter[str] = Counter()
    for word, count in words.items():
        for part, _ in tokenizer.pre_tokenizer.pre_tokenize_str(word):
            first[part[0]] += count
            for character in part[1:]:
                inside[character] += count
    most = max(FEWEST_PIECES // 3, num_pieces // 20)
    common = sorted(first + inside, key=lambda character: (-(first[character] + inside[character]), character))[:most]
    return sorted(common), sorted(set(common) & set(inside))
