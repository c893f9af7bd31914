"""A job that is not what the site's policy and the welcome's config allow is refused before anything is computed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from experiment.welcomed import GRADES, NOTES, Meeting, write_notes
from fedmtl.engines.flower.calls import Refused
from fedmtl.federation.messages import Update
from fedmtl.federation.policy import Policy
from fedmtl.sharing.plan import Extra, Key, SharingPlan, used_rows

TABLE = "embeddings.word_embeddings.weight"


@pytest.fixture(scope="module")
def meeting(tmp_path_factory):
    folder = tmp_path_factory.mktemp("meeting")
    return Meeting(folder, files={"notes": write_notes(folder / "notes.tsv")})


@pytest.fixture
def meet(tmp_path):
    def make(*overrides: str, number: int = 48, distinct: int | None = None, tasks=("notes",), **policy) -> Meeting:
        path = write_notes(tmp_path / "notes.tsv", number, distinct)
        both = [NOTES, *([GRADES] if "grades" in tasks else [])]
        files = dict.fromkeys(tasks, path)
        return Meeting(tmp_path, (*both, *overrides), files, Policy.model_validate(policy), tasks)

    return make


def with_settings(job, **changes):
    return replace(job, settings={**job.settings, **changes})


def with_rule(job, pattern, level):
    return replace(job, plan=job.plan.with_rule(pattern, level))


def first(job) -> Key:
    return next(key for key in job.weights if key.name != TABLE)


def with_masks(job, mask, key: Key | None = None):
    return replace(job, extra={"pruning": Extra(tensors={"mask": {key or first(job): mask}})})


CHANGES = {
    "another client": ("job_client", lambda job: replace(job, client="b")),
    "no task": ("job_tasks", lambda job: replace(job, tasks=())),
    "another task": ("job_tasks", lambda job: replace(job, tasks=("notes", "other"))),
    "a task twice": ("job_tasks", lambda job: replace(job, tasks=("notes", "notes"))),
    "another kind": ("message_unreadable", lambda job: replace(job, kind="dump")),
    "round 0": ("job_round", lambda job: replace(job, round=0)),
    "a late round": ("job_round", lambda job: replace(job, round=4)),
    "a state to come": ("job_round", lambda job: replace(job, state_round=2)),
    "one step": ("job_settings", lambda job: with_settings(job, steps=1)),
    "one example": ("job_settings", lambda job: with_settings(job, steps=1, batch_size=1)),
    "a batch size of the task": ("job_settings", lambda job: with_settings(job, batch_sizes={"notes": 1})),
    "more epochs": ("job_settings", lambda job: with_settings(job, epochs=500)),
    "another rate": ("job_settings", lambda job: with_settings(job, learning_rates={"notes": 1e6})),
    "measured layers": ("job_settings", lambda job: with_settings(
        job, methods={"adaptive_sharing": {"layers": ["encoder.layer.0"]}})),
    "a method more": ("job_settings", lambda job: with_settings(job, methods={"fedprox": {"mu": 1e6}})),
    "no methods": ("job_settings", lambda job: with_settings(job, methods=[])),
    "a setting more": ("job_settings", lambda job: with_settings(job, dump=True)),
    "other loss weights": ("job_settings", lambda job: with_settings(job, loss_weights={"notes": 2.0})),
    "label counts": ("job_settings", lambda job: replace(
        job, extra={"logit_adjustment": Extra({"label_counts": {"notes": [1, 2]}})})),
    "something of nobody": ("job_settings", lambda job: replace(job, extra={"nobody": Extra({"a": 1})})),
    "another codec": ("job_settings", lambda job: replace(job, codecs=replace(job.codecs, up="topk", topk_share=0.1))),
    "pruning": ("job_settings", lambda job: with_masks(job, torch.ones_like(job.weights[first(job)],
                                                                           dtype=torch.bool))),
    "a head of all": ("job_plan", lambda job: with_rule(job, "heads.*", "all")),
    "a client's own": ("job_plan", lambda job: with_rule(job, "*", "client")),
    "no level": ("message_unreadable", lambda job: with_rule(job, "*", "everybody")),
    "a group of none": ("message_unreadable", lambda job: with_rule(job, "encoder.*", "group.3")),
    "no rules": ("job_plan", lambda job: replace(job, plan=SharingPlan(()))),
    "other groups": ("job_plan", lambda job: replace(job, plan=SharingPlan(job.plan.rules, ({"notes": "x"},)))),
    "a value less": ("job_weights", lambda job: replace(job, weights={key: value for key, value in job.weights.items()
                                                                     if key != first(job)})),
    "a value more": ("job_weights", lambda job: replace(job, weights={**job.weights, Key("all", "x"): torch.ones(1)})),
    "another's head": ("job_weights", lambda job: replace(job, weights={
        **job.weights, Key("task:b", "heads.b.weight"): torch.ones(1)})),
    "another shape": ("job_weights", lambda job: replace(job, weights={**job.weights, first(job): torch.ones(1)})),
    "another type": ("job_weights", lambda job: replace(job, weights={**job.weights,
                                                                     first(job): job.weights[first(job)].double()})),
    "no digest": ("message_unreadable", lambda job: replace(job, fixed={first(job).name: "../../x"})),
    "a digest of what is not fixed": ("job_weights", lambda job: replace(job, fixed={first(job).name: "0" * 16})),
    "too few rows": ("job_weights", lambda job: rows_of(job, job.rows[:-3])),
    "rows beyond the table": ("job_weights", lambda job: rows_of(job, np.append(job.rows, 10**6))),
}  # fmt: skip


def rows_of(job, rows):
    table = next(value for key, value in job.weights.items() if key.name == TABLE)
    sized = torch.zeros(len(rows), table.shape[1])
    return replace(job, rows=rows, weights={**job.weights, Key("all", TABLE): sized})


@pytest.mark.parametrize("name", CHANGES)
def test_a_job_that_is_not_an_honest_servers_is_refused(meeting, name):
    code, change = CHANGES[name]
    answer = meeting.do(change(meeting.job()))
    assert isinstance(answer, Refused)
    assert answer.fault.code == code, answer.words


def test_an_honest_job_is_done_after_all_of_these(meeting):
    assert meeting.code(meeting.job()) == "done"
    assert meeting.code(meeting.job("evaluate", 0)) == "done"


def test_masks_are_taken_where_the_config_prunes_and_nothing_else_in_their_place(meet):
    met = meet("training.pruning={amount: 0.5, rounds: 2}")
    job = met.job()
    assert job.settings["methods"] == {"pruning": {}}
    weight = job.weights[first(job)]
    mask = torch.zeros_like(weight, dtype=torch.bool)
    assert met.code(with_masks(job, weight)) == "job_settings"
    assert met.code(replace(job, extra={"pruning": Extra({"more": 1})})) == "job_settings"
    other = Extra(tensors={"other": {first(job): mask}})
    assert met.code(replace(job, extra={"pruning": other})) == "job_settings"
    # A mask without its weight is not read; another tensor without it, or of another shape, is refused.
    assert met.code(with_masks(job, mask, Key("all", "x"))) == "message_unreadable"
    assert met.code(with_masks(job, weight, Key("all", "x"))) == "job_weights"
    assert met.code(with_masks(job, weight[:1])) == "job_weights"
    mask.view(-1)[0] = True
    answer = met.do(with_masks(job, mask))
    # What was sent less itself: the weight is zero at the site, before and after training.
    assert float((weight + answer.delta[first(job)]).view(-1)[0]) == 0.0


def test_counts_of_labels_are_taken_where_the_config_adjusts_and_nothing_else_in_their_place(meet):
    met = meet("training.logit_adjustment=1")
    job = met.job()
    assert job.settings["methods"] == {"logit_adjustment": {"strength": 1.0}}

    def counted(counts):
        return replace(job, extra={"logit_adjustment": Extra({"label_counts": counts})})

    for bad in ([3, 4], {"other": [3, 4]}, {"notes": [1] * 99}, {"notes": [-1]}, {"notes": [0.5]}, {"notes": ["1"]}):
        assert met.code(counted(bad)) == "job_settings"
    assert met.code(counted({"notes": [3, 4]})) == "done"
    assert met.code(with_settings(job, methods={"logit_adjustment": {"strength": 9.0}})) == "job_settings"


def test_a_job_for_scoring_brings_nothing_of_methods(meet):
    met = meet("training.logit_adjustment=1")
    job = met.job("evaluate", 0)
    counts = {"logit_adjustment": Extra({"label_counts": {"notes": [3, 4]}})}
    assert met.code(replace(job, extra=counts)) == "job_settings"
    assert met.code(job) == "done"


def test_rows_of_more_tasks_than_a_job_has_are_taken(meeting):
    job = meeting.job()
    more = np.union1d(job.rows, np.arange(20))
    assert len(more) > len(job.rows)
    assert meeting.code(rows_of(job, more)) == "done"


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_rows_of_the_whole_file_give_the_update_of_the_training_part(meet, codec):
    met = meet(f"wire.down={codec}", f"wire.up={codec}", "model.server_model=tiny")
    job = met.job()
    site = met.site._opened.site
    exact = used_rows(site.train_shard("a", "notes").used_ids(), site.model.pad_id)
    is_used = np.isin(job.rows, exact)
    assert is_used.sum() == len(exact) < len(job.rows)
    key = next(key for key in job.weights if key.name == TABLE)
    cut = replace(job, rows=exact, weights={**job.weights, key: job.weights[key][torch.from_numpy(is_used)]})
    wide, narrow = met.do(job).delta, met.do(cut).delta
    assert wide.keys() == narrow.keys()
    for name in wide.keys() - {key}:
        assert torch.equal(wide[name], narrow[name])
    assert torch.equal(wide[key][torch.from_numpy(is_used)], narrow[key])
    assert not wide[key][torch.from_numpy(~is_used)].any()


def test_a_fixed_value_is_stored_under_its_own_digest_only(meet):
    met = meet("sharing.rules=[{embeddings.*: fixed}, {heads.*: task}, {'*': all}]")
    job = met.job()
    name = next(iter(job.fixed))
    key = Key("fixed", name)
    other = torch.ones_like(met.prepared.state.weights[key])
    # What is no digest is not read at all; what is one must be that of its value.
    codes = {"0" * 16: "job_weights", "../../../x": "message_unreadable", "0" * 15 + "\n": "message_unreadable"}
    for digest, code in codes.items():
        bad = replace(job, fixed={**job.fixed, name: digest}, weights={**job.weights, key: other})
        assert met.code(bad) == code
    assert not list(met.folder.rglob("x.safetensors"))
    assert not list(met.folder.rglob("0000*.safetensors"))
    assert met.code(job) == "done"


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        (["training.local_steps=1", "training.batch_size=1"], "policy_min_examples"),
        (["training.local_steps=3"], "policy_min_examples"),
        (["training.local_steps=4"], "done"),
        (["tasks.notes.batch_size=1", "training.local_steps=31"], "policy_min_examples"),
        (["tasks.notes.batch_size=1", "training.local_steps=32"], "done"),
        (["data.validation_fraction=0.3"], "done"),
    ],
)
def test_a_config_of_few_examples_a_job_is_refused_when_it_comes_to_one(meet, overrides, code):
    assert meet(*overrides).job().client == "a"
    met = meet(*overrides)
    assert met.code(met.job()) == code


def test_examples_that_look_alike_count_once(meet):
    # Forty-eight lines of forty texts: enough; of which the config shows a job thirty-two, some of them twice.
    met = meet("training.local_steps=4", number=48, distinct=40)
    answer = met.do(met.job())
    assert isinstance(answer, Refused)
    assert answer.fault.code == "policy_min_examples"
    assert "distinct examples of notes; the policy's min_examples asks for 32" in answer.words


def test_a_site_with_fewer_examples_uses_all_of_them_or_none(meet):
    few = meet(number=12)
    assert few.code(few.job()) == "done"
    fewer = meet("training.local_steps=1", number=12)
    assert fewer.code(fewer.job()) == "policy_min_examples"
    # Sixteen to train on: two whole batches.
    allowed = meet("training.local_steps=1", number=18, min_examples=8)
    assert allowed.code(allowed.job()) == "done"


@pytest.mark.parametrize(
    ("schedule", "steps", "code"),
    [
        ("even", 8, "done"),
        ("even", 7, "policy_min_examples"),
        ("round_robin", 8, "done"),
        ("round_robin", 7, "policy_min_examples"),
        ("joint", 4, "done"),
        ("joint", 3, "policy_min_examples"),
        ("epoch", 6, "done"),
        ("random", 1, "policy_min_examples"),
    ],
)
def test_every_task_that_trains_shows_enough_examples_whatever_the_schedule(meet, schedule, steps, code):
    overrides = [f"training.task_schedule={schedule}", f"training.local_steps={steps}"]
    met = meet(*overrides, tasks=("notes", "grades"))
    assert met.code(met.job()) == code


@pytest.mark.parametrize(
    ("fraction", "evaluated", "code"),
    [(0.5, True, "policy_min_examples"), (0.5, False, "policy_min_examples"), (0.3, True, "told"),
     (0.01, True, "policy_min_examples"), (0.01, False, "told"), (0.999, True, "policy_bounds")],
)  # fmt: skip
def test_a_hello_is_of_as_many_examples_as_a_job(meet, fraction, evaluated, code):
    # Its rows and counts are those of the part that the server's config leaves, which may be a single text.
    met = meet(f"data.validation_fraction={fraction}")
    met.welcome["evaluated"] = evaluated
    assert told(met) == code


def told(met) -> str:
    answer = met.hello()
    return answer.fault.code if isinstance(answer, Refused) else "told"


def test_different_configs_are_counted_over_all_runs_and_restarts(meet):
    met = meet(max_configs=2)
    for run, seed, code in (("ab12", 0, "told"), ("ab12", 1, "told"), ("cd34", 1, "told"), ("cd34", 2, "policy_limit"),
                            ("ab12", 0, "told"), ("ab12", 3, "policy_limit")):  # fmt: skip
        met.welcome["run"], met.welcome["config"]["seed"] = run, seed
        met.restart()
        assert told(met) == code, (run, seed)
    met.welcome["config"]["seed"] = 0
    met.welcome["terms"]["labels"] = {"notes": ["drop", "keep"]}
    met.welcome["config"]["tasks"]["notes"]["labels"] = None
    assert told(met) == "policy_limit"


def test_a_config_that_is_refused_for_the_sites_examples_counts_too(meet):
    # Otherwise a server asks as often as it likes how many there are.
    met = meet("data.validation_fraction=0.5", max_configs=1)
    assert told(met) == "policy_min_examples"
    met.welcome["config"]["data"]["validation_fraction"] = 0.1
    assert told(met) == "policy_limit"


def test_counts_of_an_older_version_go_on(meet):
    met = meet(max_jobs=7)
    met.settings.folder.mkdir()
    (met.settings.folder / "counts.json").write_text('{"jobs": 7, "rounds": 2, "runs": {"ab12": 2}}')
    assert met.code(met.job("evaluate", 2)) == "policy_limit"


FALLING = ("training.schedule=step", "training.step_rounds=1", "training.warmup_rounds=0.001")


@pytest.mark.parametrize(
    ("overrides", "number", "code"),
    [
        # After the first step of the round the rate is nothing.
        ((*FALLING, "training.step_factor=1e-30", "training.batch_size=1"), 2, "policy_min_examples"),
        ((*FALLING, "training.step_factor=0.1", "training.batch_size=1"), 2, "done"),
        # Thirty-two examples in four steps, the first at no rate at all.
        (("training.warmup_rounds=1", "training.local_steps=4"), 1, "policy_min_examples"),
        (("training.warmup_rounds=1",), 1, "done"),
        (("training.warmup_rounds=2.5", "training.schedule=linear"), 1, "done"),
        (("training.schedule=linear",), 1, "done"),
        (("training.schedule=linear",), 3, "done"),
        (("training.schedule=cosine",), 3, "done"),
        (("training.schedule=cosine", "training.num_rounds=1", "training.batch_size=4"), 1, "done"),
        (("training.schedule=linear", "training.num_rounds=1", "training.batch_size=1"), 1, "done"),
    ],
)  # fmt: skip
def test_an_example_counts_where_its_step_has_a_rate(meet, overrides, number, code):
    met = meet(*overrides)
    assert met.code(met.job("train", number)) == code


def test_what_a_server_draws_of_a_sites_folder_is_not_all_that_it_has(tmp_path):
    (tmp_path / "root" / "sst2").mkdir(parents=True)
    lines = [f"sentence number {number}\t{number % 2}" for number in range(60)]
    (tmp_path / "root" / "sst2" / "train.tsv").write_text("\n".join(["sentence\tlabel", *lines, ""]))

    def met(*overrides: str) -> Meeting:
        base = ("data.source=embedded", "evaluation.where=clients")
        return Meeting(tmp_path, (*base, *overrides), tasks=("sst2",), root=str(tmp_path / "root"))

    whole, drawn = met("tasks.sst2={}"), met("tasks.sst2={train_samples: 3}")
    assert whole.code(whole.job()) == "done"
    assert told(drawn) == "policy_min_examples"
    assert told(met("tasks.sst2={val_samples: 1}")) == "policy_min_examples"


def test_jobs_and_rounds_are_counted_across_restarts(meet):
    met = meet(max_rounds=2, max_jobs=4)
    codes = []
    for kind, number in (("train", 1), ("train", 1), ("train", 2), ("train", 3), ("evaluate", 2), ("evaluate", 2)):
        met.restart()
        codes.append(met.code(met.job(kind, number)))
    assert codes == ["done", "done", "done", "policy_limit", "done", "policy_limit"]


def test_another_run_counts_on(meet):
    met = meet(max_rounds=1)
    assert met.code(met.job()) == "done"
    met.welcome["run"] = "cd34"
    assert met.code(met.job()) == "policy_limit"


def test_a_server_may_repeat_its_last_rounds_and_no_others(meet):
    met = meet()
    assert [met.code(met.job("train", number)) for number in (1, 2, 3, 2, 1)] == ["done"] * 4 + ["job_round"]


def test_a_broken_count_is_not_a_fresh_start(meet):
    met = meet()
    met.settings.folder.mkdir()
    (met.settings.folder / "counts.json").write_text('{"jobs": -')
    answer = met.hello()
    assert isinstance(answer, Refused)
    assert "does not know how many jobs it has done" in answer.words


def test_pairs_leave_where_config_and_policy_both_say_so(meet):
    share = "evaluation.share_pairs=true"
    met = meet(share)
    assert met.code(met.job("evaluate", 0)) == "policy_pairs"
    met = meet(share, send={"prediction_pairs": True})
    assert met.code(met.job("evaluate", 0)) == "done"
    met = meet(send={"prediction_pairs": True})
    job = met.job("evaluate", 0)
    assert met.code(with_settings(job, share_pairs=True)) == "policy_pairs"
    assert met.code(with_settings(job, batch_size=1)) == "job_settings"


def test_scores_stay_where_the_policy_or_the_config_says_so(meet):
    met = meet(send={"scores": False})
    assert met.code(met.job("evaluate", 0)) == "policy_scores"
    met = meet()
    job = met.job("evaluate", 0)
    met.welcome["evaluated"] = False
    assert met.code(job) == "job_settings"


def test_counts_leave_rounded_up_everywhere(meet):
    met = meet(send={"example_counts": {"round_to": 50}, "label_counts": {"round_to": 20}})
    hello = met.hello()
    held = hello.tasks["notes"]
    # 43 of 48 examples are for training, 22 and 21 of each label or the like.
    assert (held.examples, held.validation, held.tokens % 50) == (50, 50, 0)
    assert held.labels == [40, 40]
    update = met.do(met.job())
    assert isinstance(update, Update)
    assert update.num_examples == {"notes": 50}
    assert update.seen == {"notes": 50}


def test_label_counts_and_token_rows_stay_where_the_policy_says_so(meet):
    met = meet(send={"label_counts": {"send": False}, "token_rows": False})
    hello = met.hello()
    assert (hello.tasks["notes"].labels, hello.rows, hello.evaluation_rows) == ([], None, None)
    job = met.job()
    assert job.rows is None
    assert met.code(job) == "done"
    assert met.code(rows_of(job, np.arange(500))) == "job_weights"


def test_a_personal_head_stays_personal(meet):
    met = meet("sharing.rules=[{heads.*: client}, {'*': all}]")
    job = met.job()
    assert met.code(with_rule(job, "heads.*", "task")) == "job_plan"
    assert met.code(job) == "done"


SUMMED = ("privacy.secure_aggregation={}", "federation.vocabulary_slices=false")


def exchange(met, **values):
    """An exchange as an honest server sends it."""
    job, options = met.job(), met.job().settings["methods"]
    said = {"step": "advertise", "session": "0" * 32, "purpose": "train", **values}
    return replace(
        job, kind="exchange", weights={}, rows=None, fixed={}, state_round=0, settings={"methods": options},
        extra={"secure_aggregation": Extra(said)},
    )  # fmt: skip


def test_an_exchange_brings_what_its_capability_reads_and_nothing_else(meet):
    met = meet(*SUMMED, max_jobs=0)
    job = exchange(met)
    # It is no job in the policy's sense: it touches no example.
    assert met.code(job) == "done"
    options = job.settings["methods"]["secure_aggregation"]
    weaker = {"methods": {"secure_aggregation": {**options, "min_clients": 1}}}
    for changed in (
        replace(job, weights=met.job().weights),
        replace(job, settings={}),
        replace(job, settings=weaker),
        replace(job, extra={}),
        replace(job, extra={"pruning": Extra({"step": "advertise"})}),
        exchange(met, session="../x"),
        exchange(met, step="dump"),
    ):
        assert met.code(changed) == "job_settings"
    # Of a session that the site has no keys of.
    late = Extra({"step": "unmask", "session": "1" * 32, "returned": [], "sealed": {}})
    assert met.code(replace(job, extra={"secure_aggregation": late})) == "exchange_refused"


def test_a_job_outside_a_session_gets_no_update_where_the_config_sums_under_masks(meet):
    met = meet(*SUMMED)
    assert met.code(met.job()) == "exchange_refused"
    assert met.code(met.job("evaluate", 0)) in ("exchange_refused", "job_settings")


def test_an_exchange_of_a_config_without_any_is_refused(meeting):
    job = replace(meeting.job(), kind="exchange", weights={}, rows=None, settings={"methods": {}},
                  extra={"secure_aggregation": Extra({"step": "advertise"})})  # fmt: skip
    assert meeting.code(job) == "job_settings"


def test_token_rows_stay_where_no_slices_are_cut(meet):
    hello = meet(*SUMMED).hello()
    assert (hello.rows, hello.evaluation_rows) == (None, None)
    assert meet().hello().rows
