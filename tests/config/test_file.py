"""YAML in, a checked config out; and every mistake as one line that names the key."""

import json
import re
from pathlib import Path
from types import MappingProxyType

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmtl.config import Config
from fedmtl.config.file import config_schema, demo_config, dump_config, load_config
from fedmtl.config.yaml_text import parse_yaml
from fedmtl.errors import ConfigError

GUIDE = """\
model:
  server_model: "prajjwal1/bert-tiny"  # Shared encoder
  client_model: "prajjwal1/bert-tiny"  # Client models

training:
  num_rounds: 10
  local_epochs: 3
  learning_rate: 2e-5

tasks:
  sst2:
    train_samples: 1000
    val_samples: 200
  qqp:
    train_samples: 1000
    val_samples: 200
  stsb:
    train_samples: 1000
    val_samples: 200
"""
ONE_TASK = "tasks: {sst2: {}}\n"


def test_the_guides_file_means_what_it_says(load):
    config = load(GUIDE)
    assert config.model.server_model == config.model.client_model == "prajjwal1/bert-tiny"
    assert (config.training.num_rounds, config.training.local_epochs) == (10, 3)
    assert config.training.learning_rate == 2e-5
    assert list(config.tasks) == ["sst2", "qqp", "stsb"]
    assert {(task.train_samples, task.val_samples) for task in config.tasks.values()} == {(1000, 200)}


def test_overrides_replace_add_and_make_sections(load):
    config = load(
        GUIDE,
        "training.learning_rate=3e-4",
        "tasks.sst2.weight=2",
        "clients.a.tasks=[sst2, qqp]",
        "sharing.groups.pair=[qqp, stsb]",
        "partition={kind: dirichlet, alpha: 1e-1}",
    )
    assert config.training.learning_rate == 3e-4
    assert config.tasks["sst2"].weight == 2
    assert config.tasks["sst2"].train_samples == 1000
    assert config.clients["a"].tasks == ["sst2", "qqp"]
    assert config.sharing.groups == {"pair": ["qqp", "stsb"]}
    assert (config.partition.kind, config.partition.alpha) == ("dirichlet", 0.1)


def test_overrides_alone_make_a_config():
    assert load_config(None, ["tasks.sst2={}", "seed=7"]).seed == 7


def test_a_path_is_taken_as_text_too(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    path.write_text(GUIDE)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_config(str(path)) == load_config(path) == load_config("~/config.yaml")


def test_a_mapping_is_checked_like_a_file(load):
    mapping = {
        "model": {"server_model": "prajjwal1/bert-tiny", "client_model": "prajjwal1/bert-tiny"},
        "training": {"num_rounds": 10, "local_epochs": 3, "learning_rate": 2e-5},
        "tasks": {name: {"train_samples": 1000, "val_samples": 200} for name in ("sst2", "qqp", "stsb")},
    }
    assert load_config(mapping) == load(GUIDE)
    assert load_config(mapping, ["seed=7"]).seed == 7
    assert "seed" not in mapping


def test_a_mapping_may_hold_what_python_code_writes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = {"train": Path("data/train.tsv"), "validation": "~/dev.tsv"}
    monkeypatch.setenv("HOME", "/home/somebody")
    task = {"kind": "regression", "source": source, "text": ("a", "b"), "label": "y", "score_range": (0, 5)}
    loaded = load_config(MappingProxyType({"tasks": MappingProxyType({"own": task}), "output": Path("there")}))
    own = loaded.tasks["own"]
    assert own.source is not None
    assert (own.source.train, own.source.validation) == (str(tmp_path / "data/train.tsv"), "/home/somebody/dev.tsv")
    assert (own.text, own.score_range, loaded.output) == (["a", "b"], (0, 5), "there")


def test_a_config_is_a_source_too(load):
    config = load(GUIDE)
    assert load_config(config) == config
    assert load_config(config, ["training.num_rounds=3"]).training.num_rounds == 3
    assert config.training.num_rounds == 10


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"tasks": {"sst2": {}}, "traning": {}}, "traning: unknown key; did you mean `training`?"),
        (
            {"tasks": {"sst2": {}}, "training": {"num_rounds": "many"}},
            "training.num_rounds: found 'many', it must be a whole number",
        ),
        ({"training": {}}, "tasks: missing; name at least one task, such as `tasks: {sst2: {}}`"),
        ({"tasks": {"sst2": None, "a b": None}}, "tasks: found the name 'a b'; use letters"),
        (7, "config: found 7; give the path of a YAML file, or a mapping of its sections"),
        (["tasks"], "config: found ['tasks']; give the path of a YAML file"),
        ("no.yaml", "no.yaml: no such file; give the path of a config in YAML"),
        ("a\0b", "'a\\x00b': cannot be read (embedded null byte); give the path of a YAML file"),
        ("~nobody-here/a.yaml", "'~nobody-here/a.yaml': cannot be read (Could not determine home directory"),
        ("x" * 5000, "cannot be read (File name too long)"),
    ],
)
def test_a_wrong_source_is_one_line_that_names_the_key(source, message):
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_mapping_that_holds_itself_is_one_line():
    endless: dict[str, object] = {}
    endless["tasks"] = endless
    with pytest.raises(
        ConfigError, match=r"^tasks\.tasks\.tasks\.tasks\.\.\.: is nested deeper than 64; write it flatter$"
    ):
        load_config(endless)


def test_the_demonstration_is_a_config_with_overrides():
    demo = demo_config(["training.num_rounds=2"])
    assert list(demo.tasks) == ["sentiment", "paraphrase", "similarity"]
    assert (demo.training.num_rounds, demo_config().training.num_rounds) == (2, 8)


def test_a_later_override_wins_and_an_equals_sign_may_be_in_the_value(load):
    assert load(ONE_TASK, "seed=1", "seed=2", "data.root=/a=b").model_dump()["seed"] == 2
    assert load(ONE_TASK, "data.root=/a=b").data.root == "/a=b"


def test_an_override_finds_a_client_whose_name_is_a_number(load):
    config = load(ONE_TASK + "clients: {1: {tasks: [sst2]}}", "clients.1.from_round=3")
    assert (list(config.clients), config.clients["1"].from_round, config.clients["1"].tasks) == (
        ["1"],
        3,
        ["sst2"],
    )


def test_words_that_yaml_takes_for_truth_values_stay_words(load):
    config = load("tasks: {own: {labels: [no, yes], auxiliary: yes}}")
    assert config.tasks["own"].labels == ["no", "yes"]
    assert config.tasks["own"].auxiliary is True


def test_labels_keep_their_leading_zero_and_are_no_dates(load):
    assert load("tasks: {own: {labels: [01, 2024-01-01]}}").tasks["own"].labels == ["01", "2024-01-01"]


class TestPaths:
    TEXT = """\
        data: {root: glue, cache: ~/cache}
        output: results
        tasks:
          own: {source: {train: ../a.tsv, validation: /data/b.tsv}}
          far: {source: {hub: owner/name}}
        clients:
          c: {tasks: [own, far], source: {own: c.tsv, far: {train: d.tsv}}}
        """

    def test_in_a_file_they_are_relative_to_it(self, load, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", "/home/me")
        config = load(self.TEXT)
        assert config.data.root == str(tmp_path / "glue")
        assert config.data.cache == "/home/me/cache"
        assert config.tasks["own"].source.train == str(tmp_path.parent / "a.tsv")
        assert config.tasks["own"].source.validation == "/data/b.tsv"
        assert config.tasks["far"].source.hub == "owner/name"
        assert config.clients["c"].source["own"] == str(tmp_path / "c.tsv")
        assert config.clients["c"].source["far"].train == str(tmp_path / "d.tsv")

    def test_in_an_override_they_are_relative_to_the_working_directory(self, load, tmp_path, monkeypatch):
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        monkeypatch.chdir(elsewhere)
        config = load(ONE_TASK, "data.root=glue", "tasks.own.source={train: x.tsv}")
        assert config.data.root == str(elsewhere / "glue")
        assert config.tasks["own"].source.train == str(elsewhere / "x.tsv")

    def test_a_teacher_and_its_texts_are_paths(self, load, tmp_path):
        told = "training: {distillation: {teacher: runs/a, where: server, texts: [one.txt, ../two.tsv]}}"
        found = load(ONE_TASK + told).training.distillation
        assert found.teacher == str(tmp_path / "runs/a")
        assert found.texts == [str(tmp_path / "one.txt"), str(tmp_path.parent / "two.tsv")]

    def test_the_output_folder_is_left_to_the_working_directory(self, load, monkeypatch):
        monkeypatch.setenv("HOME", "/home/me")
        assert load(self.TEXT).output == "results"
        assert load(ONE_TASK, "output=~/runs").output == "/home/me/runs"

    def test_a_relative_name_of_the_file_gives_absolute_paths(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        Path("c.yaml").write_text(ONE_TASK + "data: {root: glue}")
        assert load_config(Path("c.yaml")).data.root == str(tmp_path / "glue")

    def test_an_encoder_is_a_path_where_it_looks_like_one_or_is_a_folder(self, load, tmp_path):
        (tmp_path / "encoders/tiny").mkdir(parents=True)
        assert load(ONE_TASK, "model.server_model=a/b").model.server_model == "a/b"
        assert load(ONE_TASK + "model: {server_model: ./tiny}").model.server_model == str(tmp_path / "tiny")
        both = load(ONE_TASK + "model: {server_model: encoders/tiny, client_model: ./encoders/tiny}")
        assert both.model.server_model == both.model.client_model == str(tmp_path / "encoders/tiny")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("training: {num_round: 3}", "training.num_round: unknown key; did you mean `num_rounds`?"),
        ("num_rounds: 3", "num_rounds: unknown key; did you mean `training.num_rounds`?"),
        ("checkpoint: {frequency: 3}", "checkpoint.frequency: unknown key; it is one of every"),
        ("training: {num_rounds: ten}", "training.num_rounds: found 'ten', it must be a whole number"),
        ("training: {num_rounds: 2.5}", "training.num_rounds: found 2.5, it must be a whole number"),
        ("training: {num_rounds: true}", "training.num_rounds: found true, it must be a number, not true or"),
        ("training: {num_rounds: -1}", "training.num_rounds: found -1, it must be at least 0"),
        ("training: {learning_rate: 0}", "training.learning_rate: found 0, it must be more than 0"),
        ("training: {betas: [0.9]}", "training.betas.1: missing; write two values"),
        ("training: 3", "training: found 3, it must be a section of `key: value` lines"),
        ("mode: fedrated", "mode: found 'fedrated', it must be 'federated',"),
        ("mode: fedrated", "did you mean `federated`?"),
        ("model: {server_model: 5}", "model.server_model: found 5, it must be a text"),
        (
            "seed: -1\nevaluation: {every: 0, were: x}",
            "evaluation.were: unknown key; did you mean `where`? (and 2 more)",
        ),
        ("clients: {c: {task: [sst2]}}", "clients.c.task: unknown key; did you mean `tasks`? (and 1 more)"),
        (
            "clients: {c: {tasks: [sst2], source: {sst2: {tran: 1}}}}",
            "clients.c.source.sst2.tran: unknown key; did",
        ),
        (
            "clients: {c: {tasks: [sst2], source: {sst2: 5}}}",
            "clients.c.source.sst2: found 5, it must be a section",
        ),
        ("clients: {c: {tasks: []}}", "clients.c.tasks: found [], it must be a list of at least 1"),
        ("sharing: {rules: {a: task}}", "sharing.rules: found {'a': 'task'}, it must be a list"),
    ],
)
def test_a_wrong_value_is_named_with_what_would_be_right(mistake, text, message):
    assert message in mistake(ONE_TASK + text)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("{class_weights: [1, -2]}", "tasks.own.class_weights.1: found -2, it must be more than 0"),
        (
            "{class_weights: balancd}",
            "it must be 'none' or 'balanced', or a list, such as [a, b]; did you mean `balanced`",
        ),
        ("{outputs: 3}", "tasks.own.outputs: found 3, it must be 1 or 2"),
        ("{source: {}}", "tasks.own.source: names neither a file nor a hub dataset; write"),
        (
            "{score_range: [5, 0]}",
            "tasks.own.score_range: found [5, 0], the first must be less than the second",
        ),
        ("{labels: [a, b, a]}", "tasks.own.labels: 'a' stands there twice"),
        (
            "{from_round: 5, until_round: 4}",
            "tasks.own.until_round: found 4, it must be at least tasks.own.from_round",
        ),
    ],
)
def test_a_wrong_task_is_named_with_its_path(mistake, task, message):
    assert message in mistake(f"tasks: {{own: {task}}}")


@pytest.mark.parametrize("text", ["", "tasks:", "tasks: {}", "# nothing\n"])
def test_a_config_without_tasks_says_how_to_name_one(mistake, text):
    assert mistake(text) == "tasks: missing; name at least one task, such as `tasks: {sst2: {}}`"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: [1, 2\nc: 3\n", r"config.yaml, line 3: "),
        (
            "a: 1\nb:\n  c: 1\n  d: 2\n  c: 3\n",
            r"config.yaml, line 5: the key `c` stands twice, first in line 3",
        ),
        ("a: {b: 1, b: 2}", r"line 1: the key `b` stands twice"),
        ("a: 1\n\tb: 2", r"line 2: found character '\\t'"),
        ("sharing: {rules: [{*: all}]}", r'line 1: .*needs quotes, such as "\*"'),
        ("- a\n- b\n", r"config.yaml: found \['a', 'b'\], a config is sections"),
        ("a: !!python/name:os.system x", r"line 1: the tag tag:yaml.org,2002:python/name:os.system is not known here"),
        ("a: \x07", r"not YAML: "),
    ],
)
def test_yaml_that_cannot_be_read_is_named_with_its_line(mistake, text, message):
    assert re.search(message, mistake(text))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml: no such file"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.num_rounds", "--set training.num_rounds: write `--set path.to.key=value`"),
        ("=3", "--set =3: write `--set path.to.key=value`"),
        ("training..x=3", "--set training..x=3: write"),
        ("seed.x=3", "--set seed.x=3: seed is 5, without keys; set all of it"),
        ("tasks.sst2.labels=[a", "--set tasks.sst2.labels=[a, line 1:"),
        ("training.num_rouns=3", "training.num_rouns: unknown key; did you mean `num_rounds`?"),
        ("training.num_rounds=", "training.num_rounds: found nothing, it must be a whole number"),
    ],
)
def test_a_wrong_override_is_named(mistake, override, message):
    assert message in mistake(ONE_TASK + "seed: 5", override)


def test_levels_of_a_tree_of_groups_are_accepted(load):
    config = load(
        "tasks: {sst2: , qqp: , stsb: }\n"
        "sharing: {rules: [{a: group}, {b: group.2}, {'*': fixed}],"
        " groups: {nlu: {pair: [qqp, stsb], single: [sst2]}}}"
    )
    assert config.sharing.rules[1] == {"b": "group.2"}


class TestDump:
    def test_every_default_is_there(self, load):
        written = yaml.safe_load(dump_config(load(GUIDE)))
        assert written["federation"]["server_optimizer"]["kind"] == "none"
        assert written["tasks"]["sst2"]["patience"] is None
        assert list(written) == list(Config.model_fields)

    def test_small_numbers_are_numbers_to_any_reader(self, load):
        # YAML 1.1 takes 2e-05 for a text and 2.0e-05 for a number.
        text = dump_config(load(GUIDE))
        assert "learning_rate: 2.0e-05\n" in text
        assert yaml.safe_load(text)["training"]["epsilon"] == 1e-8

    def test_a_dump_of_the_reloaded_dump_is_the_same_text(self, load):
        text = dump_config(load(TestPaths.TEXT))
        assert dump_config(load(text)) == text

    def test_loading_it_again_gives_an_equal_config(self, load):
        config = load(
            TestPaths.TEXT,
            "clients.c.tasks_from_round={5: [own]}",
            "sharing.rules=[{'encoder.layer.1.*': group}, {'*': all}]",
            "sharing.groups={g: {a: [own], b: [far]}}",
            "tasks.own.class_weights=[1, 2e-3]",
        )
        assert load(dump_config(config)) == config

    @given(labels=st.lists(st.text(), min_size=2, max_size=4, unique=True))
    @settings(deadline=None, max_examples=30)
    def test_any_label_comes_back(self, labels):
        config = Config.model_validate({"tasks": {"own": {"labels": labels}}})
        assert Config.model_validate(parse_yaml(dump_config(config), "here")) == config

    @pytest.mark.parametrize("label", ["2e-5", "no", "01", "1_0", "null", "~", "", "*", "1:30", "0x1f", "=", "<<"])
    def test_a_label_that_looks_like_something_else_stays_a_label(self, load, label):
        config = Config.model_validate({"tasks": {"own": {"labels": [label, "other"]}}})
        text = dump_config(config)
        assert load(text) == config
        assert yaml.safe_load(text)["tasks"]["own"]["labels"] == [label, "other"]


def test_the_schema_describes_every_key_and_refuses_others():
    schema = json.loads(json.dumps(config_schema()))
    training = schema["$defs"]["TrainingConfig"]
    assert training["properties"]["num_rounds"]["description"] == "Rounds of the federation."
    assert training["properties"]["num_rounds"]["default"] == 10
    assert training["additionalProperties"] is False
    assert schema["required"] == ["tasks"]


@pytest.mark.parametrize("name", ["a.b", "a/b", "a|b", "a b", "ärger", "", "-a", "..", "a:b", "a\n"])
@pytest.mark.parametrize("path", ["tasks", "clients", "sharing.groups", "sharing.groups.outer"])
def test_names_that_would_break_a_scope_or_a_path_are_refused(load, path, name):
    at = {
        "tasks": {"tasks": {name: {"kind": "classification"}}},
        "clients": {"clients": {name: {"tasks": ["sst2"]}}},
        "sharing.groups": {"sharing": {"groups": {name: ["sst2"]}}},
        "sharing.groups.outer": {"sharing": {"groups": {"outer": {name: ["sst2"]}}}},
    }[path]
    with pytest.raises(ConfigError, match=f"^{re.escape(path)}: found the name .*; use letters from a to z, digits"):
        load(yaml.safe_dump({"tasks": {"sst2": {}}} | at))


@pytest.mark.parametrize("name", ["sst2", "ag_news", "clinic-a", "7", "A_1-b"])
def test_letters_digits_and_two_signs_make_a_name(load, name):
    config = load(f"tasks: {{'{name}': {{}}}}\nclients: {{'{name}': {{tasks: ['{name}']}}}}\n")
    assert (list(config.tasks), list(config.clients)) == ([name], [name])


@pytest.mark.parametrize(("written", "read"), [("inf", "inf"), ("2", "2"), (".inf", "inf"), ("'2'", "2")])
def test_the_norm_of_noise_is_read_however_yaml_takes_it(load, written, read):
    config = load(ONE_TASK + f"training: {{smart: {{norm: {written}}}}}")
    assert config.training.smart.norm == read
    assert load_config(None, ["tasks.sst2={}"]).training.smart is None
    assert load(dump_config(config)) == config


def bomb(levels: int, per_level: int = 9) -> str:
    """Aliases of aliases: `levels` lines that stand for per_level ** levels values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * per_level)}]")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("a: 1}\n" * 150_000, "has more than 100,000 values", id="values", marks=pytest.mark.slow),
        pytest.param(bomb(12), "line 6: has more than 100,000 values once its aliases are written out", id="aliases"),
        pytest.param(
            "a0: &a0 {x0: 1, y0: 1}\n"
            + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}], x{n}: 1}}\n" for n in range(1, 40)),
            "values once its aliases are written out",
            id="merges",
        ),
        pytest.param("a: &a [*a]\n", "an alias stands inside what it names", id="cycle"),
        pytest.param("a: " + "[" * 2000 + "]" * 2000, "nested deeper than 64", id="deep"),
        pytest.param("a: " + "[" * 70 + "]" * 70, "nested deeper than 64", id="depth-70"),
        pytest.param("a: &a " + "[" * 40 + "]" * 40 + "\nb: " + "[" * 40 + "*a" + "]" * 40, "deeper", id="by-alias"),
        pytest.param("a: !!float x\n", "line 1: the tag says float, which the value is not", id="float"),
        pytest.param("a: !!int ''\n", "the tag says int", id="int"),
        pytest.param("a: !!bool x\n", "the tag says bool", id="bool"),
        pytest.param("a: !!timestamp 2020-99-99\n", "is not known here", id="timestamp"),
        pytest.param("a: !!python/object:os.system x\n", "is not known here", id="python"),
        pytest.param("a: !!set {x}\n", "is not known here", id="set"),
        pytest.param(f"seed: {'9' * 5000}\n", "a number has 5,000 digits", id="digits"),
        pytest.param('output: "a\\0b"\n', "no file's name has a null", id="null"),
        pytest.param('output: "\\uD800"\n', "has half a character", id="surrogate"),
        pytest.param("# x\n" * 700_000, "letters; a config has at most", id="long"),
    ],
)
def test_a_text_that_would_come_to_too_much_is_one_line(tmp_path, text, message):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_aliases_and_merges_of_a_plain_config_still_work(load):
    config = load("tasks:\n  sst2: &own {train_samples: 7}\n  qqp: *own\n  stsb: {<<: *own, weight: 2}\n")
    assert [task.train_samples for task in config.tasks.values()] == [7, 7, 7]


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "a\x1b[2J", "[/b]", "x" * 65, "a b", "a\nb", "-x", ""])
@pytest.mark.parametrize("section", ["tasks", "clients"])
def test_a_name_that_would_leave_its_folder_or_steer_a_terminal_is_refused(tmp_path, name, section):
    path = tmp_path / "config.yaml"
    raw = {"tasks": {"sst2": {}}, "clients": {}}
    raw[section] = {**raw[section], name: {"tasks": ["sst2"]} if section == "clients" else {}}
    path.write_text(yaml.safe_dump(raw))
    with pytest.raises(ConfigError, match=f"{section}: found the name"):
        load_config(path)


def test_an_override_of_endless_parts_is_one_line():
    with pytest.raises(ConfigError, match=r"write `--set path.to.key=value`"):
        load_config(None, [".".join(["a"] * 2000) + "=1"])
