"""The grid has every row of the report's tables, and its rows differ in nothing but what they are about."""

import pytest

from fedmtl.config.file import config_from
from fedmtl_studies.folder import open_study
from fedmtl_studies.multitask import NEVER, MultitaskOptions, plan, rows, setups
from fedmtl_studies.multitask_results import ERRORS, PRINTED, average, slips

EVERY = (1, 2, 3, 4, 5, 6, 7)


@pytest.fixture
def cells(tmp_path):
    def make(**given):
        options = MultitaskOptions(quick=True, **{"steps": 24, **given})
        return {cell.name: cell for cell in plan(options, open_study(tmp_path, "study")).cells}

    return make


def test_every_cell_of_the_grid_is_a_config(cells):
    for cell in cells(steps=100).values():
        config_from(dict(cell.settings))


@pytest.mark.parametrize("number", sorted(PRINTED))
def test_every_row_of_the_report_is_a_row_of_ours(number):
    ours = {row.report for row in rows(EVERY, has_cfimdb=True)[number]}
    assert ours - {None} == set(PRINTED[number])


def test_table_7_has_both_models_of_the_report():
    assert [row.report for row in rows(EVERY, has_cfimdb=True)[7]] == list(ERRORS)


def test_every_setup_is_in_a_table_and_every_row_has_its_setup():
    used = {row.setup for listed in rows(EVERY, has_cfimdb=True).values() for row in listed}
    assert used == set(setups(16))


def test_one_seed_is_a_cell_for_every_setup(cells):
    assert list(cells()) == [f"{name}-seed0" for name in dict.fromkeys(setup for setup in _used())]


def _used():
    return (row.setup for listed in rows(EVERY, has_cfimdb=True).values() for row in listed)


def test_only_rows_that_fit_get_every_seed(cells):
    made = cells(tables=(6,), seeds=(0, 1, 2), seed_rows="joint*, even")
    assert "joint-pcgrad-seed2" in made
    assert "even-seed1" in made
    assert "annealed-seed0" in made
    assert "annealed-seed1" not in made


def test_multi_task_rows_train_on_equally_many_examples(cells):
    # 2 epochs of 12 steps of 8 examples; a joint step has a batch of each of three tasks
    for name, cell in cells().items():
        training = cell.settings["training"]
        batches = 3 if training["task_schedule"] == "joint" else 1
        examples = training["num_rounds"] * training["local_steps"] * training["batch_size"] * batches
        assert examples == (64 if name.startswith("third") else 192), name


def test_a_single_task_model_has_all_heads_and_trains_one(cells):
    tasks = cells()["single-paraphrase-seed0"].settings["tasks"]
    assert {name: task.get("from_round") for name, task in tasks.items()} == {
        "sst5": NEVER, "qqp": None, "stsb": NEVER,
    }  # fmt: skip


def test_a_row_may_have_a_multiple_of_the_rate(cells):
    made = cells(overrides=("training.learning_rate=2e-4",))
    rates = [made[f"lora-adapters-r4{fast}-seed0"].settings["training"]["learning_rate"] for fast in ("", "-fast")]
    assert rates == [pytest.approx(2e-4), pytest.approx(2e-3)]


def test_rows_without_cfimdb_differ_in_the_file_alone(cells):
    made = cells()
    both, alone = (made[f"{name}-seed0"].settings for name in ("annealed", "annealed-no-cfimdb"))
    assert both["tasks"]["sst5"].pop("source")["train"].endswith("sst5_cfimdb.tsv")
    assert both == alone


def test_the_report_multiplies_by_alpha_where_peft_divides_by_the_rank(cells):
    lora = cells()["lora-r16-a8-seed0"].settings["model"]["lora"]
    assert lora == {"rank": 16, "alpha": 128, "mode": "last_linear"}


def test_overrides_change_the_base_and_leave_a_row_what_it_is(cells):
    made = cells(overrides=("training.task_schedule=random", "training.learning_rate=3e-5"))
    assert made["lora-r1-a1-seed0"].settings["training"]["task_schedule"] == "random"
    assert made["round-robin-seed0"].settings["training"]["task_schedule"] == "round_robin"
    assert {cell.settings["training"]["learning_rate"] for name, cell in made.items() if "fast" not in name} == {3e-5}


def test_the_reports_averages_are_its_own_formula_but_for_one():
    # (0.530 + 0.900 + 1.847 / 2) / 3 = 0.7845, printed as 0.789
    assert average(0.530, 0.900, 0.847) == pytest.approx(0.7845)
    assert [line for number in PRINTED for line in slips(number)] == [
        "Configuration 1: the report prints an average of 0.789, its scores give 0.785."
    ]
