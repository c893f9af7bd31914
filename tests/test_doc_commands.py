"""Every command block of the documents is looked at: its program reads each line, and the lines of a page run in order.

What is not run is in `NOT_RUN`, with its reason; a line that is neither run nor there fails a test.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
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
    readers |= dict.fromkeys(("docker", "systemctl", "journalctl", "install"), read_files)
    readers |= {"/opt/fedmtl/bin/pip": read_pip, "python3": lambda words: None}
    if program in FLOWER:
        read_flower(program, rest)
        return
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


# Flower's programs, and where each names its options.
FLOWER = {"flwr": "cli/run/run.py", "flower-superlink": "superlink/cli", "flower-supernode": "supernode/cli"}


def read_flower(program: str, words: list[str]) -> None:
    package = Path(str(find_spec("flwr").submodule_search_locations[0]))  # type: ignore[union-attr,index]
    named = package / FLOWER[program]
    files = [named] if named.is_file() else [*named.glob("*.py"), package / "common/args.py"]
    source = "".join(path.read_text() for path in files)
    assert program != "flwr" or words[0] == "run", f"flwr {words[0]}: only its runs are written of"
    for word in words:
        assert not word.startswith("--") or f'"{word}"' in source, f"{program} {word}: no such option"


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


def read_files(words: list[str]) -> None:
    """Let what installs or starts files of ours find them: each path under deploy/, and each unit by its name."""
    for word in words:
        assert not word.startswith("deploy/") or (ROOT / word).is_file(), f"{word}: no such file"
        unit = re.fullmatch(r"(fedmtl-\w+)(@\w*)?", word)
        if unit is not None:
            name = f"{unit[1]}{'@' if unit[2] else ''}.service"
            assert (ROOT / "deploy" / "systemd" / name).is_file(), f"{word}: no such unit"


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
        "docker compose -f deploy/none.yaml up",
        "systemctl enable --now fedmtl-none",
        "curl example.org",
        "flwr run app --nothing",
        "flower-supernode --config 1",
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


# Pages whose lines run below, in their order. The README's and responsible-use.md's run above, deploy.md's at the end.
RUN_PAGES = (
    "docs/compress.md",
    "docs/export.md",
    "docs/multilabel.md",
    "docs/predict.md",
    "docs/results/collapse.md",
    "docs/run-folder.md",
    "docs/seeds.md",
    "docs/serve.md",
    "docs/settings.md",
    "docs/tagging.md",
    "docs/tutorial.md",
    "docs/wire.md",
)
# Why a line of a page is read by its program and not run here: the first pattern that is in it.
NOT_RUN = {
    r"^(make|pip|\. \.venv)": "sets up what the tests run in, or is what runs them",
    r"^(FLWR_\w+=1 |FLWR_\w+=0 )*(flwr|flower-)|^fedmtl flower new my-app": "tests/deploy/test_flower_run.py runs them",
    r"^(docker|systemctl|journalctl|install|python3|/opt/)": (
        "changes the machine; tests/scripts/test_compose_stand_in.py runs what containers and units run"
    ),
    r"^fedmtl track |track=\[": "libraries of others; tests/trackers/test_stores.py runs them with their stores",
    r"^python (benchmarks|scripts)/(?!collapse.py show|inference.py|serve_load.py)": (
        "takes minutes or hours, or Chromium; tests/benchmarks has small ones"
    ),
    r"\b(DATA|ENCODER|MODELS|FOLDER|MINILM|GLOVE)\b|/models/|mlm:|first\.yaml|federated-first": "files of the reader's",
    r"--student general": "goes on with what the line above it makes of the reader's files",
    r"^fedmtl study .*(--quick|--preset|--teacher|--config)": "many runs; tests/studies runs small ones of each",
    r"^fedmtl measure sst2 ": "runs of a study that takes hours",
    r"^fedmtl doctor": "looks at the reader's machine; tests/deploy/test_doctor.py plants what it finds",
    r"^fedmtl (dashboard|run --dashboard|server --dashboard)": "a page until Ctrl-C; tests/dashboard opens it",
}
# Settings and options that make a line short, by its command; what it does is the same.
SHORTER = {
    "run": ["--set=training.num_rounds=1", "--set=compute.workers=0"],
    "distill": ["--epochs-intermediate=1", "--epochs-prediction=1"],
    "prune": ["--epochs=1"],
    "serve": ["--port=0"],
    "study": ["--set=training.num_rounds=1", *SMALL],
    "benchmarks/inference.py": ["--repeats=1"],
    "benchmarks/serve_load.py": ["--seconds=1", "--rate=10"],
    "server": ["--set=training.num_rounds=1", "--set=training.local_epochs=1", "--quiet"],
}


def is_run(line: str) -> bool:
    return not line.startswith("#") and not any(re.search(pattern, line) for pattern in NOT_RUN)


def test_every_line_of_every_page_runs_or_has_a_reason_not_to():
    elsewhere = {"README.md", "docs/responsible-use.md", "docs/deploy.md"}
    for page in PAGES:
        lines = [line for line in lines_of(page.read_text(encoding="utf-8")) if is_run(line)]
        if lines and page_name(page) not in elsewhere:
            assert page_name(page) in RUN_PAGES, f"nobody runs {lines[0]}"


@pytest.fixture
def answering(readme, monkeypatch) -> Path:
    """The README's folder with finished runs RUN, NAME and teacher, and the files that pages name."""
    rows = [(f"my {word} was late {n}", name) for n in range(8) for name, found in WORDS.items() for word in found]
    head = ("message", "label", "country")
    table = [head, *((text, label, ("north", "south")[n % 2]) for n, (text, label) in enumerate(rows))]
    for name in ("topic.csv", "tickets.csv", "labelled.csv"):
        (readme / name).write_text("".join(f"{','.join(row)}\n" for row in table))
    (readme / "old.csv").write_text("".join(f"{n},x,{text}\n" for n, (text, _) in enumerate(rows)))
    (readme / "lines.txt").write_text("".join(f"{text}\n" for text, _ in rows))
    pairs = [{"question": text, "candidate": other, "label": label}
             for (text, label), (other, _) in itertools.pairwise(rows)]  # fmt: skip
    with gzip.open(readme / "pairs.jsonl.gz", "wt") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in pairs)
    words = sorted({word for text, _ in rows for word in text.split()})
    np.savez(readme / "glove.npz", vectors=np.eye(len(words), dtype=np.float16), words="\n".join(words))
    single = "kind: classification, text: [message], label: label, source: {train: topic.csv, test: labelled.csv}"
    nli = (
        "kind: classification, text: [question, candidate], label: label, source: {train: pairs.jsonl.gz,"
        " test: pairs.jsonl.gz, more_validation: {mismatched: pairs.jsonl.gz}}"
    )
    (readme / "small.yaml").write_text(
        f"tasks:\n  topic: {{{single}}}\n  sst2: {{{single}, labels: [delivery, app]}}\n  nli: {{{nli}}}\n"
        "model: {server_model: random-4x192}\ntraining: {num_rounds: 2}\n"
        "evaluation: {baselines: []}\ncompute: {device: cpu, workers: 0}\n"
    )
    for name in ("RUN", "NAME", "teacher"):
        assert type_in(f"fedmtl run small.yaml --name {name} --quiet", monkeypatch) == 0
    return readme


def serve_once(line: str) -> None:
    """Serve until it says where it answers, then end it as Ctrl-C does."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-m", *shlex.split(re.sub("--port .*", "", line)), *SHORTER["serve"]]
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert "answers at http://127.0.0.1:" in said
    assert process.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN_PAGES)
def test_the_lines_of_a_page_run_in_their_order(page, answering, monkeypatch, capsys):
    text = (ROOT / page).read_text(encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    if page == "docs/export.md":
        for given in ("run --name demo", "export demo --to hf", "export demo --to sentence-transformers"):
            shorter = [*SHORTER["run"], *SMALL] if given.startswith("run") else []
            assert type_in(f"fedmtl {given}", monkeypatch, *shorter) == 0
    if page == "docs/tagging.md":
        config, columns = (next(body for kind, body in FENCE.findall(text) if first in body)
                           for first in ("kind: tagging", "B-PER"))  # fmt: skip
        for name in ("train.conll", "dev.conll"):
            (answering / name).write_text(f"{columns}\n" * 8)
        (answering / "names.yaml").write_text(f"{config}model: {{server_model: random-1x32}}\n")
        (answering / "texts.txt").write_text("Ada Lovelace sang\n")
    if page == "docs/multilabel.md":
        config, rows = (next(body for _, body in FENCE.findall(text) if first in body)
                        for first in ("kind: multilabel", "text\tlabels"))  # fmt: skip
        header, *lines = rows.splitlines(keepends=True)
        for name in ("train.tsv", "dev.tsv"):
            (answering / name).write_text(header + "".join(lines * 4))
        (answering / "moods.yaml").write_text(f"{config}model: {{server_model: random-1x32}}\n")
        (answering / "texts.txt").write_text("thank you all\n")
    exported = {"docs/serve.md": "RUN", "docs/compress.md": "teacher"}.get(page)
    if exported is not None:
        assert type_in(f"fedmtl export {exported} --to onnx", monkeypatch) == 0
    ran = 0
    for line in filter(is_run, lines_of(text)):
        # `[--out NAME]` is optional, `RUN...` is one or more.
        line = re.sub(r" \[.*?\]", "", line).replace("RUN...", "RUN")
        words = shlex.split(line, comments=True)
        if words[0] == "python":
            # Of benchmarks and their results nothing is in the folder that a test runs in.
            command = [str(ROOT / word) if word.startswith("benchmarks/") else word for word in words[1:]]
            Path("docs/results").mkdir(parents=True, exist_ok=True)
            command += SHORTER.get(words[1], ())
            subprocess.run([sys.executable, *command], check=True, env=environment, timeout=600)
        elif words[1] == "serve":
            serve_once(line)
        else:
            is_demo = words[1] == "run" and not any(word.endswith(".yaml") for word in words)
            more = [*SHORTER.get(words[1], ()), *(SMALL if is_demo else ())]
            assert type_in(line, monkeypatch, *more) == 0, f"{line}: {capsys.readouterr().err}"
        ran += 1
    for language, body in FENCE.findall(text):
        if language == "python":
            subprocess.run([sys.executable, "-c", body], check=True, env=environment, timeout=240)
            ran += 1
    assert ran > 0


def on_loopback(line: str, port: int) -> list[str]:
    """A line of deploy.md as a process of this machine, with the server's address on loopback and less to train."""
    words = shlex.split(line.replace("10.0.0.1:9092", f"127.0.0.1:{port}").replace("10.0.0.1", "127.0.0.1"))
    if words[0] == "fedmtl":
        return [sys.executable, "-m", *words, *SHORTER.get(words[1], ())]
    is_server = "server" in words
    address = ["--listen" if is_server else "--server", f"127.0.0.1:{port}"]
    return [sys.executable, str(ROOT / words[1]), *words[2:], *address, *(SHORTER["server"][:2] if is_server else ())]


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


@pytest.mark.slow
def test_the_lines_of_the_deployment_page_run_with_a_server_and_its_sites(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = (ROOT / "federated_config.yaml").read_text()
    (tmp_path / "federated_config.yaml").write_text(
        small.replace("train_samples: 1000", "train_samples: 60").replace("val_samples: 200", "val_samples: 20")
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "FEDMTL_CACHE": str(tmp_path / "cache")}
    ports = {"certs": free_port(), "loopback": free_port()}
    running: list[tuple[str, subprocess.Popen[str]]] = []

    def finish() -> None:
        # The server first: without it, a site would look for it for ever.
        try:
            for line, process in running:
                out, _ = process.communicate(timeout=120)
                assert process.returncode == 0, f"{line}: {out}"
        finally:
            for _, process in running:
                process.kill()
            running.clear()

    ran = []
    for line in filter(is_run, lines_of((ROOT / "docs/deploy.md").read_text(encoding="utf-8"))):
        command = on_loopback(line, ports["certs" if line.startswith("fedmtl") else "loopback"])
        if re.search("^fedmtl (server|client)|federated_main", line):
            running.append((line, subprocess.Popen(command, env=environment, text=True, cwd=tmp_path,
                                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT)))  # fmt: skip
        else:
            finish()
            if "--examples" in line:
                # The page says so: who is enrolled is changed with `--replace`.
                command.append("--replace")
            done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path, timeout=120)
            assert done.returncode == 0, f"{line}: {done.stderr}{done.stdout}"
            if line.startswith("fedmtl certs init"):
                (tmp_path / "ca.crt").write_bytes((tmp_path / "certs/ca.crt").read_bytes())
        ran.append(line)
    finish()
    assert {"certs", "enroll", "server", "client", "status", "policy", "audit"} <= {line.split()[1] for line in ran}
