import csv
import io
import xml.etree.ElementTree as ElementTree

from fedmtl_studies.page import to_csv
from fedmtl_studies.scaling_figures import make_figures
from fedmtl_studies.scaling_page import CLAIMS, NOT_RUN, answer, claims_table, make_tables
from studies.small_results import known, result

GOOD, NEVER = result(0.5, 0.7, 0.8), result(0.5, 0.5, 0.5, 0.5)


def rows(table):
    return list(csv.DictReader(io.StringIO(to_csv(table))))


def test_tables_say_what_the_cells_came_to():
    accuracies, rounds, collapses, _ = make_tables(known({1: GOOD, 2: result(0.5, 0.6, 0.6, 0.76), 4: NEVER}))
    # .6 / .8 = .75
    assert [(row["clients"], row["accuracy"], row["share"], row["at_chance"]) for row in rows(accuracies)] == [
        ("1", "0.8", "1", "no"), ("2", "0.6", "0.75", "no"), ("4", "0.5", "0.625", "never left it"),
    ]  # fmt: skip
    assert [row["last_accuracy"] for row in rows(accuracies)] == ["0.8", "0.76", "0.5"]
    # .9 x .8 = .72, which two clients have after round 3 and four never
    assert [(row["target"], row["rounds"]) for row in rows(rounds)] == [
        ("0.72", "2"), ("0.72", "3"), ("0.72", "not in 3"),
    ]  # fmt: skip
    assert [row["clients_at_chance"] for row in rows(collapses)] == ["4"]


def test_a_void_target_is_not_a_number():
    _, rounds, _, _ = make_tables(known({1: NEVER, 2: GOOD}))
    assert [(row["target"], row["rounds"]) for row in rows(rounds)] == [("", "void")] * 2


def test_cells_that_are_not_finished_are_empty():
    accuracies, rounds, _, _ = make_tables(known({1: [GOOD, None], 2: [None, None]}))
    assert [row["accuracy"] for row in rows(accuracies)] == ["", ""]
    assert rows(rounds)[1]["rounds"] == ""


def ours(found):
    return {claim.words: row["ours"] for claim, row in zip(CLAIMS, rows(claims_table(found)), strict=True)}


def test_a_claim_is_compared_with_the_encoder_it_is_about_alone():
    told = ours(known({1: GOOD, 2: NEVER}, encoder="distilbert-base-cased"))
    falls = "sentiment: at chance after 2 rounds with 2 clients (never left it); after 3 still with 2"
    assert told["DistilBERT declines steeply past 4 clients on all tasks"] == falls
    # its name has `bert-base-cased` in it, and it was not run on imdb
    assert told["BERT declines gradually and scales to 32 clients without a sharp decline"] == NOT_RUN
    assert told["DistilBERT falls to the random classifier on IMDB"] == NOT_RUN
    assert set(ours(known({1: GOOD, 2: NEVER})).values()) == {
        NOT_RUN, "from 1 to 2 clients: tiny on sentiment −.300",
    }  # fmt: skip


def pictures(found):
    return {name: ElementTree.fromstring(picture) for name, (_, picture) in make_figures(found).items()}


def count(picture, kind):
    return len([part for part in picture.iter() if part.get("class") == kind])


def test_figures_draw_chance_failures_and_every_number_of_clients():
    drawn = pictures(known({1: GOOD, 2: GOOD, 4: NEVER, 8: GOOD}))
    assert list(drawn) == ["figure1-sentiment", "figure2-sentiment", "figure3-sentiment-tiny"]
    first, second, third = drawn.values()
    assert count(first, "level") == count(third, "level") == 1
    assert count(third, "curve") == 4
    # four clients failed: a cross, no spot, and no line over that place
    assert (count(second, "lost"), count(second, "spot"), count(second, "curve")) == (1, 3, 2)
    assert "not in 3 with 4" in second.find("desc").text


def test_a_void_encoder_is_named_as_such():
    second = pictures(known({1: NEVER, 2: GOOD}))["figure2-sentiment"]
    assert "tiny: void" in [part.text for part in second.iter("text")]
    assert count(second, "spot") == 0


def test_nothing_is_drawn_of_nothing():
    assert pictures(known({1: [None]})) == {}


def test_the_answer_says_who_stays_above_chance():
    assert answer(known({1: GOOD, 2: GOOD})) == (
        "With up to 2 clients 1 of 1 pairs of an encoder and a task stays above chance."
    )
    assert answer(known({1: GOOD, 2: GOOD, 4: NEVER})).endswith("At chance: tiny on sentiment with 4 clients.")
    assert answer(known({1: NEVER, 2: NEVER})).endswith("1 had not left chance with one client and proves nothing.")
    assert answer(known({1: [None]})) == ""
