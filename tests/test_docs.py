"""What the documents say is there, loads, and is what the code says."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import typer

from fedmtl.config.file import load_config

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("configs/*.md")])
CONFIGS = [*sorted(ROOT.glob("configs/*.yaml")), ROOT / "src/fedmtl/demo.yaml"]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"^ {4}(fedmtl .*)$", re.MULTILINE)
INLINE = re.compile(r"`(fedmtl [^`\n]+)`")
SOURCE = ROOT / "src/fedmtl"


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "scripts/make_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings():
        # What typer imports from click may be deprecated there; that is not about our pages.
        warnings.simplefilter("ignore", DeprecationWarning)
        spec.loader.exec_module(module)
    return module


def test_the_reference_is_what_the_code_says(reference):
    for path, text in reference.pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{page_name(path)} is stale: run scripts/make_reference.py"


def test_the_reference_is_made_without_a_numeric_library():
    code = "import sys, runpy; runpy.run_path('scripts/make_reference.py'); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        file, _, section = target.partition("#")
        if re.match(r"\w+:", file):
            continue
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), f"{target}: no such file"
        if section:
            assert section in anchors(there), f"{target}: no such section"


def anchors(page: Path) -> set[str]:
    """The sections of a page as links name them."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def commands(text: str) -> Iterator[str]:
    """Every `fedmtl ...` that a page tells a reader to type."""
    blocks = "\n".join(body for language, body in FENCE.findall(text) if language in ("sh", "bash"))
    yield from re.findall(r"^fedmtl .*$", blocks, re.MULTILINE)
    yield from INDENTED.findall(FENCE.sub("", text))
    yield from INLINE.findall(FENCE.sub("", text))


# The commands of docs/seeds.md are read with all their values by test_seeds.py.
@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "seeds.md"], ids=page_name)
def test_commands_exist_with_their_options(page, reference):
    known = {
        name: {option_of(place) for place, _ in reference._parameters(function)}
        for name, function in reference.commands().items()
    }
    everywhere = {"--traceback", "--version", "--help", "--install-completion", "--show-completion"}
    for line in commands(page.read_text(encoding="utf-8")):
        words = [word for word in shlex.split(line, comments=True)[1:] if word not in everywhere]
        if not words or not words[0].islower():
            continue
        command = " ".join(words[:2]) if " ".join(words[:2]) in known else words[0]
        assert command in known, f"{line}: no such command"
        unknown = {word.partition("=")[0] for word in words if word.startswith("--")} - known[command]
        assert not unknown, f"{line}: no such option"


def test_every_option_of_the_reference_is_one_that_its_command_takes(reference):
    page = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## fedmtl (.+?)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    assert sections.keys() == reference.commands().keys()
    for name, function in reference.commands().items():
        alone = typer.Typer()
        alone.command()(function)
        accepted = {option for each in typer.main.get_command(alone).params for option in each.opts}
        listed = set(re.findall(r"^  (--[\w-]+)", sections[name], re.MULTILINE))
        assert listed <= accepted, f"fedmtl {name}: {sorted(listed - accepted)}"


def option_of(place: str) -> str:
    return place.split(" ")[0]


@pytest.mark.parametrize("config", CONFIGS, ids=page_name)
def test_configs_load(config):
    load_config(config)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_configs_on_pages_load(page, tmp_path):
    for language, body in FENCE.findall(page.read_text(encoding="utf-8")):
        if language == "yaml":
            # A fragment shows some sections of a config; any tasks will do for it.
            is_whole = re.search(r"^tasks:", body, re.MULTILINE)
            path = tmp_path / "config.yaml"
            path.write_text(body if is_whole else f"{body}\ntasks: {{sst2: }}\n", encoding="utf-8")
            load_config(path)


def test_every_config_is_in_the_table():
    table = (ROOT / "configs/README.md").read_text(encoding="utf-8")
    assert [path.name for path in CONFIGS if path.name not in table] == []


def test_architecture_names_files_that_exist():
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = set(re.findall(r"[\w./-]+\.py\b", text))
    assert named, "it names files"
    assert [name for name in sorted(named) if not any((base / name).is_file() for base in (ROOT, SOURCE))] == []


def test_architecture_is_a_map_and_no_wall():
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 160
    part = text.partition("## I want to change")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in part.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 20
    for what, paths, test in rows:
        named = re.findall(r"`([\w./-]+)`", paths)
        assert 1 <= len(named) <= 3, f"{what.strip()}: a change to one thing is in three files at most"
        assert all(any((base / name).is_file() for base in (ROOT, SOURCE)) for name in named), what
        assert (ROOT / test.strip().strip("`")).is_file(), what


def test_architecture_names_every_layer():
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    layers = [path.parent.name for path in SOURCE.glob("*/__init__.py")]
    assert [layer for layer in sorted(layers) if f"{layer}/" not in text] == []
