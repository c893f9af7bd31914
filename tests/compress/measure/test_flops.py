"""Operations: one definition, whoever computes."""

import numpy as np
import pytest
import torch

from fedmtl.compress.measure.costs import onnx_flops, torch_flops
from fedmtl.compress.quantize import Quantization, quantize
from fedmtl.model.multitask import Inputs
from fedmtl.predict.onnx import made_up_feeds, open_onnx, output_name

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

# The tiny BERT: two layers, 32 wide, 48 between; 8 tokens.
LAYERS, WIDTH, INNER, LENGTH = 2, 32, 48, 8
# 2 (2 * 8 (4 * 32^2 + 2 * 32 * 48) + 4 * 8^2 * 32) = 2 (114688 + 8192) = 245760
ENCODER = LAYERS * (2 * LENGTH * (4 * WIDTH**2 + 2 * WIDTH * INNER) + 4 * LENGTH**2 * WIDTH)


@pytest.mark.parametrize(
    ("task", "rows", "expected"),
    [
        # Two labels: 2 * 32 * 2 = 128.
        ("single", 1, 245760 + 128),
        # Two sequences; the head reads 4 * 32 + 1 values and has one output: 2 * 129 = 258.
        ("dual", 2, 2 * 245760 + 258),
    ],
)
def test_operations_are_those_worked_out_by_hand(exported, tmp_path, task, rows, expected):
    assert ENCODER == 245760
    saved, file = exported
    ids = torch.ones(rows, LENGTH, dtype=torch.long)
    model = saved.bind().use(task)
    assert torch_flops(model, task, Inputs(ids, ids, 0 * ids)) == expected
    small = tmp_path / "int8.onnx"
    quantize(file, small, Quantization(), [])
    for path in (file, small):
        opened = open_onnx(path, 1)
        assert onnx_flops(path, output_name(task), made_up_feeds(opened, rows, LENGTH)) == expected


def test_a_pooler_counts_where_it_is_read(exported):
    saved, _ = exported
    model = saved.bind().use("single")
    pooler = torch.nn.Linear(WIDTH, WIDTH)

    class Pooler(torch.nn.Module):
        def forward(self, hidden):
            return pooler(hidden[:, 0])

    ids = torch.ones(1, LENGTH, dtype=torch.long)
    inputs = Inputs(ids, ids, 0 * ids)
    before, pools = model.encoder.pooler, dict(model.pools)
    try:
        # Read: 2 * 32^2 = 2048 more.
        model.encoder.pooler, model.pools["single"] = Pooler(), "pooler"
        assert torch_flops(model, "single", inputs) == 245760 + 128 + 2048
        model.pools["single"] = "cls"
        assert torch_flops(model, "single", inputs) == 245760 + 128
    finally:
        model.encoder.pooler, model.pools = before, pools


def test_made_up_tokens_are_unlike_each_other(exported):
    opened = open_onnx(exported[1], 1)
    given = made_up_feeds(opened, 2, 5)
    assert len(np.unique(given["input_ids"])) == 10
    assert given["attention_mask"].all()
