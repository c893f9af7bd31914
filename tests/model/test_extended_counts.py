"""The counts of the minBERT report's tables 1 and 2, to the unit: BERT-base, five classes, one output, one score."""

import pytest
import torch
from transformers import BertConfig, BertModel

from fedmtl.config import ModelConfig
from fedmtl.model.encoder import describe_encoder
from fedmtl.model.lora import extended_plan
from fedmtl.model.multitask import build_model
from fedmtl.model.wordpiece import basic_tokenizer
from fedmtl.sharing.plan import Key, SharingPlan, check_plan
from fedmtl.sharing.weights import count_parameters, count_trainable

from .tiny import make_task

TASKS = {
    "sst": make_task("sst", labels=("0", "1", "2", "3", "4")),
    "para": make_task("para", text=("a", "b"), outputs=1),
    "sts": make_task("sts", kind="regression", text=("a", "b")),
}
PLAN = SharingPlan((("heads.*", "task"), ("*", "all")))
BERT = 109_482_240
HEADS = 5 * 769 + 769 + 769
# One rank: both sides of query, key, value and the two feed-forward layers, twelve times, and of the three heads.
RANK = 12 * (3 * (768 + 768) + 2 * (768 + 3072)) + (768 + 5) + 2 * (768 + 1)
WRAPPED = 12 * (3 * (768 * 768 + 768) + (768 * 3072 + 3072) + (3072 * 768 + 768))
LOW_RANK = (768 * 100 + 100) + (100 * 768 + 768)
PROJECTIONS = (768 * 204 + 204) + (204 * 768 + 768)
ATTENTION = 3 * (204 * 204 + 204)


def weights_of(**added):
    """The values under the plan of such a model; no memory is taken."""
    config = ModelConfig.model_validate(added)
    with torch.device("meta"):
        encoder = describe_encoder(BertModel(BertConfig()), basic_tokenizer(), "base", has_pooler=True)
        model = build_model(encoder, TASKS, 0, config)
    plan = extended_plan(PLAN, list(model.canonical()), config)
    check_plan(plan, list(model.canonical()))
    return {Key(plan.level(name), name): getattr(*place) for name, place in model.canonical().items()}


@pytest.mark.parametrize(
    ("added", "told", "worked_out"),
    [
        ({}, 109_487_623, BERT + HEADS),
        *(({"lora": {"rank": r, "mode": "last_linear"}}, r * 149_767, r * RANK) for r in (1, 4, 8, 16)),
        ({"lora": {"rank": 4, "mode": "full_model"}}, 32_150_812, BERT - WRAPPED + 4 * RANK),
        ({"adapters": {"kind": "low_rank"}}, 115_048_471, BERT + HEADS + 36 * LOW_RANK),
        ({"adapters": {}}, 125_319_559, BERT + HEADS + 36 * (PROJECTIONS + ATTENTION)),
        ({"adapters": {"share": "projections"}}, 114_947_131, BERT + HEADS + 3 * PROJECTIONS + 36 * ATTENTION),
        ({"adapters": {"share": "all"}}, 110_806_951, BERT + HEADS + 3 * (PROJECTIONS + ATTENTION)),
        (
            {"adapters": {"share": "projections", "tasks": ["sst"]}},
            111_307_459,
            BERT + HEADS + PROJECTIONS + 12 * ATTENTION,
        ),
        # The report has 124,748,995, which its own description does not give.
        (
            {"adapters": {"kind": "mixed"}},
            115_469_275,
            BERT + HEADS + 3 * (PROJECTIONS + 6 * ATTENTION + 6 * LOW_RANK),
        ),
        # Not in the report: plain heads, and the encoder's matrices; then B alone.
        ({"lora": {"rank": 1}}, 152_839, 12 * (3 * (768 + 768) + 2 * (768 + 3072)) + HEADS),
        ({"lora": {"rank": 1, "train": "b"}}, 79_111, 12 * (4 * 768 + 3072) + HEADS),
    ],
    ids=str,
)
def test_trainable_parameters_of_the_report(added, told, worked_out):
    assert told == worked_out
    assert count_trainable(weights_of(**added)) == told


@pytest.mark.parametrize("kind", ["low_rank", "pals", "mixed"])
def test_both_wirings_have_the_same_parameters(kind):
    first, second = (weights_of(adapters={"kind": kind, "wiring": wiring}) for wiring in ("parallel", "alternative"))
    assert first.keys() == second.keys()
    assert count_parameters(first) == count_parameters(second)
