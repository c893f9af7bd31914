import pytest

from fedmtl.config.file import load_config
from fedmtl.errors import ConfigError


@pytest.fixture
def load(tmp_path):
    """Load a text as a file next to the test's other files."""

    def load(text, *overrides):
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return load_config(path, overrides)

    return load


@pytest.fixture
def mistake(load):
    """The one line a wrong config gives."""

    def mistake(text, *overrides):
        with pytest.raises(ConfigError) as caught:
            load(text, *overrides)
        message = str(caught.value)
        assert "\n" not in message
        return message

    return mistake
