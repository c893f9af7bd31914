"""Whom retention is against, and what is refused before anything is timed."""

import json
from dataclasses import replace

import pytest

from compress.measure.made_up import make_measured
from fedmtl.compress.measure.variants import Load, Variant, measure, teacher_of
from fedmtl.errors import FedmtlError
from fedmtl.predict import onnx as onnx_file


def put_at(measured, folder):
    return replace(measured, variant=replace(measured.variant, path=folder))


def test_the_teacher_is_named_or_recorded_or_the_first(tmp_path):
    first = put_at(make_measured("a", {"x": 0.8}), tmp_path)
    second = make_measured("b", {"x": 0.9})
    assert teacher_of([first, second]).scores == {"x": 0.8}
    assert teacher_of([first, second], "b").name == "b"
    with pytest.raises(FedmtlError, match="--teacher c: is not measured; it is one of a, b"):
        teacher_of([first, second], "c")
    told = {"event": "distill", "teacher": "big", "teacher_metrics": {"x": 0.95}}
    (tmp_path / "events.jsonl").write_text(json.dumps(told) + "\n")
    recorded = teacher_of([first, second])
    assert (recorded.name, recorded.scores) == ("big", {"x": 0.95})
    assert teacher_of([make_measured("a", None)]) is None


def test_two_of_one_name_and_a_missing_package_are_refused(tmp_path, monkeypatch):
    one = Variant("a", tmp_path, "fedmtl")
    with pytest.raises(FedmtlError, match="a: there are two variants of this name"):
        measure([one, one], Load())
    monkeypatch.setattr(onnx_file.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FedmtlError, match=r"measure: needs onnx, which is not installed; .*'\.\[onnx\]'"):
        measure([Variant("b", tmp_path / "b.onnx", "onnx")], Load())
