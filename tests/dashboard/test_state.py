"""What the list and the page say of a run: the same as its summary, bounded, and only what has changed."""

import pytest

from dashboard.made_runs import CONFIG, a_round, append, end, line, opening, write_run
from fedmtl.dashboard import state as states
from fedmtl.dashboard.card import Cards, thinned
from fedmtl.dashboard.compare import comparison, differences, study
from fedmtl.dashboard.files import scan
from fedmtl.dashboard.state import RunState, config_rows
from fedmtl.runs.folder import RunFolder, locked
from fedmtl.runs.log import read_events
from fedmtl.runs.summary import summarize


def opened(path):
    state = RunState(next(run for run in scan([path.parent])[0] if run.name == path.name))
    while state.poll():
        pass
    return state


def everything(state):
    return state.sections({})[0]


def changed(state, known):
    state.poll()
    return state.sections(known)


def begun(path, *lines):
    """A run of these lines that has not ended."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text("{}")
    (path / "events.jsonl").write_bytes(b"".join(lines))
    return path


def test_a_row_says_what_the_summary_says(tmp_path):
    write_run(tmp_path / "one", 4, sites=("a", "b", "c"))
    summary = summarize(read_events(RunFolder(tmp_path / "one")), "one")
    (row,) = Cards([tmp_path]).rows()
    assert row["overall"] == summary.overall
    assert row["best"] == summary.averages["overall"].best.value
    assert row["bytes"] == summary.bytes_up + summary.bytes_down == 4 * 3 * 3000
    assert row["rounds"] == summary.rounds == 4
    assert [(task["task"], task["score"]) for task in row["tasks"]] == [
        (name, task.final[task.metric]) for name, task in summary.tasks.items()
    ]


def test_a_row_stays_the_same_object_until_the_run_grows(tmp_path):
    write_run(tmp_path / "one", 1, done=False)
    cards = Cards([tmp_path])
    (before,) = cards.rows()
    assert cards.rows()[0] is before
    append(tmp_path / "one", *a_round(2))
    (after,) = cards.rows()
    assert (after["rounds"], after["x"]) == (2, [0, 1, 2])


def test_the_words_for_the_state_of_a_run(tmp_path):
    run = begun(tmp_path / "one", opening()[0], line("expected", round=0, clients=["a", "b"]))
    cards = Cards([tmp_path])

    def status():
        return cards.rows()[0]["status"]

    assert status() == "killed"
    with locked(run):
        assert status() == "waiting"
        assert cards.rows()[0]["missing"] == ["a", "b"]
        append(run, *(line("site", round=0, client=name, tasks={"mood": 5}) for name in "ab"))
        assert status() == "running"
        append(run, end("interrupted"))
        assert status() == "interrupted"


def test_the_epsilon_of_a_row_is_the_last_and_the_most(tmp_path):
    def spent(round, epsilon):
        return line(
            "privacy",
            round=round,
            unit="client",
            epsilon=epsilon,
            delta=1e-5,
            accountant="rdp",
            releases=[],
            words="w",
            details={},
        )

    run = begun(tmp_path / "one", opening()[0], spent(1, 2.0), spent(2, 3.5))
    assert Cards([tmp_path]).rows()[0]["epsilon"] == 3.5
    assert everything(opened(run))["head"]["privacy"] == ["epsilon 3.5 at delta 1e-05 (clients)"]


def test_the_sites_of_a_run_with_a_late_and_a_refused_one(tmp_path):
    sites = ("a", "b", "c")
    failing = {"b": "no answer within 60 s (federation.round_timeout)", "c": "claims 9 examples"}
    run = begun(tmp_path / "one", *opening(5, sites), *a_round(1, sites), *a_round(2, sites, failing=failing))
    with locked(run):
        sections = everything(opened(run))
    rows = {row["name"]: row for row in sections["sites"]}
    assert {name: row["state"] for name, row in rows.items()} == {"a": "training", "b": "late", "c": "refused"}
    assert (rows["b"]["reason"], rows["b"]["failed"]) == (failing["b"], 2)
    assert [rows[name]["strip"] for name in sites] == ["uu", "ul", "ur"]
    # Up: two updates of 2000, one and none; down: 1000 each round.
    assert [(rows[name]["up"], rows[name]["down"]) for name in sites] == [(4000, 2000), (2000, 2000), (2000, 2000)]
    # A late site was last seen when it last answered; a refused one has answered.
    assert [rows[name]["seen"] for name in sites] == [2, 1, 2]
    assert rows["a"]["shares"] == {"all": 0.333333}
    assert [one["kind"] for one in sections["failures"]["last"]] == ["refused", "late"]


def test_only_sections_that_changed_are_sent_again(tmp_path):
    run = write_run(tmp_path / "one", 2, done=False)
    state = opened(run)
    _, known = state.sections({})
    sections, known = changed(state, known)
    assert sections == {}
    append(run, line("remark", round=2, client="a", reason="its certificate ends"))
    sections, known = changed(state, known)
    assert set(sections) == {"head", "failures"}
    append(run, *a_round(3))
    sections, _ = changed(state, known)
    assert set(sections) == {"head", "curves", "sites", "timeline"}
    assert sections["curves"]["overall"]["x"] == [0, 1, 2, 3]


def test_phases_add_up_to_the_seconds_of_a_round(tmp_path):
    row = everything(opened(write_run(tmp_path / "one", 1)))["timeline"][1]
    # 2.0 = 0.5 at the longest client + 0.7 of other training + 0.5 of scoring + 0.3 of the rest.
    assert [round(row[part], 6) for part in ("clients", "server", "evaluate", "rest")] == [0.5, 0.7, 0.5, 0.3]


def test_a_run_that_goes_back_is_shown_from_its_beginning(tmp_path):
    run = write_run(tmp_path / "one", 4)
    state = opened(run)
    fresh = run / "new"
    fresh.write_bytes(b"".join([*opening(4), *a_round(0), *a_round(1)]))
    fresh.replace(run / "events.jsonl")
    state.poll()
    head = everything(state)["head"]
    assert (head["round"], head["status"], head["bytes_up"]) == (1, "killed", 4000)


def test_a_run_folder_that_disappears_is_gone_from_the_list_and_says_so_on_its_page(tmp_path):
    run = write_run(tmp_path / "one", 1)
    cards, state = Cards([tmp_path]), opened(run)
    assert len(cards.rows()) == 1
    run.rename(tmp_path.parent / f"{tmp_path.name}-gone")
    assert cards.rows() == []
    state.poll()
    assert everything(state)["head"]["status"] == "gone"
    assert everything(state)["head"]["round"] == 1
    (tmp_path.parent / f"{tmp_path.name}-gone").rename(run)
    state.poll()
    assert everything(state)["head"]["status"] == "done"


def test_what_a_stranger_wrote_is_bounded_and_printable(tmp_path, monkeypatch):
    monkeypatch.setattr(states, "MOST_SITES", 10)
    name = "<img src=x onerror=alert(1)>\u202e"
    tasks = {f"{name}{at}": {"kind": "k" * 1000, "labels": ["<b>"] * 99, "metric": name} for at in range(300)}
    sites = tuple(f"{name}{at}" for at in range(50))
    run = begun(
        tmp_path / "one", opening(tasks=tasks, sites=sites)[0], *a_round(1, sites, failing={sites[0]: "x" * 9999})
    )
    sections = everything(opened(run))
    assert len(sections["sites"]) == 10
    assert len(sections["curves"]["tasks"]) == 200
    assert "\u202e" not in str(sections)
    assert len(sections["failures"]["last"][0]["reason"]) < 1100
    assert sections["sites"][0]["name"].startswith("<img src=x onerror=alert(1)>\\u202e")


def test_names_that_a_stranger_adds_round_by_round_are_bounded(tmp_path):
    lines = opening()
    for at in range(300):
        lines += [
            line("evaluation", round=1, task="mood", metrics={f"m{at}": 0.5}),
            line("evaluation", round=1, task=f"t{at}", metrics={"accuracy": 0.5}),
            line("early_stop", task=f"t{at}", round=1, best_round=1, score=0.5),
            line("baseline", name=f"b{at}", task="mood", metrics={"accuracy": 0.5}, train=1, available=1, examples=1),
        ]
    state = opened(begun(tmp_path / "one", *lines))
    assert state.tail.num_broken == 0
    assert (len(state.series["mood"]), len(state.final)) == (24, 200)
    assert (len(state.stops), len(state.baselines["mood"])) == (200, 200)


def test_a_round_that_is_not_scored_leaves_the_scores_of_the_one_before(tmp_path):
    write_run(tmp_path / "one", 1, done=False)
    (before,) = Cards([tmp_path]).rows()
    append(tmp_path / "one", line("round", round=2, clients=2, bytes_up=1))
    (after,) = Cards([tmp_path]).rows()
    assert after["tasks"] == before["tasks"]
    assert after["tasks"][0]["score"] is not None


def test_an_overall_score_that_became_undefined_is_undefined_on_the_list_and_the_page(tmp_path):
    write_run(tmp_path / "one", 1, done=False)
    append(tmp_path / "one", line("round", round=2, overall=None, classification=None))
    (row,) = Cards([tmp_path]).rows()
    head = everything(opened(tmp_path / "one"))["head"]
    assert summarize(read_events(RunFolder(tmp_path / "one")), "one").overall is None
    assert (row["overall"], head["overall"]) == (None, None)
    assert head["best"]["round"] == 1


def test_a_thinned_curve_has_its_ends_and_its_peaks():
    x = list(range(10_000))
    y = [0.5] * 10_000
    y[4321], y[7777] = 0.9, 0.1
    thin_x, thin_y = thinned(x, y, 100)
    assert len(thin_x) <= 100
    assert (thin_x[0], thin_x[-1]) == (0, 9999)
    assert thin_x == sorted(thin_x)
    assert thin_y[thin_x.index(4321)] == 0.9
    assert thin_y[thin_x.index(7777)] == 0.1
    assert thinned(x[:100], y[:100], 100) == (x[:100], y[:100])


def test_settings_that_differ_from_their_default_are_marked():
    rows = {key: (value, default, same) for key, value, default, same in config_rows(CONFIG)}
    assert rows["training.learning_rate"] == (0.001, 5e-05, False)
    assert rows["tasks.mood.weight"] == (2.0, 1.0, False)
    assert config_rows({"training": {"learning_rate": 5e-05}}) == [("training.learning_rate", 5e-05, 5e-05, True)]
    assert config_rows({"later": {"key": 1}})[0][0] == "later.key"


def test_differences_are_the_settings_that_are_not_the_same_everywhere():
    one, other = {"seed": 1, "mode": "federated", "output": "a"}, {"seed": 2, "mode": "federated", "output": "b"}
    assert differences([one, other]) == [{"key": "seed", "values": ["1", "2"]}]
    assert differences([one, {**one, "early": 5}]) == [{"key": "early", "values": ["(absent)", "5"]}]


def test_compared_runs_come_in_the_order_they_were_named(tmp_path):
    shown = [opened(write_run(tmp_path / name, rounds)) for name, rounds in (("b", 2), ("a", 3))]
    found = comparison(shown)
    assert [run["head"]["name"] for run in found["runs"]] == ["b", "a"]
    assert [run["head"]["round"] for run in found["runs"]] == [2, 3]
    assert found["differences"] == []


def test_the_grid_of_a_study_has_a_cell_for_every_seed(tmp_path):
    cells = tmp_path / "grid" / "cells"
    write_run(cells / "x-seed0", 2)
    write_run(cells / "y-seed1", 1, done=False)
    write_run(cells / "alone", 1)
    (tmp_path / "grid" / "study.yaml").write_text("study: federated\nseeds: [0, 1, 2]\n")
    cards = Cards([tmp_path])
    rows = cards.rows()
    grid = study(cards.studies["0/grid"], rows)
    assert grid["seeds"] == ["0", "1", "2", ""]
    assert {setup["name"]: sorted(setup["cells"]) for setup in grid["setups"]} == {
        "alone": [""],
        "x": ["0"],
        "y": ["1"],
    }
    assert [setup["cells"]["1"]["status"] for setup in grid["setups"] if setup["name"] == "y"] == ["killed"]
    assert grid["options"] == [["study", "federated"], ["seeds", "[0, 1, 2]"]]


@pytest.mark.parametrize("text", ["[", "a: &x [*x]", "- 1", "seeds: 7", "x" * (2 << 20)])
def test_a_study_whose_options_cannot_be_read_is_shown_without_them(tmp_path, text):
    write_run(tmp_path / "grid" / "cells" / "x-seed0", 1)
    (tmp_path / "grid" / "study.yaml").write_text(text)
    cards = Cards([tmp_path])
    rows = cards.rows()
    assert study(cards.studies["0/grid"], rows)["seeds"] == ["0"]
