"""scripts/shape.py counts a package of a few lines as one does by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/shape.py"
FILES = {
    "pkg/__init__.py": '"""A package."""\n',
    # Imports `near` for type checkers, `shared`, and `inner.lazy` by a string.
    "pkg/app.py": (
        "from typing import TYPE_CHECKING\n"
        "from pkg import shared\n"
        "if TYPE_CHECKING:\n"
        "    from .near import Asked\n"
        'LAZY = {"name": "pkg.inner.lazy"}\n'
        "def main() -> None: ...\n"
        "def write() -> None: ...\n"
    ),
    "pkg/near.py": (
        '"""What is asked for,\n'
        'and what was told."""\n'
        "class Asked:\n"
        "    own_place = 1  # kept here\n"
        "def _private(replace: int) -> str:\n"
        "    return f'{Asked.own_place} thus'\n"
    ),
    "pkg/inner/__init__.py": "\n" * 5,
    # Of one importer, but in another folder.
    "pkg/inner/lazy.py": (
        "from math import sqrt\n"
        "from ..shared import write\n"
        "max_length = 3\n"
        "length = sqrt(2)\n"
        "def use() -> None:\n"
        "    write()\n"
    ),
    "pkg/shared.py": "def write() -> None: ...\n" + "\n" * 49,
}


def make_tree(root: Path) -> Path:
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def shape(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--root", str(root), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("shape")
    done = shape(make_tree(root / "src"), "--json", str(root / "out.json"))
    assert done.returncode == 0, done.stderr
    return json.loads((root / "out.json").read_text())["here"]


def test_files_and_lines(figures):
    # 1 + 7 + 6 + 5 + 6 + 50; the quartiles are of 5, 6, 6, 7, 50, without the __init__ of one line.
    assert list(figures["figures"].values())[:6] == [6, 75, 6, 6, 6, 7]
    assert figures["folders"] == {"pkg": {"files": 4, "lines": 64}, "pkg/inner": {"files": 2, "lines": 11}}
    assert list(figures["largest"].items())[:2] == [("pkg/shared.py", 50), ("pkg/app.py", 7)]
    assert figures["one definition"] == ["pkg/inner/lazy.py", "pkg/shared.py"]


def test_modules_with_one_importer(figures):
    # `near` and `inner.lazy` have one, `shared` two, `app` none.
    assert figures["figures"]["modules with one importer"] == 2
    assert figures["figures"]["of those in the same folder"] == 1
    assert figures["slivers"] == [{"module": "pkg.near", "lines": 6, "importer": "pkg.app"}]


def test_retired_words_are_parts_of_identifiers_and_words_of_texts(figures):
    counts = {
        kind: {word: found["count"] for word, found in words.items() if found["count"]}
        for kind, words in figures["words"].items()
    }
    assert counts == {
        # The import, the class and its use; the attribute twice. `replace` and `max_length` are other words.
        "identifiers": {"asked": 3, "own": 2, "place": 2, "length": 1},
        "docstrings and comments": {"asked": 1, "told": 1, "kept": 1},
        "other strings": {"thus": 1},
    }
    assert figures["words"]["identifiers"]["asked"]["worst"] == {"pkg/near.py": 2, "pkg/app.py": 1}


def test_public_names_of_several_modules(figures):
    assert figures["duplicates"] == {"write": ["pkg.app", "pkg.shared"]}


def test_words_are_listed_with_file_and_line(tmp_path):
    listed = shape(make_tree(tmp_path), "--words").stdout.splitlines()
    assert len(listed) == 12
    assert f"{tmp_path}/pkg/near.py:2: told (docstrings and comments): and what was told." in listed
    assert f"{tmp_path}/pkg/near.py:6: place (identifiers): own_place" in listed


def test_a_commit_is_shown_beside_the_tree(tmp_path):
    root = make_tree(tmp_path / "src")
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *command], check=True)
    (root / "pkg/near.py").unlink()
    shown = shape(root, "--against", "HEAD").stdout.splitlines()
    assert shown[0].split() == ["HEAD", "here"]
    assert shown[1].split() == ["Python", "files", "6", "5"]
    assert shown[2].split() == ["lines", "75", "69"]


def test_an_unknown_commit_and_a_folder_without_files_are_one_line(tmp_path):
    for options in (["--against", "no-such-commit"], []):
        done = shape(tmp_path, *options)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1].startswith(f"shape.py: error: {tmp_path}: ")
