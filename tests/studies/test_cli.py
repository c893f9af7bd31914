"""The commands of studies, each made of its options record."""

import inspect
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from fedmtl.cli import app as cli_app
from fedmtl_studies import cli, federated, scaling
from fedmtl_studies.options import Option


@pytest.fixture
def given(monkeypatch, tmp_path):
    """Return the options that a command makes of its arguments; nothing is run."""
    monkeypatch.chdir(tmp_path)
    made = []
    monkeypatch.setattr("fedmtl_studies.cli.run_shown", lambda study, options, grid: made.append((options, grid)))

    def read(*arguments):
        monkeypatch.setattr("sys.argv", ["fedmtl", "study", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli_app.main()
        assert not ended.value.code
        return made.pop()

    return read


def test_every_field_with_an_option_is_a_parameter_of_the_command():
    for study in (federated.STUDY, scaling.STUDY):
        named = {
            name
            for name, field in study.options.model_fields.items()
            if any(isinstance(part, Option) for part in field.metadata)
        }
        parameters = inspect.signature(cli.make_command(study)).parameters
        assert set(parameters) == {*named, "jobs", "keep", "name"}


def test_what_is_not_given_is_left_to_the_options(given):
    options, grid = given("federated", "--preset", "tiny", "--data", "here")
    assert options == federated.FederatedOptions(preset="tiny", data="here")
    assert options.seeds == (0, 1, 2)
    assert (grid.jobs, grid.keep, grid.name) == (None, "models", None)


def test_texts_are_read_into_values(given):
    options, grid = given(
        "federated", "--quick", "--seeds", "1,2,1", "--alphas", "3,0.5", "--rate", "local=1e-4", "--set", "a=1",
        "--set", "b=2", "--set-for", "centralized_single_task:seed=1", "--keep", "scores", "--jobs", "3",
    )  # fmt: skip
    assert (options.seeds, options.alphas, options.rates) == ((1, 2), (3.0, 0.5), (("local", 1e-4),))
    assert options.overrides == ("a=1", "b=2")
    assert options.own_overrides == (("centralized-single-task", "seed=1"),)
    assert (grid.keep, grid.jobs) == ("scores", 3)


def test_a_flag_turns_off_what_is_on(given):
    assert given("multitask", "--quick")[0].cfimdb
    assert not given("multitask", "--quick", "--no-cfimdb")[0].cfimdb
    options, _ = given("compression", "--quick", "--no-measure", "--augment", "glove:here.npz", "--augment", "mlm")
    assert (options.measures, options.runs) == (False, True)
    assert options.augment[1] == "mlm"
    assert options.augment[0].endswith("/here.npz")
    assert options.augment[0].startswith("glove:/")


def test_a_path_that_cells_open_is_absolute(given, tmp_path):
    options, _ = given("scaling", "--data", "here", "--rounds", "4", "--optimizer", "sgd", "--tasks", "imdb")
    assert options.data == str(tmp_path / "here")
    assert (options.rounds, options.threshold_rounds) == ({"imdb": 4}, {"imdb": 8})
    assert options.config["training"]["optimizer"] == "sgd"


def test_help_of_studies_loads_no_numeric_library_and_that_of_fedmtl_no_study():
    def loaded(*arguments):
        code = f"""
import sys
from fedmtl.cli import main
sys.argv[1:] = {list(arguments)}
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
names = ("torch", "transformers", "numpy", "fedmtl_studies.options")
print([name for name in names if name in sys.modules])
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        return done.stdout.splitlines()[-1]

    assert loaded("--help") == "[]"
    assert loaded("study", "federated", "--help") == "['fedmtl_studies.options']"


def test_a_command_of_another_package_is_found_by_its_entry_point(monkeypatch, capsys):
    # what a package that is installed would say in its metadata
    found = [EntryPoint("other", "fedmtl_studies.cli:study", cli_app.GROUP)]
    monkeypatch.setattr(cli_app, "entry_points", lambda group: found)
    assert list(cli_app.installed_groups()) == ["study", "other"]


def test_a_command_that_cannot_be_loaded_says_so_when_it_is_called(monkeypatch, capsys):
    found = [EntryPoint("broken", "fedmtl_studies.nowhere:command", cli_app.GROUP)]
    monkeypatch.setattr(cli_app, "entry_points", lambda group: found)

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["fedmtl", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli_app.main()
        return ended.value.code, capsys.readouterr()

    code, said = run("broken")
    assert code == 2
    assert said.err.startswith("error: the command broken (fedmtl_studies.nowhere:command) cannot be loaded: Module")
    code, said = run("--help")
    assert not code
    assert "broken" in said.out
    assert "study" in said.out
