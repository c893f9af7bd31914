"""A BERT's config and WordPiece tokenizer, read from their files without transformers.

Importing transformers takes about as long as importing torch, and one answer takes a hundredth of that. So what only
answers reads `config.json` and `tokenizer.json` here. Only files are read that say all there is to know, in the form in
which `save_pretrained` writes them, and that transformers' classes would follow to the letter. For all others the
functions return None: then the caller takes transformers, which also explains what is wrong with a broken file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import Encoding, Tokenizer

from fedmtl.errors import ModelError
from fedmtl.foreign import read_json

# What computing a BERT needs of its config, and what each value must be.
_SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "max_position_embeddings", "type_vocab_size",
)  # fmt: skip
_SHARES = ("hidden_dropout_prob", "attention_probs_dropout_prob", "layer_norm_eps")
# Keys of tokenizer_config.json that change no token, or are read below.
_KNOWN = frozenset({
    "backend", "is_local", "local_files_only", "tokenizer_class", "model_input_names", "model_max_length",
    "do_lower_case", "do_basic_tokenize", "tokenize_chinese_chars", "strip_accents", "never_split",
    "unk_token", "pad_token", "cls_token", "sep_token", "mask_token", "pad_token_type_id",
    "max_length", "pad_to_multiple_of", "padding_side", "stride", "truncation_side", "truncation_strategy",
})  # fmt: skip
_OLDER = ("special_tokens_map.json", "added_tokens.json")
_SPECIAL = ("unk_token", "pad_token", "cls_token", "sep_token", "mask_token")


def plain_config(folder: Path) -> Any | None:
    """The config of a BERT whose `config.json` names every value; None for any other."""
    found = _record(folder / "config.json")
    if (
        found is None
        or found.get("model_type") != "bert"
        or found.get("position_embedding_type") not in (None, "absolute")
    ):
        return None
    padding = found.get("pad_token_id")
    is_whole = (
        all(type(found.get(name)) is int and found[name] > 0 for name in _SIZES)
        and all(type(found.get(name)) in (int, float) and 0 <= found[name] <= 1 for name in _SHARES)
        and (padding is None or (type(padding) is int and 0 <= padding < found["vocab_size"]))
        and found["hidden_size"] % found["num_attention_heads"] == 0
        and isinstance(found.get("hidden_act"), str)
        and type(found.get("is_decoder")) is bool
    )
    return SimpleNamespace(**{"pad_token_id": None, **found}) if is_whole else None


def plain_tokenizer(folder: Path) -> PlainTokenizer | None:
    """The WordPiece tokenizer of a folder; None where transformers might make another of its files."""
    settings, found = _record(folder / "tokenizer_config.json"), _record(folder / "tokenizer.json")
    if settings is None or found is None or not settings.keys() <= _KNOWN:
        return None
    # Files of older versions, from which transformers takes special tokens in place of these.
    if any((folder / name).exists() for name in _OLDER):
        return None
    side, cut = settings.get("truncation_side", "right"), found.get("truncation")
    if side not in ("left", "right") or not (cut is None or _is_cut_at(side, cut)):
        return None
    special: dict[str, str] = {name: settings[name] for name in _SPECIAL if settings.get(name) is not None}
    added = found.get("added_tokens")
    if not isinstance(added, list) or not all(map(_is_special, added)):
        return None
    if not all(isinstance(token, str) for token in special.values()) or "pad_token" not in special:
        return None
    if {token.get("content") for token in added} != set(special.values()) or settings.get("never_split"):
        return None
    if settings.get("tokenizer_class") != "TokenizersBackend" and not _is_of_bert(settings, found, special):
        return None
    try:
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception:  # its kinds are not public; transformers' message names the file
        return None
    pad_id = backend.token_to_id(special["pad_token"])
    return None if pad_id is None else PlainTokenizer(backend, pad_id, side)


def _is_cut_at(side: str, cut: Any) -> bool:
    """Whether the tokenizer's file cuts long texts at that side; transformers takes the file's, whatever else says."""
    return isinstance(cut, dict) and cut.get("direction") == side.title()


def _is_special(token: Any) -> bool:
    """Whether an added token is one that a text's words never become."""
    if not isinstance(token, dict) or not isinstance(token.get("content"), str):
        return False
    return token.get("special") is True and token.get("normalized") is False


def _is_of_bert(settings: dict[str, Any], found: dict[str, Any], special: dict[str, Any]) -> bool:
    """Whether the file says what BertTokenizer, which reads no more than the vocabulary of it, would make."""
    model, post = found.get("model"), found.get("post_processor")
    if settings.get("tokenizer_class") not in ("BertTokenizer", "BertTokenizerFast") or len(special) < len(_SPECIAL):
        return False
    start, end, first, second = (
        {"SpecialToken": {"id": special["cls_token"], "type_id": 0}},
        {"SpecialToken": {"id": special["sep_token"], "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"Sequence": {"id": "B", "type_id": 1}},
    )
    last = {"SpecialToken": {"id": special["sep_token"], "type_id": 1}}
    return (
        isinstance(model, dict)
        and isinstance(model.get("vocab"), dict)
        and {name: value for name, value in model.items() if name != "vocab"}
        == {"type": "WordPiece", "unk_token": special["unk_token"], "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100}
        and found.get("normalizer")
        == {"type": "BertNormalizer", "clean_text": True,
            "handle_chinese_chars": settings.get("tokenize_chinese_chars", True),
            "strip_accents": settings.get("strip_accents"), "lowercase": settings.get("do_lower_case", True)}
        and found.get("pre_tokenizer") == {"type": "BertPreTokenizer"}
        and isinstance(post, dict)
        and (post.get("type"), post.get("single")) == ("TemplateProcessing", [start, first, end])
        and post.get("pair") == [start, first, end, second, last]
        and post.get("special_tokens") == {
            token: {"id": token, "ids": [model["vocab"].get(token)], "tokens": [token]}
            for token in (special["cls_token"], special["sep_token"])
        }
    )  # fmt: skip


def _record(path: Path) -> dict[str, Any] | None:
    try:
        found = read_json(path, "", ModelError)
    except ModelError:
        return None
    return found if isinstance(found, dict) else None


@dataclass(frozen=True)
class Encoded:
    """The encodings of a call, and their columns by the names that transformers gives them."""

    encodings: list[Encoding]

    def __getitem__(self, name: str) -> list[list[int]]:
        return [each.ids if name == "input_ids" else each.type_ids for each in self.encodings]


@dataclass(frozen=True)
class PlainTokenizer:
    """As much of transformers' fast tokenizer as `tasks.tokens` calls; it cannot be saved with a model."""

    backend_tokenizer: Tokenizer
    pad_token_id: int
    truncation_side: str
    split_special_tokens: bool = False
    is_fast: bool = True

    def num_special_tokens_to_add(self, pair: bool = False) -> int:
        return int(self.backend_tokenizer.num_special_tokens_to_add(pair))

    def __call__(
        self,
        texts: Sequence[str],
        seconds: Sequence[str] | None = None,
        *,
        padding: bool,
        truncation: bool,
        max_length: int | None = None,
        return_token_type_ids: bool = True,
        verbose: bool = True,
    ) -> Encoded:
        """Encode texts, or pairs of them; longer ones are cut at `max_length` tokens with `truncation`."""
        assert not padding, "tokens are stored without padding"
        assert return_token_type_ids, "tokens are stored with their segments"
        self.backend_tokenizer.no_padding()
        if truncation:
            assert max_length is not None, "a text is cut at some length"
            self.backend_tokenizer.enable_truncation(max_length, direction=self.truncation_side)
        else:
            self.backend_tokenizer.no_truncation()
        given: list[Any] = list(texts) if seconds is None else list(zip(texts, seconds, strict=True))
        return Encoded(self.backend_tokenizer.encode_batch(given))
