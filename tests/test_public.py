import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fedmtl


@pytest.mark.parametrize("name", fedmtl.__all__)
def test_what_is_public_is_there(name):
    assert getattr(fedmtl, name).__name__ == name


def test_what_is_not_public_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = fedmtl.nothing


def test_all_names_are_listed_and_imported_by_a_star():
    assert set(fedmtl.__all__) | {"__version__", "__all__"} <= set(dir(fedmtl))
    assert not [name for name in dir(fedmtl) if name not in fedmtl.__all__ and not name.startswith("__")]
    names: dict[str, object] = {}
    exec("from fedmtl import *", names)
    assert set(fedmtl.__all__) <= names.keys()


def test_type_checkers_see_the_same_names_from_the_same_modules():
    tree = ast.parse(Path(fedmtl.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {
        (alias.asname, node.module)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name == alias.asname
    }
    assert seen == set(fedmtl._PUBLIC.items())
    assert len(block.body) == len(fedmtl._PUBLIC)


def test_importing_the_package_loads_no_numeric_library():
    code = "import sys, fedmtl; print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
