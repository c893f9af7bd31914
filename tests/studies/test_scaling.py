"""The grid's cells differ in nothing but what they are about, and come in the order in which they say most."""

import gzip

import pytest

from fedmtl.config.file import config_from
from fedmtl_studies.scaling import ScalingOptions, make_cells, scored_file
from fedmtl_studies.scaling_results import Setup


def cells(**given):
    return {cell.name: config_from(dict(cell.settings)) for cell in make_cells(ScalingOptions(quick=True, **given))}


def test_cells_differ_in_their_clients_and_rounds_alone():
    # the baseline needs no more than the fixed rounds; the others may try as long as the threshold
    made = cells(tasks=("sentiment",), clients=(1, 4), rounds=3, threshold_rounds=5)
    one, four = made["tiny-sentiment-1-seed0"], made["tiny-sentiment-4-seed0"]
    assert (one.federation.clients_per_task, four.federation.clients_per_task) == (1, 4)
    assert (one.training.num_rounds, four.training.num_rounds) == (3, 5)
    assert one.training.model_copy(update={"num_rounds": 5}) == four.training
    assert one.tasks == four.tasks
    assert one.model == four.model
    random = made["random-tiny-sentiment-4-seed0"]
    assert random.model == four.model.model_copy(update={"initial": "random"})


def test_no_rate_depends_on_the_number_of_rounds():
    # else the accuracy on the way to the threshold would not be that of a shorter run
    assert cells(overrides=("training.schedule=linear",))["tiny-sentiment-2-seed0"].training.schedule == "constant"


def test_baselines_come_first_then_most_clients_of_the_first_seed():
    names = list(cells(tasks=("sentiment",), encoders=("tiny",), clients=(1, 2, 32), seeds=(0, 1)))
    assert names == [f"tiny-sentiment-{count}-seed{seed}" for seed in (0, 1) for count in (1, 32, 2)]


def test_rows_and_seeds_can_be_named():
    some = cells(rows="tiny-*", seeds=(0, 1), seed_rows="*-32", clients=(1, 32), tasks=("sentiment",))
    assert list(some) == ["tiny-sentiment-1-seed0", "tiny-sentiment-32-seed0", "tiny-sentiment-32-seed1"]


def test_overrides_change_what_all_have_in_common():
    made = cells(overrides=("model.pool=cls", "tasks.sentiment.class_weights=balanced"), partition="dirichlet:0.3")
    one = made["tiny-sentiment-8-seed0"]
    assert (one.model.pool, one.partition.kind, one.partition.alpha) == ("cls", "dirichlet", 0.3)
    assert (one.tasks["sentiment"].class_weights, one.tasks["sentiment"].train_samples) == ("balanced", 128)


@pytest.fixture
def data(tmp_path):
    for name in ("imdb/train", "imdb/test", "sst2/train", "sst2/dev", "sst2/test", "yelp/train"):
        path = tmp_path / f"{name}.tsv.gz"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(b"sentence\tlabel\ngood\t1\n"))
    return tmp_path


def test_official_rows_score_unless_settings_are_to_be_chosen(data):
    def scored(score_on):
        tasks = ("imdb", "sst2", "yelp")
        options = ScalingOptions(data=str(data), tasks=tasks, score_on=score_on)
        made = {cell.name: config_from(dict(cell.settings)) for cell in make_cells(options)}
        sources = {task: made[f"tiny-{task}-2-seed0"].tasks[task].source for task in tasks}
        assert {task: source.train for task, source in sources.items()} == {
            task: str(data / f"{task}/train.tsv.gz") for task in tasks
        }
        return {task: scored_file(options, task) for task in tasks}, {t: s.validation for t, s in sources.items()}

    files, told = scored("official")
    assert files == {"imdb": data / "imdb/test.tsv.gz", "sst2": data / "sst2/dev.tsv.gz", "yelp": None}
    assert told == {task: None if file is None else str(file) for task, file in files.items()}
    files, told = scored("train")
    assert set(files.values()) == set(told.values()) == {None}


def test_the_hubs_test_rows_score_where_it_has_no_validation_rows():
    def source(task, **given):
        made = make_cells(ScalingOptions(tasks=(task,), rounds=1, **given))
        return config_from(dict(made[0].settings)).tasks[task]

    imdb = source("imdb")
    assert (imdb.source.hub, imdb.source.validation_split, imdb.source.scores_test) == (
        "stanfordnlp/imdb",
        "test",
        True,
    )
    # A source has the dataset's names for its columns.
    assert (imdb.text, imdb.label) == (["text"], "label")
    # sst5 has validation rows, glue's test labels are not public, and settings are not chosen by test rows.
    assert source("sst5").source is source("cola").source is source("imdb", score_on="train").source is None


def test_a_setup_names_its_cells_and_its_baseline():
    setup = Setup("random:minilm-l6", "imdb", 8)
    assert setup.cell(1) == "random-minilm-l6-imdb-8-seed1"
    assert setup.baseline == Setup("random:minilm-l6", "imdb", 1)
