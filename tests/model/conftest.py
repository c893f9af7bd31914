import pytest

from .tiny import KINDS, write_encoder


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """kind -> the folder of a tiny encoder of that kind."""
    root = tmp_path_factory.mktemp("encoders")
    return {kind: write_encoder(kind, root / kind) for kind in KINDS}
