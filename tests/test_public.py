import subprocess
import sys

import pytest

import fedmtl


@pytest.mark.parametrize("name", fedmtl.__all__)
def test_what_is_public_is_there(name):
    assert getattr(fedmtl, name).__name__ == name


def test_what_is_not_public_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = fedmtl.nothing


def test_importing_the_package_loads_no_numeric_library():
    code = "import sys, fedmtl; print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
