"""Every command block of the documents is looked at: the app reads each `fedmtl` line, and the README's blocks run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from fedmtl.cli import main
from fedmtl.cli.app import app
from fedmtl.cli.guide_main import as_command

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("configs/*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"^ {4}((?:fedmtl|python|make|pip) .*)$", re.MULTILINE)
# What a program prints, formats and pictures of text; configs load in test_docs.py, and api.md is generated.
SHOWN = ("", "text", "json", "csv", "yaml", "toml", "mermaid", "http", "ini", "diff")
COMMANDS = typer.main.get_command(app)


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def lines_of(text: str) -> Iterator[str]:
    """Every line that a reader is to type: of fenced shell blocks, and indented ones that begin with a program."""
    for language, body in FENCE.findall(text):
        if language in ("sh", "bash"):
            yield from filter(None, map(str.strip, body.replace("\\\n", " ").splitlines()))
    yield from INDENTED.findall(FENCE.sub("", text))


def read(line: str) -> None:
    """Let whoever would read this line read it, as far as nothing is run; raise where it would be refused."""
    if line.startswith("#"):
        return
    words = shlex.split(line, comments=True)
    while "=" in words[0]:  # a variable of the environment
        words = words[1:]
    program, *rest = words
    readers = {"fedmtl": read_fedmtl, "make": read_make, "python": read_python, "pip": read_pip}
    if program in readers:
        readers[program](rest)
    else:
        assert line == ". .venv/bin/activate", f"{line}: nobody reads {program}"


def read_fedmtl(words: list[str]) -> None:
    # `[--out NAME]` is optional, `RUN...` is one or more.
    words = [word.strip("[]").removesuffix("...") for word in words]
    command: Any = COMMANDS
    context, name = None, "fedmtl"
    while True:
        context = command.make_context(name, list(words), parent=context)
        if not hasattr(command, "resolve_command"):
            return
        words = [*context._protected_args, *context.args]
        assert words, "no command"
        name, command, words = command.resolve_command(context, words)


def read_make(words: list[str]) -> None:
    text = (ROOT / "Makefile").read_text()
    # A variable may name one that stands above it.
    for name, value in reversed(re.findall(r"^(\w+) *[:?]?= *(.*)$", text, re.MULTILINE)):
        text = text.replace(f"$({name})", value)
    targets = set(re.findall(r"^([\w./-]+):", text, re.MULTILINE))
    for word in words:
        assert "=" in word or word in targets, f"make {word}: no such target"


def read_python(words: list[str]) -> None:
    # A bundle's script is a copy of one in the package.
    is_copy = words[0].endswith("/export/onnx/predict.py")
    script = ROOT / ("src/fedmtl/export/bundle_predict.py" if is_copy else words[0])
    assert script.is_file(), f"{words[0]}: no such script"
    if words[0] == "federated_main.py":
        read_fedmtl(as_command(words[1:]))
        return
    # A benchmark's options may stand in a module beside it.
    sources = "".join(path.read_text() for path in (script, *script.parent.glob("*.py")))
    for word in words[1:]:
        option = word.partition("=")[0]
        assert not option.startswith("--") or f'"{option}"' in sources, f"{words[0]} {option}: no such option"


def read_pip(words: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert words[0] == "install", words
    for word in words[1:]:
        extras = re.findall(r"\[(.*?)\]", word)
        named = {extra.strip() for found in extras for extra in found.split(",")}
        assert named <= set(project["optional-dependencies"]), f"{word}: no such extra"
    if "-c" in words:
        assert (ROOT / words[words.index("-c") + 1]).is_file()


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_block_is_of_a_kind_that_is_looked_at(page):
    kinds = {language for language, _ in FENCE.findall(page.read_text(encoding="utf-8"))}
    assert kinds <= {"sh", "bash", "python", *SHOWN}


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_line_to_type_is_read_by_its_program(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for line in lines_of(page.read_text(encoding="utf-8")):
        try:
            read(line)
        except (Exception, SystemExit) as error:
            pytest.fail(f"{line}: {type(error).__name__}: {getattr(error, 'message', error)}")


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "api.md"], ids=page_name)
def test_python_on_pages_compiles(page):
    for language, body in FENCE.findall(page.read_text(encoding="utf-8")):
        if language == "python":
            compile(body, page.name, "exec")


@pytest.mark.parametrize(
    "line",
    [
        "fedmtl run --sett a=1",
        "fedmtl export RUN --to paper",
        "fedmtl runn",
        "make nothing",
        "python scripts/none.py",
        "python scripts/shape.py --nothing",
        "pip install '.[nothing]'",
        "curl example.org",
    ],
)
def test_a_line_that_would_be_refused_is_found(line):
    with pytest.raises((Exception, SystemExit)):
        read(line)


WORDS = {"delivery": ("parcel", "courier", "box"), "app": ("screen", "login", "button")}
SMALL = [
    f"--set=tasks.{task}={{train_samples: 24, val_samples: 12}}" for task in ("sentiment", "paraphrase", "similarity")
]


@pytest.fixture
def readme(tmp_path, monkeypatch) -> Path:
    """A folder with the files of the README's example."""
    messages = [f"my {word} was late {n}\t{name}" for n in range(8) for name, found in WORDS.items() for word in found]
    pairs = [f"the {first} is here\tthe {second} is there\t{1 + (first == second) * 3 + n % 2}"
             for n in range(4) for first in WORDS["app"] for second in WORDS["app"]]  # fmt: skip
    for name in ("messages.tsv", "more-messages.tsv"):
        (tmp_path / name).write_text("\n".join(["message\tcategory", *messages, ""]))
    for name in ("pairs.tsv", "pairs-dev.tsv"):
        (tmp_path / name).write_text("\n".join(["first\tsecond\tscore", *pairs, ""]))
    configs = [body for language, body in FENCE.findall(README.read_text()) if language == "yaml"]
    own = next(body for body in configs if "messages.tsv" in body)
    (tmp_path / "own.yaml").write_text(f"{own}compute: {{device: cpu, workers: 0}}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def type_in(line: str, monkeypatch: pytest.MonkeyPatch, *more: str) -> int:
    """Run a `fedmtl` line in this process, with more options behind it."""
    monkeypatch.setattr("sys.argv", [*shlex.split(line, comments=True), *more])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.mark.slow
def test_the_readmes_blocks_run_in_their_order(readme, monkeypatch, capsys):
    ran = []
    for language, body in FENCE.findall(README.read_text()):
        if language == "python":
            (readme / "block.py").write_text(body.replace("num_rounds=5", "num_rounds=1"))
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            subprocess.run([sys.executable, "block.py"], check=True, env=environment, timeout=120)
            ran.append("python")
        for line in body.splitlines() if language == "sh" else ():
            if line.startswith("fedmtl "):
                is_long = line.startswith("fedmtl run")
                is_demo = is_long and "own.yaml" not in line
                more = ["--set=training.num_rounds=1"] * is_long
                more += [*SMALL, "--set=compute.workers=0"] if is_demo else []
                assert type_in(line, monkeypatch, *more) == 0, f"{line}: {capsys.readouterr().err}"
                ran.append(line.split()[1])
    assert {"run", "predict", "evaluate", "compare", "python"} <= set(ran)


@pytest.mark.slow
def test_the_checks_of_data_run_as_the_page_writes_them(readme, monkeypatch, capsys):
    rows = "\n".join(["sentence\tlabel", *(f"a fine film {n}\t{n % 2}" for n in range(20)), ""])
    for name in ("train.tsv", "dev.tsv", "data/sst2/train.tsv", "data/sst2/dev.tsv"):
        (readme / name).parent.mkdir(parents=True, exist_ok=True)
        (readme / name).write_text(rows)
    for name in ("north.tsv", "south.tsv"):
        (readme / name).write_text(rows.replace("sentence\tlabel", "message\ttopic"))
    (readme / "train.csv").write_text(rows.replace("\t", ";"))
    (readme / "config.yaml").write_text((readme / "own.yaml").read_text())
    lines = list(lines_of((ROOT / "docs/responsible-use.md").read_text()))
    assert len(lines) >= 4
    for line in lines:
        assert type_in(line, monkeypatch) == 0, f"{line}: {capsys.readouterr().err}"
    assert "warning" in capsys.readouterr().out
