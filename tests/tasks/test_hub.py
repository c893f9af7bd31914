import builtins
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from urllib.error import HTTPError

import pytest

from fedmtl.config import SourceConfig
from fedmtl.errors import DataError
from fedmtl.tasks import load as hub
from fedmtl.tasks.load import read_hub

SST2 = SourceConfig.model_validate({"hub": "nyu-mll/glue", "subset": "sst2"})


@pytest.fixture
def datasets(monkeypatch):
    monkeypatch.setattr(hub, "hub_answers", lambda: True)
    return pytest.importorskip("datasets")


def test_class_labels_stay_numbers(datasets, monkeypatch):
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        label = datasets.ClassLabel(names=["negative", "positive"])
        features = datasets.Features({"sentence": datasets.Value("string"), "label": label})
        return datasets.Dataset.from_dict({"sentence": ["bad", "good"], "label": [0, 1]}, features=features)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    table = read_hub(SST2, "train")
    assert asked == [(("nyu-mll/glue", "sst2"), {"split": "train"})]
    assert table.columns == {"sentence": ["bad", "good"], "label": ["0", "1"]}
    assert table.location(0) == "hub nyu-mll/glue/sst2 train, row 1"


def test_hub_out_of_reach_is_one_line_that_names_the_file_options(datasets, monkeypatch):
    def load_dataset(*args, **kwargs):
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError) as error:
        read_hub(SST2, "train", task="sst2")
    assert str(error.value) == (
        "hub nyu-mll/glue/sst2 train: cannot be loaded (no route); use files: `data.root=FOLDER` "
        "for a built-in task or `tasks.sst2.source.train: FILE`"
    )


def test_offline_switches_are_set_only_while_reading(datasets, monkeypatch):
    from huggingface_hub import constants

    seen = []

    def load_dataset(*args, **kwargs):
        seen.append((datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE))
        return SimpleNamespace(to_dict=lambda: {"a": [1]})

    for switch in (datasets.config, constants):
        monkeypatch.setattr(switch, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(hub, "hub_answers", lambda: False)
    read_hub(SST2, "train")
    monkeypatch.setattr(hub, "hub_answers", lambda: True)
    read_hub(SST2, "train")
    assert seen == [(True, True), (False, False)]
    assert not datasets.config.HF_HUB_OFFLINE


def test_missing_package_is_named(monkeypatch):
    real = builtins.__import__

    def without_datasets(name, *args, **kwargs):
        if name == "datasets":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_datasets)
    with pytest.raises(DataError, match=r"needs datasets, .*'\.\[hub\]'"):
        read_hub(SST2, "train")


def test_offline_fails_fast_in_the_real_library(tmp_path):
    pytest.importorskip("datasets")
    script = (
        "from fedmtl.tasks.load import SourceConfig, read_hub\n"
        "read_hub(SourceConfig.model_validate({'hub': 'nyu-mll/glue', 'subset': 'sst2'}), 'train')\n"
    )
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=offline, capture_output=True, text=True, timeout=60, check=False
    )
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("fedmtl.errors.HubUnreachable: hub nyu-mll/glue/sst2 train: cannot be loaded")
    assert "data.root=FOLDER" in last


def test_a_silent_name_server_is_waited_for_no_longer_than_the_limit(monkeypatch):
    over = threading.Event()
    monkeypatch.setattr(hub, "SECONDS_TO_ANSWER", 0.05)
    monkeypatch.setattr(hub, "_connects", lambda: over.wait(20))
    hub.hub_answers.cache_clear()
    began = time.monotonic()
    try:
        assert not hub.hub_answers()
        assert time.monotonic() - began < 5
    finally:
        over.set()
        hub.hub_answers.cache_clear()


def test_behind_a_proxy_the_proxy_says_whether_the_hub_is_there(monkeypatch):
    def refuse(request, timeout):
        raise HTTPError(request.full_url, code, "", {}, None)

    monkeypatch.setattr(hub, "getproxies", lambda: {"https": "http://127.0.0.1:1"})
    monkeypatch.setattr(hub, "urlopen", refuse)
    code = 502
    assert not hub._connects()
    code = 401
    assert hub._connects()
