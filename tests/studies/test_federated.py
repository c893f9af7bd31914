"""Which runs the study of federated against centralized is made of."""

from pathlib import Path

import pytest

from fedmtl.config.file import config_from, load_config
from fedmtl.errors import ConfigError
from fedmtl_studies.federated import FederatedOptions, check_names, plan, read_override, setups
from fedmtl_studies.federated_results import MODES
from fedmtl_studies.folder import open_study
from fedmtl_studies.options import read_rates

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def data(tmp_path):
    """Train files of 6, 4 and 2 rows, and dev files that must not be copied."""
    for task, count in (("sst2", 6), ("qqp", 4), ("stsb", 2)):
        (tmp_path / "data" / task).mkdir(parents=True)
        for name in ("train", "dev"):
            (tmp_path / "data" / task / f"{name}.tsv").write_text("label\n" + "1\n" * count)
    return str(tmp_path / "data")


def cells(tmp_path, **given):
    found = plan(FederatedOptions(**given), open_study(tmp_path, "study"))
    return {cell.name: cell for cell in found.cells}


def test_every_cell_of_the_grid_is_a_config(tmp_path):
    for cell in cells(tmp_path, quick=True).values():
        config_from(dict(cell.settings))


def test_the_base_is_the_preset_in_the_configs(tmp_path, data):
    found = cells(tmp_path, data=data, encoder="prajjwal1/bert-tiny", rows="base-federated")
    settings = dict(found["base-federated-seed0"].settings)
    assert settings.pop("data") == {"root": data, "source": "files"}
    assert config_from({**settings, "defaults": "plain"}) == load_config(CONFIGS / "glue-dual.yaml")


@pytest.mark.parametrize(("preset", "config"), [("tiny", "glue-tiny.yaml"), ("minilm-l6", "glue-minilm.yaml")])
def test_a_presets_federation_is_the_config_of_its_encoder(tmp_path, data, preset, config):
    found = cells(tmp_path, preset=preset, data=data, rows="base-federated")
    settings = dict(found["base-federated-seed0"].settings)
    assert settings.pop("data") == {"root": data, "source": "files"}
    assert settings.pop("evaluation") == {"batch_size": 512}
    assert config_from({**settings, "defaults": "plain"}) == load_config(CONFIGS / config)


def test_every_mode_stands_at_every_point_with_its_data():
    every = setups(FederatedOptions())
    points = {setup.point.name: setup.point for setup in every.values()}
    assert list(points) == [
        "base", "long", "dirichlet-5", "dirichlet-0.5", "dirichlet-0.2", "samples-300", "samples-1000", "clients-1",
        "original",
    ]  # fmt: skip
    for name in set(points) - {"long"}:
        assert {f"{name}-{mode}" for mode in MODES} <= set(every)
    assert (points["original"].samples, points["original"].clients, points["original"].rounds) == (300, 1, 30)
    assert points["long"].rounds == 30


def test_data_in_one_place_is_not_run_again_for_another_way_to_deal_it():
    every = setups(FederatedOptions())
    assert every["dirichlet-0.5-centralized"].cell == "base-centralized"
    assert every["clients-1-centralized-single-task"].cell == "base-centralized-single-task"
    # other examples, or others rounds, are another run
    assert every["samples-300-centralized"].cell == "samples-300-centralized"
    assert every["original-centralized"].cell == "original-centralized"
    assert every["dirichlet-0.5-local"].cell == "dirichlet-0.5-local"


def test_a_row_brings_the_cell_it_shares(tmp_path):
    found = cells(tmp_path, quick=True, rows="dirichlet-5-*", seeds=(0, 1), seed_rows="*-centralized")
    assert "base-centralized-seed1" in found
    assert "dirichlet-5-local-seed1" not in found
    assert sorted(name for name in found if name.startswith("base")) == [
        "base-centralized-seed0", "base-centralized-seed1", "base-centralized-single-task-seed0",
    ]  # fmt: skip


def test_samples_are_per_client_and_never_more_than_there_are(tmp_path, data):
    found = cells(tmp_path, data=data, samples=(1,), rows="samples-1-*,original-federated")
    tasks = found["samples-1-local-seed0"].settings["tasks"]
    # three clients with one sample each; stsb has two in all
    assert {task: about["train_samples"] for task, about in tasks.items()} == {"sst2": 3, "qqp": 3, "stsb": 2}
    assert found["original-federated-seed0"].settings["tasks"]["sst2"]["train_samples"] == 1


def test_the_first_points_come_first_with_all_their_seeds(tmp_path):
    order = list(cells(tmp_path, quick=True, seeds=(0, 1)))
    last_needed = max(order.index(f"{name}-seed1") for name in ("base-local", "long-federated", "dirichlet-0.5-local"))
    others = ("base-federated-prox", "samples-20-federated", "clients-1-local", "original-local")
    assert last_needed < min(order.index(f"{name}-seed0") for name in others)
    assert order.index("original-local-seed0") < order.index("base-federated-prox-seed1")
    variants = [name for name in order if "-prox-" in name or "-fedadam-" in name]
    assert order.index("clients-1-local-seed1") < min(map(order.index, variants))
    assert order[:2] == ["long-federated-seed0", "long-federated-seed1"]


def test_a_rate_is_given_by_mode_or_by_setup_and_the_last_counts(tmp_path):
    rates = read_rates("federated*=4e-4, centralized_single_task=2e-4,samples-20-federated=1e-2", "--rate")
    found = cells(tmp_path, quick=True, rates=rates)
    rate = {name: cell.settings["training"]["learning_rate"] for name, cell in found.items()}
    assert rate["base-federated-seed0"] == rate["long-federated-prox-seed0"] == 4e-4
    assert rate["base-centralized-single-task-seed0"] == 2e-4
    assert rate["samples-20-federated-seed0"] == 1e-2
    # the miniature's own
    assert rate["base-local-seed0"] == 1e-3


def test_rates_are_tried_without_the_dev_sets(tmp_path, data):
    found = cells(tmp_path, data=data, choose=(1e-4, 4e-4), rows="*-local,*-centralized")
    assert list(found) == [
        "rate-0.0001-centralized-seed0", "rate-0.0001-local-seed0", "rate-0.0004-centralized-seed0",
        "rate-0.0004-local-seed0",
    ]  # fmt: skip
    settings = found["rate-0.0004-local-seed0"].settings
    assert settings["training"]["learning_rate"] == 4e-4
    root = Path(settings["data"]["root"])
    assert sorted(str(path.relative_to(root)) for path in root.rglob("*.tsv")) == [
        "qqp/train.tsv", "sst2/train.tsv", "stsb/train.tsv",
    ]  # fmt: skip


@pytest.mark.parametrize(("preset", "layers"), [("tiny", "encoder.layer.1.*"), ("minilm-l6", "encoder.layer.[345].*")])
def test_a_preset_gives_a_federation_layers_by_task_and_one_place_all_shared(tmp_path, data, preset, layers):
    found = cells(tmp_path, preset=preset, data=data, encoder="tiny")
    assert sum(name.startswith("base-federated-seed") for name in found) == 3
    rules = {name: cell.settings["sharing"]["rules"] for name, cell in found.items()}
    shared = [{"heads.*": "task"}, {"*": "all"}]
    assert rules["base-centralized-seed2"] == rules["base-centralized-single-task-seed0"] == shared
    assert rules["base-federated-seed0"] == rules["long-federated-seed1"] == [shared[0], {layers: "task"}, shared[1]]
    skewed, even = (found[f"{point}-federated-seed0"].settings["training"] for point in ("dirichlet-0.5", "base"))
    assert (skewed["logit_adjustment"], even.get("logit_adjustment")) == (1, None)
    assert (
        skewed["learning_rate"]
        == even["learning_rate"]
        > found["base-local-seed0"].settings["training"]["learning_rate"]
    )
    for cell in found.values():
        config_from({**cell.settings, "output": "runs"})


def test_what_is_given_goes_over_a_preset(tmp_path, data):
    found = cells(
        tmp_path, preset="tiny", data=data, seeds=(7,), rates=(("local", 1.0),), overrides=("tasks.stsb.weight=5",)
    )
    assert found["base-local-seed7"].settings["training"]["learning_rate"] == 1.0
    assert found["base-federated-seed7"].settings["tasks"]["stsb"]["weight"] == 5
    # of a setup's own
    assert found["long-federated-seed7"].settings["tasks"]["stsb"]["weight"] == 3
    with pytest.raises(ConfigError, match="--preset tiny: --quick has settings of its own"):
        FederatedOptions(preset="tiny", quick=True)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"rates": (("federation", 1e-4),)},
            "--rate: no setup and no kind fits federation; there are base-centralized,",
        ),
        (
            {"own_overrides": (read_override("centralised*:seed=1"),)},
            r"--set-for: no setup and no kind fits centralised\*",
        ),
    ],
)
def test_a_name_that_fits_nothing_is_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        check_names(FederatedOptions(quick=True, **given))


@pytest.mark.parametrize("preset", [None, "tiny", "minilm-l6"])
def test_names_that_fit_are_not(preset):
    rates = read_rates("centralized_single_task=1,base-*=2", "--rate")
    check_names(FederatedOptions(preset=preset, choose=(1e-4,), rates=rates))


def test_settings_of_some_modes_go_over_all_else(tmp_path):
    own = (read_override("federated-prox:training.proximal=1"), read_override("federated*:federation.average=weighted"))
    found = cells(tmp_path, quick=True, own_overrides=own)
    settings = {name.removesuffix("-seed0"): cell.settings for name, cell in found.items()}
    assert settings["long-federated-prox"]["training"]["proximal"] == 1
    assert "proximal" not in settings["base-federated"]["training"]
    assert settings["base-federated"]["federation"]["aggregation"]["average"] == "weighted"
    assert settings["base-centralized"]["federation"]["aggregation"]["average"] == "tasks"
    with pytest.raises(ConfigError, match=r"--set-for training\.proximal=1: write"):
        read_override("training.proximal=1")


OWN = """
model: {server_model: random-1x32}
data: {source: embedded}
tasks:
  sentiment: {train_samples: 16, val_samples: 8}
  similarity: {train_samples: 12, val_samples: 8, metric: spearman}
clients: {a: {tasks: [sentiment]}, b: {tasks: [sentiment, similarity]}}
training: {num_rounds: 3, learning_rate: 0.002}
compute: {device: cpu, workers: 0}
"""


@pytest.fixture
def own(tmp_path):
    """A user's config: two tasks and two named clients."""
    (tmp_path / "own.yaml").write_text(OWN)
    return str(tmp_path / "own.yaml")


def test_a_users_config_is_run_as_it_is_in_every_mode(tmp_path, own):
    found = cells(tmp_path, config=own, rates=(("centralized*", 1e-4),))
    assert [name.removesuffix("-seed0") for name in found] == [f"base-{mode}" for mode in MODES]
    given = load_config(Path(own))
    rates = {}
    for cell in found.values():
        config = config_from(dict(cell.settings))
        assert (config.tasks, config.clients, config.data) == (given.tasks, given.clients, given.data)
        assert config.training.num_rounds == 3
        rates[config.mode] = config.training.learning_rate
    assert rates["federated"] == rates["local"] == 0.002
    assert rates["centralized"] == rates["centralized_single_task"] == 1e-4
    (fewer, *_) = cells(tmp_path, config=own, rounds=2).values()
    assert fewer.settings["training"]["num_rounds"] == 2


def test_a_config_stands_alone(tmp_path, own):
    assert FederatedOptions(config=own).folder_name == "federated-own"
    for given, flag in (
        ({"quick": True}, "--quick"),
        ({"encoder": "tiny"}, "--encoder"),
        ({"choose": (1.0,)}, "--choose"),
    ):
        with pytest.raises(ConfigError, match=f"--config: found {flag} beside it"):
            FederatedOptions(config=own, **given)
    (tmp_path / "none.yaml").write_text("tasks: {}\n")
    with pytest.raises(ConfigError, match="tasks"):
        FederatedOptions(config=str(tmp_path / "none.yaml"))
