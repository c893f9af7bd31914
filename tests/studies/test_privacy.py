"""The attacks on hand-made cases, and the study of privacy from its command to its page."""

import json
import math
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from fedmtl.capabilities import AGGREGATORS
from fedmtl.config.file import load_config
from fedmtl.errors import ConfigError, DataError
from fedmtl.federation.messages import ClientInfo, Update
from fedmtl.runs.folder import RunFolder
from fedmtl.sharing.plan import Key
from fedmtl_studies.folder import open_study
from fedmtl_studies.privacy import Files, PrivacyOptions, plan, setups
from fedmtl_studies.privacy_attacks import (
    ATTACKS,
    HostileEngine,
    Losses,
    auc,
    calibrated,
    findings_path,
    laid_out,
    read_findings,
    recovered_words,
    true_positives,
)
from fedmtl_studies.privacy_page import Result, _stated, show
from fedmtl_studies.results import Spread
from raw_events import raw_events
from studies.csv_rows import read_csv


class TestMembership:
    def test_auc_counts_pairs_and_half_a_tie(self):
        # 3 is above 1 and 2; 2 is above 1 and ties with 2: 3.5 of 4 pairs
        assert auc([3, 2], [1, 2]) == 3.5 / 4
        assert auc([5, 6], [1, 2]) == 1
        assert auc([1, 1], [1, 1]) == 0.5

    def test_true_positives_are_above_what_one_in_a_hundred_others_is_above(self):
        others = list(range(100))
        # One of a hundred may be above: 98 is the threshold, and 98 itself is not above it.
        assert true_positives([99.5, 98.5, 98, 50], others) == 2 / 4
        # Of fifty none may be.
        assert true_positives([48.5, 49.5], list(range(50))) == 1 / 2

    def test_calibration_tells_a_member_from_an_easy_example(self):
        # By loss alone the easy example, which every model knows, looks like a member.
        losses, references = [0.5, 0.1], [[2.0, 0.1], [3.0, 0.1]]
        hard, easy = calibrated(losses, references)
        assert hard > easy == pytest.approx(0)
        chance, others = math.exp(-0.5), [math.exp(-2.0), math.exp(-3.0)]
        logits = [math.log(p / (1 - p)) for p in (chance, *others)]
        assert hard == pytest.approx(logits[0] - (logits[1] + logits[2]) / 2)

    def test_both_attacks_are_of_losses(self):
        losses = Losses((0.1, 0.4), (0.3, 0.5))
        # 0.1 is below both, 0.4 below one of them.
        assert losses.by_threshold() == (3 / 4, 1 / 2)
        same = Losses((0.1, 0.4), (0.3, 0.5))
        assert losses.by_calibration([same])[0] == 0.5


class TestWords:
    def test_rows_that_moved_are_the_words(self):
        # Of eight rows 0 is special; the texts use 2, 3 and 5, and 5's gradient is small.
        moved = [0.9, 0, 0.5, 0.4, 0, 0.01, 0, 0]
        found = recovered_words(moved, used=[0, 2, 3, 5], known=[0])
        assert (found.used, found.rows, found.ranked, found.precision, found.recall) == (3, 3, 1, 1, 1)
        assert found.chance == pytest.approx(3 / 7)

    def test_a_sum_has_words_of_others_too(self):
        # 2 and 3 are the client's, 4, 5 and 6 of others who moved them further.
        found = recovered_words([0, 0, 0.2, 0.1, 0.3, 0.15, 0.3, *[0] * 13], used=[2, 3])
        assert (found.ranked, found.precision, found.recall) == (0, 2 / 5, 1)

    def test_noise_as_long_as_the_gradient_hides_them(self):
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(2000, 32, generator=generator)
        rows[10:20] += 0.1
        hidden = recovered_words(rows.norm(dim=1).tolist(), used=range(10, 20))
        assert hidden.ranked <= 0.2
        assert hidden.recall == 0
        # Ten times as far out they stand out again.
        rows[10:20] += 10
        seen = recovered_words(rows.norm(dim=1).tolist(), used=range(10, 20))
        assert (seen.ranked, seen.precision, seen.recall) == (1, 1, 1)

    def test_a_vector_in_place_of_an_update_is_read_as_its_values_by_name(self):
        table, bias, head = Key("all", "table"), Key("all", "bias"), Key("task:a", "head")
        trained = {table: torch.zeros(3, 2), bias: torch.zeros(2), head: torch.zeros(4)}
        masked = {Key("all", "values"): torch.arange(8), Key("all", "numbers"): torch.ones(1)}
        found = laid_out({"masks": SimpleNamespace(tensors={"masked": masked})}, trained)
        assert set(found) == {table, bias}
        assert found[bias].tolist() == [0, 1]
        assert found[table].tolist() == [[2, 3], [4, 5], [6, 7]]

    def test_without_rows_nothing_is_found(self):
        found = recovered_words([0.0] * 10, used=[1, 2])
        assert (found.ranked, found.precision, found.recall) == (0, 0, 0)


KEY = Key("all", "w")


class FakeEngine:
    def clients(self):
        return {name: ClientInfo({"sentiment": 10}) for name in ("bad", "good")}

    def run(self, jobs, deadline):
        for job in jobs:
            yield Update(1, job.client, ("sentiment",), {KEY: torch.ones(2)}, None, {"sentiment": 10}, {})


@pytest.mark.parametrize(
    ("attack", "factor", "joins_with", "sends"),
    [
        ("honest", 1, 10, 10),
        ("labels", 1, 10, 10),
        ("labels-claim", 1, 10, 10**6),
        ("labels-join", 1, 10**6, 10**6),
        ("sign-3", -3, 10, 10),
        ("sign-10", -10, 10, 10),
    ],
)
def test_the_hostile_client_alone_does_what_its_attack_says(attack, factor, joins_with, sends):
    engine = HostileEngine(FakeEngine(), "bad", ATTACKS[attack])
    jobs = [SimpleNamespace(client=name) for name in ("bad", "good")]
    bad, good = engine.run(jobs, 1.0)
    assert bad.delta[KEY].tolist() == [factor] * 2
    assert bad.num_examples == {"sentiment": sends}
    assert engine.clients()["bad"].num_examples == {"sentiment": joins_with}
    assert good.delta[KEY].tolist() == [1, 1]
    assert good.num_examples == engine.clients()["good"].num_examples == {"sentiment": 10}


def test_a_finding_that_was_cut_off_is_left_out_and_a_later_one_counts(tmp_path):
    run = RunFolder(tmp_path)
    first, second = ({"kind": "words", "view": "sum", "round": 1, "used": used} for used in (1, 2))
    findings_path(run).write_text(f'{json.dumps(first)}\n{json.dumps(second)}\n{{"kind": "wor')
    assert read_findings(run) == [second]


class TestPlan:
    def test_there_is_a_cell_for_every_attack_under_every_rule_there_is(self):
        names = {setup.name for setup in setups(PrivacyOptions(quick=True, tables=(3,)))}
        assert names == {f"poison-{attack}-{rule}" for attack in ATTACKS for rule in AGGREGATORS}

    def test_no_example_is_in_two_files_and_flipped_labels_are_the_only_change(self, tmp_path):
        files = Files(PrivacyOptions(quick=True), tmp_path, 0)
        paths = [
            files.others,
            *files.trains("member", 40),
            *files.trains("reference-0", 40),
            *files.trains("poison", 80),
        ]
        rows = [row for path in paths for row in path.read_text().splitlines()[1:]]
        assert len(rows) == 400 + 3 * 40 * 2 + 3 * 80 == len({row.split("\t")[0] for row in rows})
        before, after = (path.read_text().splitlines() for path in (paths[-3], files.flipped(paths[-3])))
        other = {"negative": "positive", "positive": "negative", "label": "label"}
        assert [(text, other[label]) for text, label in (row.split("\t") for row in before)] == [
            (text, label) for text, label in (row.split("\t") for row in after)
        ]
        again = Files(PrivacyOptions(quick=True), tmp_path / "again", 0)
        assert again.trains("member", 40)[0].read_text() == paths[1].read_text()

    def test_too_few_rows_are_named_with_what_to_lower(self, tmp_path):
        files = Files(PrivacyOptions(quick=True, examples=4000), tmp_path, 0)
        with pytest.raises(DataError, match=r"sentiment: has \d+ different training rows, .*; lower --examples"):
            files.trains("member", 4000)

    def test_real_data_is_read_from_its_folder(self, tmp_path):
        for task, head in {"sst2": "sentence\tlabel", "stsb": "sentence1\tsentence2\tlabel"}.items():
            (tmp_path / task).mkdir()
            texts = (f"text number {n}" for n in range(400))
            row = {"sst2": "{}\t{}", "stsb": "{0}\t{0} too\t{1}"}[task]
            lines = [
                head,
                *(
                    row.format(text, ("negative", "positive")[n % 2] if task == "sst2" else "3.0")
                    for n, text in enumerate(texts)
                ),
            ]
            (tmp_path / task / "train.tsv").write_text("\n".join(lines) + "\n")
        options = PrivacyOptions(data=str(tmp_path), tasks=("sst2", "stsb"), tables=(3,), rules=("mean",), others=100,
                                 poison_examples=30, examples=5, batches=(1,), references=0)  # fmt: skip
        cells = plan(options, open_study(tmp_path, "study")).cells
        settings = cells[0].settings
        assert settings["tasks"]["stsb"] == {"source": {"train": str(tmp_path / "stsb/train.tsv")},
                                             "train_samples": 10, "val_samples": 50}  # fmt: skip
        assert set(settings["clients"]) == {"site_1", "site_2", "site_3", "stsb_1"}

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({}, "--data: missing; name a folder with sst2, qqp, stsb, or write --quick"),
            ({"quick": True, "data": "x"}, "--data: --quick is on embedded data"),
            ({"quick": True, "tasks": ("similarity",)}, "--tasks: found similarity; .* a classification first"),
            ({"quick": True, "tables": (4,)}, "--tables: found 4; write some of 1 to 3"),
            ({"quick": True, "batches": ()}, "--batches: found none"),
        ],
    )
    def test_options_that_cannot_be_are_named(self, given, message):
        with pytest.raises(ConfigError, match=message):
            PrivacyOptions(**given)

    def test_rows_that_fit_nothing_are_named(self):
        with pytest.raises(ConfigError, match="--rows: no setup fits none"):
            setups(PrivacyOptions(quick=True, rows="none"))


def test_what_a_run_states_is_its_last_statement_of_each_kind(tmp_path):
    run = RunFolder(tmp_path)
    assert run.events.parent == tmp_path
    events = [
        {"event": "privacy", "round": 1, "epsilon": 9.0},
        {"event": "privacy", "round": 2, "epsilon": 2.0},
        {"event": "example_privacy", "round": 2, "tasks": {"a": {"epsilon": 3.0}, "b": {"epsilon": 4.0}}},
        {"event": "round", "round": 2},
    ]
    run.events.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    assert _stated(run) == 4.0
    run.events.write_text('{"event": "round"}\n')
    assert _stated(run) is None


def test_noise_that_no_run_states_is_a_warning_and_a_stated_one_stands_in_the_table():
    options = PrivacyOptions(quick=True, tables=(1,))
    wanted = setups(options)
    silent, stated = (Result(name, {}, {}, {}, adds_noise=True, epsilon=e) for name, e in (("a", None), ("b", 7.9)))
    page = show(options, wanted, {"member-example-8": {0: silent}, "member-example-1": {0: stated}})
    assert page.warnings[0].startswith("Of the cells that were to add noise 1 states no epsilon: a.")
    spent = {row[0]: row[2] for row in page.tables[0].rows}
    assert spent["privacy.example, epsilon 8"] is None
    assert spent["privacy.example, epsilon 1"] == Spread(7.9, None, 1)


@pytest.fixture
def study(command):
    return partial(command, "privacy")


ROWS = "member-none,words-1-plain,words-1-dense,words-1-fixed,poison-honest-mean,poison-sign-10-mean"
SMALLEST = (
    "--quick", "--encoder", "random-1x32", "--rows", ROWS, "--rules", "mean", "--batches", "1", "--examples", "8",
    "--others", "100", "--rounds", "2", "--references", "1", "--poison-examples", "24", "--poison-rounds", "1",
    "--set", "compute.device=cpu", "--keep", "scores",
)  # fmt: skip


def test_what_taps_find_is_what_the_tables_say_and_a_finished_study_is_left_alone(study, tmp_path):
    code, _, err = study(*SMALLEST)
    assert code == 0, err
    folder = tmp_path / "runs/privacy-quick"
    run = RunFolder(folder / "cells/member-none-seed0")
    found = {(one["view"], one["round"]): one for one in read_findings(run)}
    assert set(found) == {("model", 0), ("model", 1), ("model", 2), ("update", 1), ("update", 2)}
    # The others are what the run is scored on: their mean loss is the run's own.
    scored = {event["round"]: event["loss"] for event in raw_events(run) if event["event"] == "evaluation"}
    for number in (0, 1, 2):
        losses = found["model", number]["others"]
        assert sum(losses) / len(losses) == pytest.approx(scored[number], rel=1e-5)
    # A client's own model knows its examples better than the one it was sent.
    assert sum(found["update", 1]["members"]) < sum(found["model", 0]["members"])
    rows = {row["view"]: row for row in read_csv(folder / "table1.csv")}
    last = Losses(tuple(found["update", 2]["members"]), tuple(found["update", 2]["others"]))
    row = rows["the client's update of round 2"]
    assert float(row["auc_loss"]) == pytest.approx(last.by_threshold()[0])
    noted = read_findings(RunFolder(folder / "cells/reference-0-seed0"))
    (reference,) = (one for one in noted if (one["view"], one["round"]) == ("model", 2))
    known = Losses(tuple(reference["members"]), tuple(reference["others"]))
    assert float(row["auc_calibrated"]) == pytest.approx(last.by_calibration([known])[0])

    words = {(row["protection"], row["view"]): row for row in read_csv(folder / "table2.csv")}
    used = (folder / "data/seed0/words-1-site_1.tsv").read_text().splitlines()[1].split("\t")[0].split()
    plain = words["none, vocabulary slices", "one client's update"]
    assert int(float(plain["used"])) == len(set(used))
    assert (plain["recovered"], plain["precision"], plain["recall"]) == ("1", "1", "1")
    summed = words["none, whole table", "the sum of 3 clients"]
    assert summed["recall"] == "1"
    assert float(summed["precision"]) < 1
    assert words["token table fixed", "one client's update"]["recovered"] == "0"

    rules = read_csv(folder / "table4.csv")
    assert [row["sentiment_score"] != "" for row in rules] == [True, False, False, False, False, True]
    sent = load_config(folder / "cells/poison-sign-10-mean-seed0/config.yaml")
    assert set(sent.clients) == {"site_1", "site_2", "site_3", "paraphrase_1", "similarity_1"}
    text = (folder / "study.md").read_text()
    assert "Without protection one step on 1 text gives away 100.0% of the words" in text
    assert len(list((folder / "figures").iterdir())) == 3
    before = run.events.stat().st_mtime_ns
    code, out, _ = study(*SMALLEST)
    assert code == 0
    assert "7 of 7 cells were finished before" in out
    assert run.events.stat().st_mtime_ns == before


@pytest.mark.slow
def test_the_quick_study_has_every_row_within_four_minutes(study, tmp_path):
    started = time.monotonic()
    code, _, err = study("--quick")
    assert code == 0, err
    assert time.monotonic() - started < 240
    for name in ("table1", "table2", "table3", "table4"):
        for row in read_csv(tmp_path / f"runs/privacy-quick/{name}.csv"):
            # A plain run spends no epsilon.
            assert all(value for key, value in row.items() if key != "epsilon"), row
