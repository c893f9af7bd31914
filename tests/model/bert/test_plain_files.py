"""Files that are read without transformers give what transformers makes of them, or are left to it."""

import json

import pytest
from transformers import AutoConfig, AutoTokenizer, BertTokenizer

from fedmtl.model.bert.layout import is_computed
from fedmtl.model.bert.plain_files import plain_config, plain_tokenizer
from fedmtl.model.encoder_files import SHIPPED
from fedmtl.model.saved import load_model, save_model
from fedmtl.model.wordpiece import wrap_tokenizer
from fedmtl.sharing.plan import SharingPlan
from fedmtl.sharing.weights import initial_weights

from ..tiny import LENGTH, SINGLES, ModelConfig, load, make_task

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PIECES = {
    piece: number for number, piece in enumerate([*SPECIAL, *"abcdefé", *(f"##{c}" for c in "abcdef"), "cafe", "."])
}
TEXTS = ["a café, CAFÉ", "", "abc " * 9, "[MASK] ab [SEP] c", "\u4e2d\u6587 a\u0301b\x00\tc", "Ab\u200bcd x", "a" * 120]
SAVED = {
    "ours": lambda: wrap_tokenizer(PIECES),
    "cut at the left": lambda: wrap_tokenizer(PIECES, truncation_side="left"),
    "of BERT": lambda: BertTokenizer(PIECES),
    "with capitals": lambda: BertTokenizer(PIECES, do_lower_case=False),
    "without accents": lambda: BertTokenizer(PIECES, strip_accents=True, tokenize_chinese_chars=False),
}


def columns(encoded):
    return [list(map(list, encoded[name])) for name in ("input_ids", "token_type_ids")]


@pytest.mark.parametrize("kind", [*SAVED, "in the box"])
@pytest.mark.parametrize("num_texts", [1, 2])
def test_a_tokenizer_gives_the_tokens_that_transformers_gives(tmp_path, kind, num_texts):
    if kind in SAVED:
        SAVED[kind]().save_pretrained(tmp_path)
    else:
        AutoTokenizer.from_pretrained(SHIPPED["tiny"]).save_pretrained(tmp_path)
    ours, theirs = plain_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    texts = [TEXTS, TEXTS[::-1]][:num_texts]
    for cut in ({"truncation": True, "max_length": 9}, {"truncation": False}):
        options = {"padding": False, "return_token_type_ids": True, **cut}
        left, right = ours(*texts, **options), theirs(*texts, **options)
        assert columns(left) == columns(right)
        for one, other in zip(left.encodings, right.encodings, strict=True):
            assert (one.offsets, one.sequence_ids) == (other.offsets, other.sequence_ids)
            assert bool(one.overflowing) is bool(other.overflowing)
    assert ours.pad_token_id == theirs.pad_token_id == 0
    assert ours.num_special_tokens_to_add(num_texts == 2) == theirs.num_special_tokens_to_add(num_texts == 2)


def mend(path, **keys):
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


@pytest.mark.parametrize(
    ("file", "keys"),
    [
        ("tokenizer_config.json", {"split_special_tokens": True}),
        ("tokenizer_config.json", {"tokenizer_class": "RobertaTokenizer"}),
        ("tokenizer_config.json", {"do_lower_case": False}),
        ("tokenizer_config.json", {"cls_token": "<s>"}),
        ("tokenizer_config.json", {"cls_token": {"content": "[CLS]", "lstrip": True}}),
        ("tokenizer.json", {"normalizer": None}),
        ("tokenizer.json", {"added_tokens": []}),
        ("tokenizer.json", {"model": {"type": "WordPiece"}}),
        ("tokenizer.json", {"model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                                      "max_input_chars_per_word": 100, "vocab": ["[CLS]"]}}),
        ("tokenizer.json", {"added_tokens": [{"content": [], "special": True, "normalized": False}]}),
        ("tokenizer.json", {"version": "9"}),
        ("tokenizer.json", {"truncation": {"direction": "Left", "max_length": 4, "strategy": "LongestFirst",
                                           "stride": 0}}),
    ],
)  # fmt: skip
def test_a_tokenizer_of_which_transformers_may_make_another_is_left_to_it(tmp_path, file, keys):
    BertTokenizer(PIECES).save_pretrained(tmp_path)
    assert plain_tokenizer(tmp_path) is not None
    mend(tmp_path / file, **keys)
    assert plain_tokenizer(tmp_path) is None


@pytest.mark.parametrize("wrong", [{"ids": [7]}, {"ids": [2, 7], "tokens": ["[CLS]", "a"]}])
def test_a_tokenizer_that_begins_texts_with_other_tokens_than_it_says_is_left_to_transformers(tmp_path, wrong):
    BertTokenizer(PIECES).save_pretrained(tmp_path)
    post = json.loads((tmp_path / "tokenizer.json").read_text())["post_processor"]
    post["special_tokens"]["[CLS]"] |= wrong
    mend(tmp_path / "tokenizer.json", post_processor=post)
    # It makes its own.
    assert AutoTokenizer.from_pretrained(tmp_path)(["a"])["input_ids"] == [
        [PIECES[piece] for piece in ("[CLS]", "a", "[SEP]")]
    ]
    assert plain_tokenizer(tmp_path) is None


@pytest.mark.parametrize("file", ["special_tokens_map.json", "added_tokens.json"])
def test_a_tokenizer_with_files_of_older_versions_is_left_to_transformers(tmp_path, file):
    BertTokenizer(PIECES).save_pretrained(tmp_path)
    (tmp_path / file).write_text('{"cls_token": "[MASK]"}' if "map" in file else '{"cafe": 12}')
    assert plain_tokenizer(tmp_path) is None


@pytest.mark.parametrize(
    "keys",
    [
        {"model_type": "electra"}, {"hidden_size": "128"}, {"num_hidden_layers": True}, {"hidden_size": 127},
        {"layer_norm_eps": -1}, {"is_decoder": None}, {"pad_token_id": 10**6},
        {"position_embedding_type": "relative_key"},
    ],
)  # fmt: skip
def test_a_config_is_that_of_transformers_or_is_left_to_it(tmp_path, keys):
    AutoConfig.from_pretrained(SHIPPED["tiny"]).save_pretrained(tmp_path)
    ours, theirs = plain_config(tmp_path), AutoConfig.from_pretrained(tmp_path)
    # What computing reads, apart from what only says how the file was written.
    known = vars(ours).keys() - {"transformers_version", "dtype", "architectures"}
    assert {name: getattr(ours, name) for name in known} == {name: getattr(theirs, name) for name in known}
    assert is_computed(ours)
    mend(tmp_path / "config.json", **keys)
    assert plain_config(tmp_path) is None


def test_a_model_that_only_answers_is_opened_without_transformers_and_answers_the_same(tmp_path, monkeypatch):
    task = make_task(pool="mean")
    encoder, model = load("tiny", [task])
    plan = SharingPlan((("heads.*", "task"), ("*", "all")))
    save_model(tmp_path, encoder, {"single": task}, plan, initial_weights(model, plan), ModelConfig(max_length=LENGTH))
    whole = load_model(tmp_path)
    monkeypatch.setattr("fedmtl.model.saved.quiet_transformers", lambda: pytest.fail("transformers is not needed"))
    light = load_model(tmp_path, values_only=True)
    answers = []
    for saved in (whole, light):
        encoded = saved.encoder.tokenizer(
            [text for (text,) in SINGLES[:1]],
            padding=False,
            truncation=True,
            max_length=LENGTH,
            return_token_type_ids=True,
        )
        answers.append(encoded["input_ids"])
    assert answers[0] == answers[1]
    assert light.encoder.accepts == whole.encoder.accepts
    assert light.model.layout == whole.model.layout
