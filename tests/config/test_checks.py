"""Settings that may not stand together."""

import pytest


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
    ],
)
def test_settings_that_contradict_each_other_are_named(mistake, text, message):
    assert message in mistake("tasks: {sst2: , qqp: }\n" + text)


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
    ],
)
def test_tasks_whose_settings_cannot_be_had_together_are_named(mistake, text, message):
    assert message in mistake(text)


def test_an_empty_section_of_added_parts_is_off_and_braces_are_its_defaults(load):
    model = load("tasks: {sst2: }\nmodel: {lora: , adapters: {}}").model
    assert model.lora is None
    assert (model.adapters.kind, model.adapters.heads) == ("pals", 12)


def test_layers_of_one_task_have_nobody_to_split_from(mistake):
    assert "sharing.adaptive: found with one task" in mistake("tasks: {sst2: }\nsharing: {adaptive: {}}")
