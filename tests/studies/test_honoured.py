"""What `--set` may change reaches the cells of a study: tried with every key of the schema that it honours."""

import pytest

from fedmtl.config.honoured import config_keys
from fedmtl.errors import ConfigError
from fedmtl_studies import compression, federated, multitask, privacy, scaling
from fedmtl_studies.folder import open_study
from fedmtl_studies.study import run_study

STUDIES = {
    compression: ("sst2", {"tables": (1, 2, 3), "tasks": ("sst2",)}),
    federated: ("sentiment", {}),
    multitask: ("sst5", {"steps": 24, "tables": (1, 2, 3, 4, 5, 6, 7), "cfimdb": False}),
    privacy: ("sentiment", {}),
    scaling: ("sentiment", {"tasks": ("sentiment",), "rates": (("*", 0.1),)}),
}
# A number wherever a study computes with it, and no value that any of them has by itself.
VALUE = 7919
# Every row has a share of it, or it is read before the cells are made.
OTHERWISE = {
    multitask: ("training.local_steps", "training.learning_rate", "data.root"),
    compression: ("model.server_model",),
}


def reached(settings, path):
    """Whether a config as a cell has it holds the value at a path."""
    for part in path:
        if not isinstance(settings, dict) or part not in settings:
            return False
        settings = settings[part]
    return settings == VALUE


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.STUDY.name)
def test_every_key_that_a_study_honours_reaches_a_cell(study, tmp_path):
    task, given = STUDIES[study]
    skipped = (*OTHERWISE.get(study, ()), "clients.*.source.*")
    # A key that may be a section or a word is tried as the section, such as `tasks.*.head.hidden`.
    skipped += tuple(key for key in config_keys() if any(other.startswith(f"{key}.") for other in config_keys()))
    honoured = [key for key in config_keys() if study.HONOURS.remedy(key) is None and key not in skipped]
    paths = [tuple(task if part == "*" else part for part in key.split(".")) for key in honoured]
    overrides = tuple(f"{'.'.join(path)}={VALUE}" for path in paths)
    options = study.STUDY.options(quick=True, overrides=overrides, **given)
    cells = study.STUDY.plan(options, open_study(tmp_path, "study")).cells
    configs = [cell.settings for cell in cells if isinstance(cell.settings, dict)]
    assert [key for key, path in zip(honoured, paths, strict=True) if not any(reached(c, path) for c in configs)] == []


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.STUDY.name)
def test_a_study_refuses_a_key_that_all_its_cells_replace(study, tmp_path):
    _, given = STUDIES[study]
    options = study.STUDY.options(quick=True, overrides=("seed=3",), **given)
    with pytest.raises(ConfigError, match=f"^--set seed: `fedmtl study {study.STUDY.name}` .*; write --seeds$"):
        run_study(study.STUDY, options, open_study(tmp_path, "study"))
