"""What the tables of federated against centralized say of results that are made up here."""

import pytest

from fedmtl_studies.federated import FederatedOptions, setups
from fedmtl_studies.federated_page import (
    answer,
    best_rates,
    clients_csv,
    closeness_of,
    compared_table,
    ends_table,
    gain_table,
    printed_table,
    rates_table,
)
from fedmtl_studies.federated_results import Budget, Known, Result
from fedmtl_studies.results import Spread

METRICS = {"sst2": "accuracy", "qqp": "accuracy", "stsb": "pearson"}
BUDGET = Budget(1e-4, 100, 10, 5, 2.0, "cpu, fp32", 1)


def result(cell, sst2, qqp=0.5, stsb=0.5, clients=None, **more):
    curves = {"sst2": {0: 0.4, 1: sst2}, "qqp": {0: 0.4, 1: qqp}, "stsb": {0: 0.4, 1: stsb}, **more.pop("curves", {})}
    examples = {task: dict.fromkeys(own, 7) for task, own in (clients or {}).items()}
    return Result(cell, more.get("metrics", {}), curves, clients or {}, examples, BUDGET)


def known(results, options=None):
    every = setups(options or FederatedOptions(seeds=(0, 1)))
    return Known([setup for name, setup in every.items() if name in results], METRICS, results)


def column(table, key):
    at = [column.key for column in table.columns].index(key)
    return [row[at] for row in table.rows]


def test_distances_are_points_to_the_centralized_model_of_the_same_seed():
    found = known(
        {
            "base-federated": {0: result("f0", 0.80), 1: result("f1", 0.84)},
            "base-centralized": {0: result("c0", 0.81), 1: result("c1", 0.82)},
        }
    )
    table = compared_table(1, ["base"], found)
    # -1 and +2 points
    assert column(table, "sst2_to_centralized") == [Spread(pytest.approx(0.5), pytest.approx(4.5**0.5), 2), None]
    assert column(table, "sst2_accuracy")[0].mean == pytest.approx(0.82)
    assert column(table, "steps_in_a_row")[0].mean == 5


def test_a_seed_that_is_missing_leaves_its_numbers_out():
    found = known({"base-federated": {0: result("f0", 0.8), 1: None}})
    assert column(compared_table(1, ["base"], found), "sst2_accuracy") == [None]
    assert compared_table(4, ["clients-1"], found) is None


def test_a_gain_is_the_shared_models_score_over_the_clients_own():
    own = {"sst2": {"sst2_1": 0.7, "sst2_2": 0.85}, "stsb": {"stsb_1": None}}
    found = known(
        {"base-federated": {0: result("f", 0.8), 1: None}, "base-local": {0: result("l", 0.7, clients=own), 1: None}}
    )
    table = gain_table(found)
    # +10 and -5 points
    assert column(table, "sst2_above") == ["1 of 2"]
    assert column(table, "sst2_smallest")[0].mean == pytest.approx(-5)
    assert column(table, "sst2_mean")[0].mean == pytest.approx(2.5)
    assert column(table, "stsb_above") == [None]
    assert column(table, "every") == ["no"]
    lines = clients_csv(found).splitlines()
    assert lines[1].startswith("base,federated,0,sst2,sst2_1,7,0.7,0.8,10.0")
    assert len(lines) == 4


@pytest.mark.parametrize(
    ("seeds", "words"),
    [
        ([(0.7, 0.75), (0.79, 0.6)], "yes"),
        # +10 and -5: on the mean +2.5; a draw is not above
        ([(0.7, 0.7), (0.85, 0.8)], "on the mean of seeds"),
        ([(0.7, 0.8), (0.85, 0.8)], "no"),
    ],
)
def test_every_client_gains_with_all_seeds_or_on_their_mean(seeds, words):
    local = [{"sst2": {"sst2_1": first, "sst2_2": second}} for first, second in seeds]
    found = known(
        {
            "base-federated": {seed: result(f"f{seed}", 0.8) for seed in (0, 1)},
            "base-local": {seed: result(f"l{seed}", 0.7, clients=own) for seed, own in enumerate(local)},
        }
    )
    assert column(gain_table(found), "every") == [words]


def test_an_end_is_compared_with_the_highest_round():
    curve = {0: 0.95, 1: 0.6, 2: 0.9, 3: 0.88}
    found = known({"long-federated": {0: result("long-federated-seed0", 0.8, curves={"stsb": curve}), 1: None}})
    table = ends_table(found)
    # round 0 is before training; -2 points
    assert column(table, "best_round") == ["2"]
    assert column(table, "points")[0].mean == pytest.approx(-2)


def test_printed_scores_stand_under_their_own_names():
    metrics = {"stsb": {"mse": 1.25, "r2": 0.5}}
    found = known({"base-federated": {0: result("f", 0.8, metrics=metrics)}})
    table = printed_table(found)
    by_model = {row[0]: dict(zip([column.key for column in table.columns], row, strict=True)) for row in table.rows}
    theirs = by_model["printed: federated, best (rounds 12, 29, 2)"]
    assert theirs["similarity_pearson"] is None
    assert theirs["similarity_closeness"].mean == 0.9309
    ours = by_model["ours: federated, all samples, iid, 3 clients per task"]
    # 1 - 1.25 / 25
    assert ours["similarity_closeness"].mean == pytest.approx(0.95)
    # half of the variance is explained: it is 2.5, and 1 - 2.5 / 25 is what a constant has
    assert by_model["the mean score for every pair"]["similarity_closeness"].mean == pytest.approx(0.9)
    assert closeness_of(result("f", 0.8, metrics={"stsb": {"mse": 30.0}}), "stsb") == 0


def test_the_best_rate_of_each_mode_is_said_as_an_option():
    options = FederatedOptions(choose=(1e-4, 2e-4, 4e-4))
    scores = {"federated": (0.6, 0.7, 0.9), "centralized": (0.6, 0.8, 0.7)}
    results = {
        f"rate-{rate:g}-{kind}": {0: result("x", score)}
        for kind, own in scores.items()
        for rate, score in zip(options.choose, own, strict=True)
    }
    found = known(results, options)
    assert best_rates(found) == {"federated": 4e-4, "centralized": 2e-4}
    table = rates_table(found)
    assert "Then: --rate federated=0.0004,centralized=0.0002" in table.notes
    assert "At an end of what was tried: federated." in table.notes


def test_the_answer_is_the_distance_to_one_place_and_to_clients_alone():
    # Means over tasks: (.8 + .5 + .5) / 3 = .6; (.86 + .5 + .5) / 3 = .62; (.5 + .5 + .5) / 3 = .5
    found = known(
        {
            "base-federated": {0: result("f", 0.80)},
            "base-centralized": {0: result("c", 0.86)},
            "base-local": {0: result("l", 0.50)},
        }
    )
    assert answer(found) == (
        "One federated model has a mean score of .600 over sst2, qqp, stsb (all samples, iid, 3 clients per task;"
        " one seed): 2.0 points below the same data in one place (.620), 10.0 points above the clients alone (.500)."
    )
    assert answer(known({"base-federated": {0: None}})) == ""
