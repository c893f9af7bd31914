"""An exported model that these tests share: tracing one takes seconds."""

import pytest

from compress.onnx_models import make_saved
from fedmtl.compress.onnx_export import export_onnx
from model.tiny import write_encoder


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """The saved model and its ONNX file."""
    folder = tmp_path_factory.mktemp("bert")
    saved = make_saved(write_encoder("bert", folder / "encoder"))
    return saved, export_onnx(saved, saved.bind(), folder / "made" / "model.onnx")
