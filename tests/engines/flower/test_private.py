"""Flower's private names: one file imports them, and it says which one a version lacks."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedmtl.engines.flower import private
from fedmtl.errors import FedmtlError

SOURCE = Path(private.__file__).parents[2]
PUBLIC = {"flwr.app", "flwr.clientapp", "flwr.serverapp"}


def imports_of_flower(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.partition(".")[0] == "flwr")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "flwr":
            yield from ((node.module or "", alias.name) for alias in node.names)


def test_the_installed_flower_has_every_private_name():
    assert private.missing() == []


def test_a_name_that_went_missing_is_named(monkeypatch):
    monkeypatch.setitem(private.MODULES, "gone", "flwr.common.constant")
    monkeypatch.setitem(private.MODULES, "elsewhere", "flwr.no_such_module")
    assert private.missing() == ["flwr.common.constant.gone", "flwr.no_such_module.elsewhere"]
    with pytest.raises(FedmtlError, match=r"^flwr\.common\.constant\.gone: the installed flwr does not have it"):
        from fedmtl.engines.flower.private import gone  # noqa: F401


def test_only_one_file_imports_what_is_not_public():
    elsewhere = {
        f"{path.relative_to(SOURCE)} imports {name} from {module}"
        for path in SOURCE.rglob("*.py")
        if path.name != "private.py"
        for module, name in imports_of_flower(path)
        if module not in PUBLIC
    }
    assert elsewhere == set()


def test_the_list_is_what_types_are_checked_with():
    """The list of names and the imports that mypy reads say the same."""
    named = {(module, name) for module, names in private.PRIVATE.items() for name in names}
    assert set(imports_of_flower(Path(private.__file__))) == named


@pytest.mark.slow
def test_an_app_uses_none_of_them():
    """Both ends of an app, with all that they load later."""
    code = (
        "import sys, fedmtl.deploy.flower_app, fedmtl.deploy.server, fedmtl.deploy.site_client;"
        "sys.exit('fedmtl.engines.flower.private' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
