"""What loads and what is said before any work."""

import os
import subprocess
import sys

import pytest
import typer

from cli.small_runs import small
from fedmtl.cli.run import run
from fedmtl.config.yaml_text import parse_yaml

HEAVY = "[name for name in ('torch', 'transformers', 'numpy') if name in sys.modules]"


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


def test_importing_the_package_loads_no_numeric_library():
    assert python(f"import sys, fedmtl; print({HEAVY})") == "[]"


@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "--help"], ["doctor", "--help"], ["--version"], ["config", "--schema"]]
)
def test_what_needs_no_model_loads_no_numeric_library(arguments):
    code = f"""
import sys
from fedmtl.cli import main
sys.argv[1:] = {arguments}
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
print({HEAVY})
"""
    assert python(code) == "[]"


def test_checking_a_config_loads_no_model_library():
    code = f"""
import sys
from fedmtl.cli.app import app
app(["config"], standalone_mode=False)
print({HEAVY})
"""
    assert python(code) == "['numpy']"


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"]])
def test_help_builds_neither_the_config_nor_the_events(arguments):
    # Their records take longer to define than typer takes to parse a command.
    code = f"""
import sys
from fedmtl.cli import main
sys.argv[1:] = {arguments}
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
print([name for name in sys.modules if name in ("fedmtl.runs.events", "fedmtl.config")])
"""
    assert python(code) == "[]"


def test_the_status_of_a_run_loads_no_numeric_library(runs):
    code = f"""
import sys
from fedmtl.cli import main
sys.argv[1:] = ["status", {str(next(iter(runs.iterdir())))!r}]
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
print({HEAVY})
"""
    assert python(code) == "[]"


@pytest.mark.slow
def test_a_run_loads_no_code_that_it_does_not_compute_with(tmp_path):
    # Each of these takes longer to import than a round of small clients does to train.
    unused = ("transformers.modeling_utils", "torch._dynamo", "torch.distributed.tensor", "sympy", "scipy", "sklearn")
    code = f"""
import sys
from fedmtl.cli import main
sys.argv[1:] = {["run", *small("compute.workers=0", f"output={tmp_path}"), "--set", "model.server_model=tiny"]}
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
print([name for name in {unused} if name in sys.modules])
"""
    assert python(code) == "[]"


@pytest.mark.slow
def test_an_answer_loads_no_code_that_it_does_not_compute_with(runs):
    unused = ("transformers.modeling_utils", "torch._dynamo", "torch.distributed.tensor", "sympy", "scipy", "sklearn")
    code = f"""
import sys
from fedmtl.cli import main
sys.argv[1:] = {["predict", str(runs / "demo"), "a film"]}
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
print([name for name in {(*unused, "fedmtl.engines.local")} if name in sys.modules])
"""
    assert python(code) == "[]"


def test_workers_import_while_the_run_is_loaded(monkeypatch, tmp_path):
    asked = []

    def note(imports):
        asked.append((imports, "torch" in sys.modules))

    monkeypatch.setattr("fedmtl.engines.processes.warm_up", note)
    monkeypatch.setitem(sys.modules, "fedmtl.experiment.run", None)
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(ImportError):
        run(None, [f"output={tmp_path}", "compute.workers=1", "model.server_model=tiny"])
    assert asked == [(["fedmtl.engines.local"], False)]


def test_help_names_every_command(cli):
    done = cli()
    assert done.code == 0
    for command in ("run", "evaluate", "predict", "compare", "export", "report", "tasks", "config"):
        assert f"\n│ {command} " in done.out
    assert cli("--help").out == done.out


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["nope"], "No such command 'nope'; see `fedmtl --help`"),
        (["run", "--nam", "x"], "see `fedmtl run --help`"),
        (["evaluate"], "Missing argument 'RUN'; see `fedmtl evaluate --help`"),
        (
            ["export", "x", "--to", "pdf"],
            "'sentence-transformers', 'onnx'; see `fedmtl export --help`",
        ),
    ],
)
def test_wrong_usage_is_one_line_that_names_the_help(cli, arguments, error):
    done = cli(*arguments)
    assert done.code == 2
    assert error in done.error


@pytest.mark.parametrize("place", [0, 3])
def test_traceback_may_stand_anywhere(cli, place):
    arguments = ["config", "--set", "mode=x"]
    arguments.insert(place, "--traceback")
    done = cli(*arguments)
    assert done.code == 2
    assert "Traceback" in done.err
    assert done.err.splitlines()[-1].startswith("error: mode: found 'x'")


def test_the_shell_completes_commands_and_runs(runs):
    def complete(words: str) -> list[str]:
        environment = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
        environment |= {"_FEDMTL_COMPLETE": "complete_bash"}
        code = "import sys; sys.argv[0] = 'fedmtl'; from fedmtl.cli import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env=os.environ | environment,
            cwd=runs.parent,
            check=False,
        )
        return done.stdout.split()

    assert complete("fedmtl e") == ["evaluate", "export", "enroll", "enrolled"]
    assert complete("fedmtl evaluate de") == ["demo"]
    assert complete("fedmtl run --resume p") == ["personal"]


def test_config_prints_a_file_that_runs_again(cli, tmp_path):
    first = cli("config", "--set", "training.num_rounds=3").out
    (tmp_path / "again.yaml").write_text(first)
    assert "num_rounds: 3  # given\n" in first
    assert parse_yaml(cli("config", "again.yaml").out, where="") == parse_yaml(first, where="")


def test_the_table_of_tasks_fits_80_columns(cli):
    lines = cli("tasks").out.splitlines()
    table = lines[: lines.index("")]
    assert "…" not in "".join(table)
    assert max(map(len, table)) <= 80


COLD = """
import sys
{first}
before = set(sys.modules)
from fedmtl.cli import main
sys.argv[1:] = ["predict", sys.argv[1], "a good film"]
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
files = {{name.partition(".")[0]: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()
         if name not in before}}
files = {{name: file for name, file in files.items() if "site-packages" in file and name[0] != "_"}}
print(*sorted(files.keys() - {{name.partition(".")[0] for name in before}}))
print(*sorted(name for name in set(sys.modules) - before if name.startswith(("fedmtl.", "torch."))))
"""
# What the command line, records, a tokenizer and values need. Another one here is a wait for everybody who wants one
# answer: import it where it is used.
PACKAGES = {"annotated_types", "click", "numpy", "pydantic", "pydantic_core", "rich", "safetensors", "shellingham",
            "tokenizers", "typer", "typing_extensions", "typing_inspection", "yaml"}  # fmt: skip
WITHOUT = ("fedmtl.experiment", "fedmtl.federation", "fedmtl.engines", "fedmtl.methods", "fedmtl.report",
           "fedmtl.config.auto", "fedmtl.runs.events", "fedmtl.tasks.load")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["run", "bundle"])
def test_one_answer_from_a_cold_start_imports_torch_or_onnxruntime_and_little_else(exported_run, kind):
    first, model = (
        ("import torch", exported_run)
        if kind == "run"
        else ("import onnxruntime", next(exported_run.rglob("model.onnx")))
    )
    code = COLD.format(first=first)
    done = subprocess.run([sys.executable, "-c", code, str(model)], capture_output=True, text=True, check=True)
    *_, packages, ours = done.stdout.splitlines()
    assert set(packages.split()) - PACKAGES == set()
    assert [name for name in ours.split() if name.startswith(WITHOUT)] == []
    # Its compiler, its exporter and the like are imported by what uses them.
    assert {name for name in ours.split() if name.startswith("torch.")} <= {"torch.utils._device"}


def test_one_command_is_made_for_one_command(cli, monkeypatch):
    made = []
    original = typer.main.get_command_from_info
    monkeypatch.setattr(
        typer.main, "get_command_from_info", lambda **given: made.append(given["command_info"]) or original(**given)
    )
    assert cli("report", "none").code == 2
    assert [info.callback.__name__ for info in made] == ["report"]
    assert cli("reprot").error.startswith("No such command 'reprot'. Did you mean 'report'")
    assert len(made) > 20
