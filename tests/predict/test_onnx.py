"""Opening an ONNX file whose tokenizer was not written by us."""

import json

import pytest

from fedmtl.errors import ModelError
from fedmtl.predict.onnx import TOKENIZER_KEY, open_onnx, predict_texts
from model.tiny import SINGLES

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


def rewrite(file, target, change):
    """A copy of the file whose tokenizer was changed."""
    model = onnx.load(str(file))
    entry = next(one for one in model.metadata_props if one.key == TOKENIZER_KEY)
    tokenizer = json.loads(entry.value)
    change(tokenizer)
    entry.value = json.dumps(tokenizer)
    onnx.save(model, str(target))
    return target


def test_a_tokenizer_cuts_and_pads_as_the_model_does_whatever_its_file_says(exported, tmp_path):
    def change(tokenizer):
        tokenizer["truncation"] |= {"max_length": 4, "stride": 9}
        tokenizer["padding"]["strategy"] = {"Fixed": 1 << 40}

    model, ours = open_onnx(rewrite(exported[1], tmp_path / "x.onnx", change), 1), open_onnx(exported[1], 1)
    tasks = [name for name, task in ours.tasks.items() if len(task.text) == 1]
    assert predict_texts(model, SINGLES, tasks) == predict_texts(ours, SINGLES, tasks)


def test_a_tokenizer_that_does_not_pad_is_refused(exported, tmp_path):
    file = rewrite(exported[1], tmp_path / "x.onnx", lambda tokenizer: tokenizer.update(padding=None))
    with pytest.raises(ModelError, match=r"its tokenizer cannot be used .*it does not pad.*; write it anew"):
        open_onnx(file, 1)
