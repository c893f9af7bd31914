"""What chooses settings that are not given, that given ones win, and that a written config chooses nothing anew."""

import json

import pytest

from fedmtl.config.auto import CARD, LARGE_TASK, PACKAGED, TAGGING, choose, chosen_line
from fedmtl.config.file import config_from, demo_config, dump_config, explained_config, explained_demo, load_config
from fedmtl.config.yaml_text import parse_yaml
from fedmtl.errors import ConfigError
from fedmtl.model.encoder_files import SHIPPED
from fedmtl.tasks.builtin import BUILTIN

TWO = ["tasks={sst2: {}, stsb: {}}"]
ONE = ["tasks={sst2: {}}"]


def chosen(*overrides: str) -> dict:
    return {choice.key: choice.value for choice in explained_config(None, list(overrides)).choices}


def folder_of(tmp_path, card=None, **config) -> str:
    found = {"model_type": "bert", "num_hidden_layers": 4, "hidden_size": 64, **config}
    (tmp_path / "config.json").write_text(json.dumps(found))
    if card is not None:
        (tmp_path / CARD).write_text(card if isinstance(card, str) else json.dumps(card))
    return f"model.server_model={tmp_path}"


def test_packaged_encoders_have_cards():
    assert set(PACKAGED) == set(SHIPPED)
    for folder in SHIPPED.values():
        assert (folder / CARD).is_file()


def test_the_encoder_in_the_box_is_used_as_its_card_says():
    config = load_config(None, TWO)
    assert (config.model.pair, config.model.pool, config.model.encoder_dropout) == ("dual", "mean", 0.0)
    assert {"encoder.layer.1.*": "task"} in config.sharing.rules
    assert config.federation.average == "tasks"


def test_a_given_value_wins_and_says_so(tmp_path):
    given = ["model.pair=cross", "training.learning_rate=1e-5", "federation.average=uniform", *TWO]
    explained = explained_config(None, given)
    config = explained.config
    assert (config.model.pair, config.training.learning_rate, config.federation.average) == ("cross", 1e-5, "uniform")
    lines = explained.commented().splitlines()
    assert "  pair: cross  # given" in lines
    assert "  pool: mean  # card of tiny" in lines
    assert "    average: uniform  # given" in lines
    assert "  schedule: linear  # rule falling-rate" in lines
    # What nobody chose has its default, and no comment.
    assert "  weight_decay: 0.01" in lines


def test_a_value_that_equals_the_default_is_given_all_the_same():
    assert load_config(None, ["model.pair=cross", "training.head_rate=1", *ONE]).training.head_rate == 1.0


def test_the_printed_config_and_the_written_one_choose_nothing_anew(tmp_path):
    explained = explained_config(None, TWO)
    for text in (explained.commented(), dump_config(explained.config)):
        path = tmp_path / "again.yaml"
        path.write_text(text)
        again = explained_config(path)
        assert again.config == explained.config
        assert again.choices == ()


def test_a_config_object_has_all_its_values():
    plain = config_from({"tasks": {"sst2": {}}})
    assert plain.model.pair == "cross"
    assert load_config(plain) == plain


def test_plain_defaults_choose_nothing():
    assert chosen("defaults=plain", *TWO) == {}
    assert load_config(None, ["defaults=plain", *TWO]).training.learning_rate == 5e-5


def test_a_mean_over_tasks_takes_a_higher_rate_and_one_place_a_lower():
    rates = [chosen(f"mode={mode}", *TWO)["training.learning_rate"]
             for mode in ("centralized", "federated_single_task", "federated")]  # fmt: skip
    assert rates[0] < rates[1] < rates[2]
    assert chosen(*ONE)["training.learning_rate"] == rates[1]


def test_a_rate_is_of_adamw():
    assert "training.learning_rate" not in chosen("training.optimizer=sgd", *TWO)


@pytest.mark.parametrize(
    "given",
    ["sharing.groups={a: [sst2], b: [stsb]}", "sharing.adaptive={}", "model.lora={}", "model.start_from=runs/a"],
)
def test_layers_stay_shared_where_something_else_decides_on_them(given):
    assert "sharing.rules" in chosen(*TWO)
    assert "sharing.rules" not in chosen(given, *TWO)


@pytest.mark.parametrize("part", ["", "model"])
def test_a_run_that_starts_from_another_uses_the_model_as_that_did(tmp_path, part):
    before = config_from({"tasks": {"sst2": {}}, "model": {"pair": "cross", "pool": "cls"}})
    (tmp_path / "config.yaml").write_text(dump_config(before))
    found = chosen(f"model.start_from={tmp_path / part}", *TWO)
    assert (found["model.pair"], found["model.pool"]) == ("cross", "cls")
    assert found["sharing.rules"] == before.sharing.rules
    assert "model.encoder_dropout" not in found
    assert "sharing.rules" not in chosen(f"model.start_from={tmp_path}", "sharing.groups={a: [sst2]}", *TWO)


@pytest.mark.parametrize("text", ["", "[", "tasks: 1", "\x00"])
def test_a_broken_config_of_that_run_chooses_nothing(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    assert "model.pair" not in chosen(f"model.start_from={tmp_path}", *TWO)


def test_one_task_shares_its_encoder_with_nobody():
    assert not {"sharing.rules", "federation.average"} & chosen(*ONE).keys()


def test_a_rise_of_the_rate_fits_into_no_rounds():
    assert load_config(None, ["training.num_rounds=0", *ONE]).training.warmup_rounds == 0.0


def test_steps_that_are_counted_make_no_batch_smaller():
    assert "training.min_steps" in chosen(*ONE)
    assert "training.min_steps" not in chosen("training.local_steps=5", *ONE)


def test_a_random_encoder_compares_two_texts_too():
    found = chosen("model.server_model=random-2x128", *TWO)
    assert (found["model.pair"], found["model.pool"]) == ("dual", "mean")
    assert {"encoder.layer.1.*": "task"} in found["sharing.rules"]
    assert "sharing.rules" not in chosen("model.server_model=random-1x32", *TWO)


@pytest.mark.parametrize(
    ("name", "pool"),
    [("sentence-transformers/all-MiniLM-L6-v2", "mean"), ("BAAI/bge-small-en", "cls"), ("intfloat/e5-base", "mean"),
     ("prajjwal1/bert-tiny", None)],
)  # fmt: skip
def test_sentence_encoders_are_known_by_their_names(name, pool):
    found = chosen(f"model.server_model={name}", *TWO)
    assert found.get("model.pool") == pool
    assert found.get("model.pair") == ("dual" if pool else None)


def test_a_sentence_transformers_folder_is_pooled_as_it_says(tmp_path):
    encoder = folder_of(tmp_path)
    assert "model.pair" not in chosen(encoder, *TWO)
    (tmp_path / "modules.json").write_text("[]")
    assert chosen(encoder, *TWO)["model.pool"] == "mean"
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    assert chosen(encoder, *TWO)["model.pool"] == "cls"


def test_a_card_of_a_folder_is_followed(tmp_path):
    found = chosen(folder_of(tmp_path, {"pair": "dual", "learning_rate": 1e-4, "layers_by_task": 9}), *ONE)
    assert (found["model.pair"], found["training.learning_rate"]) == ("dual", 1e-4)
    assert "model.pool" not in found
    # At least half of the layers stay shared.
    assert chosen(f"model.server_model={tmp_path}", *TWO)["sharing.rules"] == [
        {"heads.*": "task"}, {"encoder.layer.2.*": "task"}, {"encoder.layer.3.*": "task"}, {"*": "all"}
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("card", "named"),
    [({"learning_rate": 3}, "learning_rate"), ({"encoder_dropout": -1}, "encoder_dropout"), ({"seed": 1}, "seed"),
     ({"pair": "triple"}, "pair"), ({"output": "/etc"}, "output"), ("[]", "it"), ("{", "it"),
     ('{"head_rate": 1e400}', "head_rate"),
     ({"learning_rate": "1e-4"}, "learning_rate"), ('{"head_rate": NaN}', "head_rate")],
)  # fmt: skip
def test_a_card_with_anything_else_is_refused_by_name(tmp_path, card, named):
    with pytest.raises(ConfigError, match=rf"model.server_model: .*fedmtl.json: .*{named}.*; mend it, or remove it"):
        load_config(None, [folder_of(tmp_path, card), *ONE])


def test_a_card_is_not_read_where_nothing_is_chosen(tmp_path):
    assert load_config(None, [folder_of(tmp_path, {"seed": 1}), "defaults=plain", *ONE]).seed == 0


@pytest.mark.parametrize("config", ["[]", "{", '{"model_type": "bert", "num_hidden_layers": 10000000000}'])
def test_a_broken_encoder_folder_chooses_little_and_is_no_error_here(tmp_path, config):
    encoder = folder_of(tmp_path)
    (tmp_path / "config.json").write_text(config)
    assert "sharing.rules" not in chosen(encoder, *TWO)


def test_the_line_of_a_run_has_the_choices_that_matter():
    explained = explained_config(None, ["training.learning_rate=1e-3", *TWO])
    line = chosen_line(explained.choices)
    assert line.startswith("chosen: pairs dual, pool mean, head_rate ")
    assert "encoder.layer.1.* by task" in line
    assert "learning_rate" not in line
    assert chosen_line(()) is None


def test_comments_never_change_what_a_config_says():
    source = f"{{train: 'long {'w ' * 80}'}}"
    task = f"tasks={{a: {{kind: classification, text: [t], label: 'x: y # z', source: {source}}}}}"
    explained = explained_config(None, [task])
    assert parse_yaml(explained.commented(), where="") == parse_yaml(dump_config(explained.config), where="")


def test_choosing_is_the_same_for_an_unchecked_config_with_numbers_for_names():
    raw = {"tasks": {"sst2": {}}, "training": {"head_rate": 2}}
    assert all(choice.key != "training.head_rate" for choice in choose(config_from(raw), raw))


def test_a_section_with_nothing_in_it_gives_nothing(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("tasks: {sentiment: }\n")
    chosen = load_config(path)
    path.write_text("tasks: {sentiment: }\ntraining:\nmodel:\n")
    assert load_config(path) == chosen
    assert chosen.training.learning_rate != 5e-5


def with_examples(*overrides: str, **examples: int) -> dict:
    explained = explained_config(None, list(overrides)).with_examples(examples)
    return {choice.key: choice for choice in explained.choices}


def test_layers_are_shared_by_small_tasks_and_not_by_large_ones():
    few = with_examples(*TWO, sst2=LARGE_TASK, stsb=LARGE_TASK - 1)
    assert few["sharing.rules"].value == [{"heads.*": "task"}, {"encoder.layer.1.*": "task"}, {"*": "all"}]
    many = with_examples(*TWO, sst2=LARGE_TASK, stsb=LARGE_TASK)
    both = [{"encoder.layer.0.*": "task"}, {"encoder.layer.1.*": "task"}]
    assert many["sharing.rules"].value == [{"heads.*": "task"}, *both, {"*": "all"}]
    assert many["sharing.rules"].origin == "card of tiny, rule large-tasks"
    # Where tasks share no layer, no mean over tasks makes steps smaller: 1.5e-4 is the card's, times the root of two.
    assert few["training.learning_rate"].value == 2.1e-4
    assert many["training.learning_rate"].value == 1.5e-4


def test_a_rate_is_for_the_layers_that_are_given():
    given = with_examples("sharing.rules=[{'heads.*': task}, {'*': all}]", *TWO, sst2=LARGE_TASK, stsb=LARGE_TASK)
    assert "sharing.rules" not in given
    assert given["training.learning_rate"].value == 2.1e-4


@pytest.mark.parametrize(
    "protection",
    ["privacy.example={noise_multiplier: 1}", "privacy.client={noise_multiplier: 1}",
     "privacy.secure_aggregation={}"],
)  # fmt: skip
def test_where_updates_are_protected_the_number_of_examples_chooses_nothing_by_name(protection):
    explained = explained_config(None, [protection, *TWO])
    assert not explained.follows_examples
    found = with_examples(protection, *TWO, sst2=LARGE_TASK, stsb=LARGE_TASK)
    assert found["sharing.rules"].value == [{"heads.*": "task"}, {"encoder.layer.1.*": "task"}, {"*": "all"}]
    name = protection.partition("=")[0]
    assert found["sharing.rules"].origin == f"card of tiny, rule last-layers, as {name} leaves rule large-tasks out"


def test_examples_that_are_not_counted_are_said_to_be():
    (rules,) = (choice for choice in explained_config(None, TWO).choices if choice.key == "sharing.rules")
    assert rules.origin == "card of tiny, rule last-layers, examples are not counted"


@pytest.mark.parametrize(
    ("overrides", "follows"),
    [(TWO, True), (ONE, False), (["defaults=plain", *TWO], False), (["model.server_model=random-2x128", *TWO], False),
     (["model.lora={}", *TWO], False), (["sharing.rules=[{'*': all}]", "training.learning_rate=1e-4", *TWO], False)],
)  # fmt: skip
def test_examples_are_counted_only_where_they_choose_something(overrides, follows):
    assert explained_config(None, overrides).follows_examples is follows


@pytest.mark.parametrize("encoder", ["random-2x32", "sentence-transformers/all-MiniLM-L6-v2", "prajjwal1/bert-tiny"])
def test_the_demonstration_with_another_encoder_has_that_encoders_settings(encoder):
    changed = explained_demo([f"model.server_model={encoder}"])
    own = explained_config(None, [f"model.server_model={encoder}", "tasks={sentiment: , paraphrase: , similarity: }"])
    assert changed.config.training.learning_rate == own.config.training.learning_rate != 1e-3
    assert changed.config.model == own.config.model
    assert demo_config([f"model.server_model={encoder}", "training.learning_rate=3e-3"]).training.learning_rate == 3e-3


def test_the_demonstration_itself_is_chosen_by_no_rule():
    for overrides in ([], ["model.server_model=tiny"], ["training.num_rounds=1"]):
        assert explained_demo(overrides).choices == ()
        assert demo_config(overrides).training.learning_rate == 1e-3


def test_tasks_that_tag_words_have_a_rate_of_their_own():
    alone = chosen("model.server_model=tiny", "tasks={roles: {}, own: {kind: tagging, source: {train: a.conll}}}")
    # Twice the rate of the card: two tasks are averaged.
    assert (alone["training.learning_rate"], alone["training.head_rate"]) == (3e-3, 5.0)
    assert chosen("model.server_model=tiny", "tasks={roles: {}}")["training.learning_rate"] == 1.5e-3
    assert not {"model.encoder_dropout", "model.head_dropout"} & set(alone)
    mixed = chosen("model.server_model=tiny", "tasks={sst2: {}, roles: {}}")
    assert mixed["tasks.roles.learning_rate"] == 1.5e-3
    # As without the tagging task: 1.5e-4 times the root of two.
    assert (mixed["training.learning_rate"], mixed["training.head_rate"]) == (2.1e-4, 10.0)
    given = chosen("model.server_model=tiny", "tasks={sst2: {}, roles: {learning_rate: 1e-3}}")
    assert "tasks.roles.learning_rate" not in given
    assert "tasks.roles.learning_rate" not in chosen("model.server_model=other", "tasks={sst2: {}, roles: {}}")


def test_a_federation_of_tagging_tasks_makes_small_batches_and_goes_on_with_its_optimizers():
    two = ("model.server_model=tiny", "tasks={roles: {}, settings: {}}")
    keys = ("training.learning_rate", "training.batch_size", "training.keep_optimizer")
    found = chosen(*two)
    assert tuple(found[key] for key in keys) == (3e-3, 16, True)
    # However large the tasks are, the first layer is shared; rounds are shorter than a pass of theirs.
    assert found["sharing.rules"] == [{"heads.*": "task"}, {"encoder.layer.1.*": "task"}, {"*": "all"}]
    assert "training.num_rounds" not in found
    sizes = {"roles": LARGE_TASK, "settings": LARGE_TASK}
    large = {choice.key: choice.value for choice in explained_config(None, two).with_examples(sizes).choices}
    assert large["sharing.rules"] == found["sharing.rules"]
    rounds = ("training.num_rounds", "training.local_steps", "training.warmup_rounds")
    assert tuple(large[key] for key in rounds) == (64, 32, 2.0)
    assert "training.min_steps" not in large
    counted = explained_config(None, [*two, "training.num_rounds=5"]).with_examples(sizes).choices
    assert "training.local_steps" not in {choice.key for choice in counted}
    # The rate of other encoders in a federation was not measured.
    other = chosen("model.server_model=random-2x32", two[1])
    assert (other["training.learning_rate"], "training.batch_size" in other) == (2e-3, False)
    for other in ("mode=centralized", "mode=local", "privacy.client={noise_multiplier: 1, delta: 1e-5, max_norm: 1}"):
        plain = chosen(*two, other)
        assert plain["training.learning_rate"] == 1.5e-3
        assert "training.batch_size" not in plain
        assert "training.keep_optimizer" not in plain
    assert "training.batch_size" not in chosen(*two, "training.batch_size=8")


def test_the_builtin_tasks_that_tag_words_are_known_by_name():
    assert sorted(TAGGING) == sorted(name for name, entry in BUILTIN.items() if entry.kind == "tagging")
