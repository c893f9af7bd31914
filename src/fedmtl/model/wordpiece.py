"""WordPiece tokenizers by BERT's uncased rules, made in code from a table of pieces."""

from __future__ import annotations

import string
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from fedmtl.model.encoder_files import quiet_transformers
from fedmtl.tasks.embedded import vocabulary

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
INSIDE = "##"


def basic_tokenizer() -> Any:
    """Whole words of the embedded data, and single characters for all other text."""
    letters = string.ascii_lowercase + string.digits
    words = [*SPECIAL, *letters, *(INSIDE + c for c in letters), *string.punctuation, *vocabulary()]
    return wrap_tokenizer({word: index for index, word in enumerate(dict.fromkeys(words))})


def make_tokenizer(pieces: dict[str, int]) -> Tokenizer:
    """A tokenizer over these pieces; a text alone becomes [CLS] text [SEP]."""
    tokenizer = Tokenizer(models.WordPiece(pieces, unk_token="[UNK]", continuing_subword_prefix=INSIDE))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=INSIDE)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", pieces["[SEP]"]), ("[CLS]", pieces["[CLS]"]))
    return tokenizer


def wrap_tokenizer(pieces: dict[str, int], **options: Any) -> Any:
    """The tokenizer over these pieces as transformers saves and loads it."""
    return quiet_transformers().PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(pieces),
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **options,
    )
