"""Settings that may not stand together, however the config is made."""

import pytest
from pydantic import ValidationError

from fedmtl.config import AdaptersConfig, ClientConfig, Config, SharingConfig, TaskConfig, TrainingConfig
from fedmtl.config.errors import WrongKey, to_config_error
from fedmtl.config.file import load_config
from fedmtl.config.yaml_text import parse_yaml
from fedmtl.errors import ConfigError


@pytest.fixture
def refusal(mistake):
    """The one line that a file, a mapping and a Config of Python code give alike."""

    def refusal(text):
        message, raw = mistake(text), parse_yaml(text, "here")
        with pytest.raises(ConfigError) as of_mapping:
            load_config(raw)
        assert str(of_mapping.value) == message
        with pytest.raises(ValidationError) as of_python:
            Config(**raw)
        assert str(to_config_error(of_python.value, raw, Config)) == message
        return message

    return refusal


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model: {server_model: a/b, client_model: a/c}",
            "model.client_model: found 'a/c', model.server_model is 'a/b'; encoders that are averaged must",
        ),
        (
            "training: {num_rounds: 2, warmup_rounds: 2.5}",
            "training.warmup_rounds: found 2.5, it must be at most",
        ),
        (
            "federation: {clients_per_round: 1, min_clients: 2}",
            "federation.clients_per_round: found 1, it must be",
        ),
        ("partition: {kind: column}", "partition.column: missing; partition.kind `column` needs"),
        (
            "training: {distillation: {teacher: a, texts: [b.txt]}}",
            "training.distillation.texts: clients learn from their own examples",
        ),
        (
            "training: {distillation: {teacher: a, where: server}}",
            "training.distillation.texts: missing; `where: server` needs files",
        ),
        (
            "training: {distillation: {teacher: a, tasks: [sst]}}",
            "training.distillation.tasks: unknown task 'sst'; did you mean `sst2`?",
        ),
        ("sharing: {rules: [{a: task, b: all}]}", "sharing.rules.0: has 2 patterns, a rule is one"),
        ("sharing: {rules: [{}]}", "sharing.rules.0: has 0 patterns"),
        ("sharing: {rules: [{x: all}, {'*': tsk}]}", "sharing.rules.1.*: found 'tsk'; did you mean `task`?"),
        ("sharing: {rules: [{x: group.0}]}", "sharing.rules.0.x: found 'group.0'; did you mean `group.N`?"),
        ("sharing: {rules: [{x: group}]}", "sharing.rules.0.x: level `group` needs groups; name them"),
        (
            "sharing: {rules: [{x: group.2}], groups: {a: [sst2]}}",
            "sharing.rules.0.x: found `group.2`, sharing.groups is 1 deep; use at most `group.1`",
        ),
        ("sharing: {groups: {a: [sst]}}", "sharing.groups.a: unknown task 'sst'; did you mean `sst2`?"),
        ("sharing: {groups: {a: [sst2], b: [sst2]}}", "sharing.groups.b: sst2 is in sharing.groups.a too"),
        (
            "sharing: {groups: {a: {b: [sst2], c: [sst2]}}}",
            "sharing.groups.a.c: sst2 is in sharing.groups.a.b too",
        ),
        (
            "training: {gradients: pcgrad}",
            "training.gradients: pcgrad compares the tasks of one step, training.task_schedule is even; write"
            " `task_schedule: joint`",
        ),
        ("sharing: {groups: {a: sst2}}", "sharing.groups.a: found 'sst2', it must be a list of tasks"),
        ("model: {adapters: {tasks: [sst]}}", "model.adapters.tasks: unknown task 'sst'; did you mean `sst2`?"),
        (
            "model: {adapters: {kind: mixed, share: all}}",
            "model.adapters.share: found all, but `mixed` says itself what is shared; leave it out",
        ),
        (
            "model: {adapters: {kind: low_rank, share: all}}",
            "model.adapters.share: found all, but `low_rank` has no attention; write `projections`",
        ),
        (
            "model: {adapters: {size: 100}}",
            "model.adapters.heads: found 12, which does not divide the size, 100",
        ),
        ("model: {adapters: {heads: 5}}", "model.adapters.heads: found 5, which does not divide the size, 204"),
        ("model: {lora: {rnk: 4}}", "model.lora.rnk: unknown key; did you mean `rank`?"),
        ("model: {lora: {targets: []}}", "model.lora.targets: found [], it must be a list of at least 1"),
        ("mode: local\nsharing: {adaptive: {}}", "sharing.adaptive: found with mode local, whose plan is what"),
        (
            "sharing: {adaptive: {split_below: 0.2, merge_above: 0.2}}",
            "sharing.adaptive.split_below: found 0.2, it must be less than merge_above, which is 0.2",
        ),
        ("sharing: {adaptive: {levels: [all, fixed]}}", "sharing.adaptive.levels: found 'fixed'"),
        ("sharing: {adaptive: {levels: [all, group]}}", "sharing.adaptive.levels: level `group` needs groups"),
        ("sharing: {adaptive: {levels: [all, all]}}", "sharing.adaptive.levels: 'all' stands there twice"),
        ("clients: {a: {tasks: [rte]}}", "clients.a.tasks: found 'rte', which is no task here; write one of sst2, qqp"),
        (
            "clients: {a: {tasks: [sst2], tasks_from_round: {5: [rte]}}}",
            "clients.a.tasks_from_round.5: found 'rte', which is no task here",
        ),
        (
            "clients: {a: {tasks: [sst2], source: {qqp: f.tsv}}}",
            "clients.a.source.qqp: found a source for a task the client does not hold; add `qqp` to clients.a.tasks or",
        ),
        (
            "clients: {a: {tasks: [sst2], from_round: 3, until_round: 2}}",
            "clients.a.until_round: found 2, it must be at least clients.a.from_round, which is 3",
        ),
        (
            "clients: {a: {tasks: [sst2], source: {sst2: {hub: a/b, train_split: test}}}}",
            "clients.a.source.sst2.train_split: found test, and test splits are not for training and tuning; write",
        ),
        (
            "training: {num_rounds: 3, pruning: {rounds: 3, start_round: 2}}",
            "training.pruning.rounds: found 3 from start_round 2, that is up to round 4; training.num_rounds is 3",
        ),
        (
            "model: {lora: {}}\ntraining: {pruning: {}}",
            "training.pruning: found with model.lora, whose encoder does not train; leave one of them out",
        ),
        ("mode: local\ntraining: {pruning: {}}", "training.pruning: found with mode local, where no weight is"),
        (
            "sharing: {adaptive: {}}\ntraining: {pruning: {}}",
            "training.pruning: found with sharing.adaptive, where merging would revive weights; leave one out",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_named(refusal, text, message):
    assert message in refusal("tasks: {sst2: , qqp: }\n" + text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "tasks: {sst2: {learning_rate: 1e-5}, qqp: {learning_rate: 2e-5}}\ntraining: {task_schedule: joint}",
            "training.task_schedule: a joint step has one learning rate, found 1e-05 for sst2, 2e-05 for qqp; write",
        ),
        (
            "tasks: {sst2: {weight: 2}}\ntraining: {loss_weighting: uncertainty, task_weight_in: loss}",
            "training.loss_weighting: uncertainty learns what tasks.sst2.weight is to say of the loss; write"
            " `task_weight_in: averaging`",
        ),
        (
            "tasks: {sst2: {class_weights: balanced}}\ntraining: {logit_adjustment: 1}",
            "tasks.sst2.class_weights: found balanced with training.logit_adjustment; both make up for",
        ),
        (
            "tasks: {sst2: {source: {hub: a/b, validation_split: 'test[:10]'}}}",
            "tasks.sst2.source.validation_split: found test[:10], and test splits are not for training and tuning",
        ),
        (
            "tasks: {sst2: {source: {hub: a/b, train_split: test, scores_test: true}}}",
            "tasks.sst2.source.train_split: found test, and test splits are not for training and tuning",
        ),
    ],
)
def test_tasks_whose_settings_cannot_be_had_together_are_named(refusal, text, message):
    assert message in refusal(text)


def test_rules_that_several_sections_break_are_counted(refusal):
    text = "tasks: {sst2: {labels: [a, a]}}\npartition: {kind: column}\ntraining: {warmup_rounds: 99}"
    assert refusal(text) == "tasks.sst2.labels: 'a' stands there twice; keep one (and 2 more)"


def test_a_broken_rule_and_a_wrong_value_are_counted_together(refusal):
    text = "seed: -1\ntasks: {sst2: }\nfederation: {clients_per_round: 1, min_clients: 2, avrage: tasks}"
    assert refusal(text) == "federation.avrage: unknown key; did you mean `average`? (and 1 more)"
    text = "tasks: {sst2: }\ntraining: {warmup_rounds: 99}\nfederation: {average: all}"
    assert refusal(text) == (
        "training.warmup_rounds: found 99, it must be at most training.num_rounds, which is 10 (and 1 more)"
    )


@pytest.mark.parametrize(
    ("section", "keys", "message"),
    [
        (
            TaskConfig,
            {"from_round": 3, "until_round": 2},
            "until_round: found 2, it must be at least from_round, which",
        ),
        (
            ClientConfig,
            {"tasks": ["a"], "source": {"b": "f"}},
            "source.b: found a source .* add `b` to tasks or remove",
        ),
        (AdaptersConfig, {"heads": 5}, "heads: found 5, which does not divide"),
        (TrainingConfig, {"gradients": "pcgrad"}, "gradients: pcgrad compares .* task_schedule is even"),
        (SharingConfig, {"rules": [{"*": "group"}]}, r"rules.0.\*: level `group` needs groups"),
    ],
)
def test_a_section_alone_meets_its_rules_too(section, keys, message):
    with pytest.raises(ValidationError, match=message) as caught:
        section(**keys)
    assert isinstance(caught.value.errors()[0]["ctx"]["error"], WrongKey)


def test_an_empty_section_of_added_parts_is_off_and_braces_are_its_defaults(load):
    model = load("tasks: {sst2: }\nmodel: {lora: , adapters: {}}").model
    assert model.lora is None
    assert (model.adapters.kind, model.adapters.heads) == ("pals", 12)


def test_layers_of_one_task_have_nobody_to_split_from(refusal):
    assert "sharing.adaptive: found with one task" in refusal("tasks: {sst2: }\nsharing: {adaptive: {}}")
