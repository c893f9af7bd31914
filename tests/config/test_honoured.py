"""Every command decides on every key of the schema; what it does not honour is refused by name."""

import pytest
import typer

from fedmtl.cli.app import app, installed_groups
from fedmtl.config.file import load_config
from fedmtl.config.honoured import COMMANDS, DISTILL, SERVER, SIMULATION, config_keys
from fedmtl.errors import ConfigError
from fedmtl_studies import compression, federated, multitask, privacy, scaling, wire

STUDIES = (compression, federated, multitask, privacy, scaling, wire)
EVERY = {**COMMANDS, **{study.HONOURS.command: study.HONOURS for study in STUDIES}}
TASK = "tasks={sentiment: {}}"


def test_the_keys_are_those_of_the_schema():
    keys = config_keys()
    assert {"mode", "model.lora.rank", "tasks.*.source.train", "clients.*.source.*", "methods", "output"} <= set(keys)
    # Sections, which have keys below them, are no keys themselves.
    assert not {"model", "model.lora", "tasks", "tasks.*", "training.smart"} & set(keys)
    assert len(set(keys)) == len(keys)


def test_every_command_with_set_has_its_table():
    """The commands that take `--set` are found on the command line, those of studies too."""
    taking = set()
    for prefix, made in {"": app, **{f"{name} ": made for name, made in installed_groups().items()}}.items():
        group = typer.main.get_group(made)
        for name in group.list_commands(None):
            if any("--set" in option.opts for option in group.get_command(None, name).params):
                taking.add(f"{prefix}{name}")
    assert taking | {SIMULATION.command} == set(EVERY)


@pytest.mark.parametrize("command", EVERY)
def test_a_command_decides_on_every_key(command):
    """Fails for a new key: say yes or no to it in the command's table, in config/honoured.py or the study."""
    known = EVERY[command]
    assert [key for key in config_keys() if not known.decisions(key)] == []


@pytest.mark.parametrize("command", EVERY)
def test_every_key_that_a_command_does_not_honour_is_refused_by_name(command):
    known = EVERY[command]
    for key in config_keys():
        named = key.replace("*", "sentiment")
        if known.remedy(key) is None:
            known.check([f"{named}=1"])
            continue
        with pytest.raises(ConfigError) as refused:
            known.check([f"{named}=1"])
        assert str(refused.value) == f"--set {named}: `fedmtl {command}` does not honour it; {known.remedy(key)}"


def test_tables_name_nothing_that_is_not_in_the_schema():
    for known in EVERY.values():
        for entry in (*known.honoured, *known.refused):
            parts = entry.split(".")
            assert any(key.split(".")[: len(parts)] == parts for key in config_keys()), entry
        assert set(known.harmless) <= set(known.refused)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("training={num_rounds: 3}", "training.num_rounds"),
        ("training.smart={}", "training.smart"),
        ("model.lora=null", "model.lora"),
        ("tasks.sst2={weight: 2}", "tasks.sst2.weight"),
        ("methods.scaffold={}", "methods.scaffold"),
        ("training.task_schedule=joint", "training.task_schedule=joint"),
    ],
)
def test_a_key_inside_a_section_and_a_whole_section_are_found(override, named):
    with pytest.raises(ConfigError, match=f"^--set {named}: `fedmtl distill`"):
        DISTILL.check([override])


def test_an_empty_section_sets_nothing_that_is_refused():
    COMMANDS["run"].check(["federation={}"])
    DISTILL.check(["training={}"])


def test_an_unknown_key_is_left_to_the_config():
    DISTILL.check(["training.bogus=1", "trainig.num_rounds=1"])


def test_names_of_tasks_can_be_bounded():
    scaling.HONOURS.check(["tasks.imdb.weight=2"], ["imdb"])
    with pytest.raises(ConfigError, match=r"tasks\.yelp\.weight: `fedmtl study scaling` .*its tasks are imdb"):
        scaling.HONOURS.check(["tasks.yelp.weight=2"], ["imdb"])


@pytest.mark.parametrize("known", [SERVER, SIMULATION])
def test_a_stack_is_refused_where_clients_train_alone_in_files_too(known):
    for harmless in ([], ["compute.stack=0"], ["compute.stack=null", "compute.precision=fp32"]):
        known.check(harmless)
        known.check_file(load_config(None, [TASK, *harmless]))
    with pytest.raises(ConfigError, match=r"^compute\.stack: `fedmtl .* does not honour it; "):
        known.check_file(load_config(None, [TASK, "compute.stack=4"]))
    with pytest.raises(ConfigError, match=r"^--set compute\.precision: "):
        known.check(["compute.precision=bf16"])


def test_a_file_may_have_what_another_command_honours():
    """One file serves several commands: `fedmtl distill` reads that of a run, which has every key."""
    DISTILL.check_file(load_config(None, [TASK, "training.num_rounds=3", "federation.average=uniform"]))
