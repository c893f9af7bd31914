"""What a site takes of a server's config: no path, dataset or encoder that its owner did not name; no label leaves."""

from __future__ import annotations

import json

import pytest

from experiment.welcomed import GRADES, NOTES, Meeting, write_notes
from fedmtl.config.file import _FILES, _MODELS
from fedmtl.deploy.site_client import run_folder
from fedmtl.deploy.site_config import site_config, welcomed_config
from fedmtl.deploy.site_worker import SiteSettings
from fedmtl.engines.flower.calls import Refused, WelcomeCall
from fedmtl.errors import ConfigError, PolicyError
from fedmtl.federation.handshake import Hello, Welcome, labels_digest
from fedmtl.federation.policy import Policy

SECRET = "/secret/place"


@pytest.fixture(scope="module")
def meeting(tmp_path_factory):
    folder = tmp_path_factory.mktemp("meeting")
    path = write_notes(folder / "notes.tsv")
    return Meeting(folder, (NOTES, GRADES), {"notes": path, "grades": path}, tasks=("notes", "grades"))


def changed(meeting: Meeting, **changes) -> Welcome:
    words = json.loads(json.dumps(meeting.welcome))
    for path, value in changes.items():
        *sections, key = path.split("__")
        section = words
        for part in sections:
            section = section[part]
        section[key] = value
    return Welcome.model_validate_json(json.dumps(words))


def taken(meeting: Meeting, welcome: Welcome, **settings):
    given = {"files": meeting.files, "tasks": meeting.tasks, **settings}
    given["files"] = {task: path for task, path in given["files"].items() if task in given["tasks"]}
    own = SiteSettings("a", given.pop("tasks"), meeting.folder, meeting.folder, **given)
    return site_config(welcomed_config(welcome), own)


def code(meeting: Meeting, welcome: Welcome, **settings) -> str:
    try:
        taken(meeting, welcome, **settings)
    except PolicyError as error:
        return error.code
    return "taken"


def test_no_path_of_the_servers_config_is_left(meeting):
    files = {"train": SECRET, "validation": SECRET, "test": SECRET}
    source = {**files, "more_validation": {"other": SECRET}}
    welcome = changed(
        meeting,
        config__data__root=SECRET,
        config__data__cache=SECRET,
        config__output=SECRET,
        config__model__start_from=SECRET,
        config__tasks__notes__source=source,
        config__clients={"a": {"tasks": ["notes", "grades"], "source": {"notes": files, "grades": SECRET}},
                         "b": {"tasks": ["notes"], "source": {"notes": SECRET}}},
        config__training__distillation={"teacher": SECRET, "where": "server", "texts": [SECRET]},
    )  # fmt: skip
    known = {*_FILES, *_MODELS}
    assert len(known) == 15, "a new key that is a path needs a word here and in site_config"
    assert SECRET not in taken(meeting, welcome).model_dump_json()


@pytest.mark.parametrize("name", [SECRET, "./tiny", "../x", "~/x", "tests", "prajjwal1/bert-tiny", "random-99x9999 "])
def test_an_encoder_is_the_packages_or_one_that_the_owner_named(meeting, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests").mkdir()
    welcome = changed(meeting, config__model__server_model=name)
    assert code(meeting, welcome) == "policy_encoder"
    is_named = code(meeting, welcome, policy=Policy(encoders=[name]))
    # A folder of that name would be opened before the hub is asked.
    assert is_named == ("taken" if name == "prajjwal1/bert-tiny" else "policy_encoder")
    mine = taken(meeting, welcome, model="mine").model
    assert (mine.server_model, mine.client_model) == ("mine", None)


@pytest.mark.parametrize("name", ["tiny", "random-2x64"])
def test_encoders_in_the_package_are_always_taken(meeting, name):
    assert code(meeting, changed(meeting, config__model__server_model=name)) == "taken"


@pytest.mark.parametrize("source", [{"train": SECRET}, {"hub": SECRET}, {"hub": "owner/name"}, {"hub": "."}])
def test_a_source_that_only_the_server_names_is_not_opened(meeting, source):
    welcome = changed(meeting, config__tasks__notes__source=source)
    assert code(meeting, welcome, files={}, tasks=("notes",)) == "policy_source"
    is_named = code(meeting, welcome, files={}, tasks=("notes",), policy=Policy(hub_datasets=[source.get("hub", "")]))
    assert is_named == ("taken" if source == {"hub": "owner/name"} else "policy_source")


def test_the_packages_own_examples_may_be_dealt_and_the_hubs_not(tmp_path):
    dealt = Meeting(tmp_path, ("tasks.sst2={}", "data.source=embedded"), tasks=("sst2",))
    assert isinstance(dealt.hello(), Hello)
    welcome = changed(dealt, config__data__source="hub")
    assert code(dealt, welcome) == "policy_source"
    assert code(dealt, welcome, policy=Policy(hub_datasets=["nyu-mll/glue"])) == "taken"


@pytest.mark.parametrize("source", ["auto", "hub", "files"])
def test_what_is_missing_here_is_mended_by_an_option_of_this_command(tmp_path, monkeypatch, source):
    dealt = Meeting(tmp_path, ("tasks.sst2={}", "data.source=embedded"), tasks=("sst2",))
    dealt.welcome["config"]["data"]["source"] = source
    refused = [dealt.hello()]
    dealt.policy = Policy(hub_datasets=["nyu-mll/glue"])
    dealt.restart()
    monkeypatch.setattr("fedmtl.tasks.load.hub_answers", lambda: False)
    refused.append(dealt.hello())
    dealt.root = str(tmp_path)
    dealt.restart()
    refused.append(dealt.hello())
    for answer, fault in zip(refused, ("policy_source", "hub_unreachable", "policy_source"), strict=True):
        assert isinstance(answer, Refused)
        assert (answer.fault.code, answer.fault.task) == (fault, "sst2")
        assert "write `--data sst2=FILE`" in answer.words
        assert "data.root" not in answer.words


def test_a_task_that_the_run_does_not_have_is_said_so(meeting):
    with pytest.raises(ConfigError, match="--tasks: found other, the server's tasks are notes, grades") as error:
        taken(meeting, changed(meeting), files={}, tasks=("other",))
    assert error.value.code == "task_unknown"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("config__training__learning_rate", 11.0),
        ("config__training__head_rate", 1e9),
        ("config__training__local_epochs", 10**6),
        ("config__training__local_steps", 10**9),
        ("config__training__batch_size", 10**9),
        ("config__model__max_length", 10**9),
        ("config__tasks__notes__learning_rate", 100.0),
        ("config__tasks__notes__batch_size", 10**9),
        ("config__tasks__notes__head", {"hidden": 4097}),
        ("config__training__num_rounds", 10**9),
        ("config__federation__clients_per_task", 10**9),
        ("config__data__validation_fraction", 0.51),
        ("config__data__validation_fraction", 0.009),
        ("config__model__max_length", 15),
        ("config__model__lora", {"rank": 5000}),
        ("config__model__adapters", {"size": 4104}),
    ],
)
def test_settings_beyond_all_measure_are_refused(meeting, path, value):
    assert code(meeting, changed(meeting, **{path: value})) == "policy_bounds"


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        ({"learning_rate": 1.0, "proximal": 1.0, "weight_decay": 0}, "policy_bounds"),
        ({"learning_rate": 1.0, "weight_decay": 1.0}, "policy_bounds"),
        ({"learning_rate": 1e-3, "head_rate": 100, "proximal": 2.0}, "policy_bounds"),
        ({"learning_rate": 0.05, "proximal": 1.0, "optimizer": "sgd", "momentum": 0.9}, "policy_bounds"),
        ({"learning_rate": 0.05, "proximal": 1.0, "optimizer": "sgd"}, "taken"),
        ({"learning_rate": 1e-3, "head_rate": 20, "proximal": 1.0}, "taken"),
    ],
)
def test_a_step_may_not_take_back_what_those_before_it_learned(meeting, training, expected):
    config = {**meeting.welcome["config"]["training"], **training}
    assert code(meeting, changed(meeting, config__training=config)) == expected


def test_a_tasks_own_rate_counts_in_what_a_step_takes_back(meeting):
    config = {**meeting.welcome["config"]["training"], "learning_rate": 1e-5, "proximal": 1.0}
    welcome = changed(meeting, config__training=config, config__tasks__notes__learning_rate=1.0)
    assert code(meeting, welcome) == "policy_bounds"


@pytest.mark.parametrize("name", ["random-49x64", "random-2x2112", "random-99x9984"])
def test_an_encoder_that_fills_the_memory_is_refused(meeting, name):
    assert code(meeting, changed(meeting, config__model__server_model=name)) == "policy_encoder"
    assert code(meeting, changed(meeting, config__model__server_model="random-48x2048")) == "taken"


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"text": ["message"], "label": "topic", "labels": ["keep", "drop"]}, "taken"),
        ({"text": ["other"]}, "policy_columns"),
        ({"label": "message"}, "policy_columns"),
        ({"labels": ["drop", "keep"]}, "policy_labels"),
        ({"labels": ["keep", "drop", "more"]}, "policy_labels"),
        ({"score_range": [0, 1]}, "policy_labels"),
    ],
)
def test_the_policy_names_columns_and_labels(meeting, entry, expected):
    policy = Policy.model_validate({"tasks": {"notes": entry}})
    assert code(meeting, changed(meeting), tasks=("notes",), policy=policy) == expected


def test_the_policy_names_tasks_and_score_ranges(meeting):
    assert code(meeting, changed(meeting), policy=Policy.model_validate({"tasks": {"notes": {}}})) == "policy_tasks"
    for score_range, expected in (([0, 5], "taken"), ([0, 6], "policy_labels")):
        policy = Policy.model_validate({"tasks": {"grades": {"score_range": score_range}}})
        assert code(meeting, changed(meeting), tasks=("grades",), policy=policy) == expected


def test_a_kind_of_task_of_another_package_is_named_in_the_policy(meeting):
    welcome = changed(meeting, config__tasks__notes__kind="test_odd")
    assert code(meeting, welcome) == "policy_methods"
    # Named, but not installed here.
    with pytest.raises(ConfigError, match=r"tasks\.notes\.kind: found 'test_odd', no kind of task is called so"):
        taken(meeting, welcome, policy=Policy.model_validate({"methods": ["test_odd"]}))


def test_labels_are_the_servers_or_the_site_does_not_join(meeting):
    nameless = changed(meeting, config__tasks__notes__labels=None, terms__labels={})
    assert code(meeting, nameless) == "labels_missing"
    # A server that has examples of its own finds labels that its config does not name.
    found = changed(meeting, config__tasks__notes__labels=None)
    assert taken(meeting, found).tasks["notes"].labels == ["keep", "drop"]
    twice = changed(meeting, config__tasks__notes__labels=None, terms__labels={"notes": ["keep", "keep"]})
    with pytest.raises(ConfigError, match=r"tasks\.notes\.labels: 'keep' stands there twice"):
        taken(meeting, twice)


def test_a_hello_has_counts_in_the_order_of_the_servers_list_and_no_label(meeting):
    hello = meeting.hello()
    assert isinstance(hello, Hello)
    words = hello.model_dump_json()
    assert "keep" not in words
    assert "drop" not in words
    notes, grades = hello.tasks["notes"], hello.tasks["grades"]
    assert (sum(notes.labels), len(notes.labels)) == (notes.examples, 2)
    assert (sum(grades.labels), len(grades.labels), grades.has_labels) == (grades.examples, 5, False)
    assert notes.label_list == labels_digest(["keep", "drop"])


def test_token_rows_do_not_tell_which_part_of_a_file_a_seed_draws(tmp_path):
    met = Meeting(tmp_path, files={"notes": write_notes(tmp_path / "notes.tsv")})
    found = set()
    for seed in range(3):
        met.welcome["config"]["seed"] = seed
        hello = met.hello()
        assert isinstance(hello, Hello), hello
        found |= {tuple(hello.rows), tuple(hello.evaluation_rows)}
    assert len(found) == 1


def test_a_welcome_that_is_none_is_a_code_and_not_its_words(meeting):
    for words in ("", "{", "[" * 5000, json.dumps({**meeting.welcome, "run": "../../up"})):
        answer = meeting.site(WelcomeCall(words))
        assert isinstance(answer, Refused)
        assert answer.fault.code == "message_unreadable"


def test_a_run_lives_in_the_sites_folder_even_if_its_name_came_through(tmp_path):
    assert run_folder(tmp_path, "ab12") == tmp_path / "ab12"
    for name in ("..", "../up", "/etc", "a/../../b", "a/b", "."):
        with pytest.raises(PolicyError, match="no name of a folder"):
            run_folder(tmp_path, name)


def test_other_modes_than_a_federation_are_refused(meeting):
    with pytest.raises(ConfigError, match="all text has to be in one place"):
        welcomed_config(changed(meeting, config__mode="centralized"))
