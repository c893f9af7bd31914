"""A plug-in's filter in a deployment: installed at the server and at every site, and named in the sites' policies."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path

import pytest

from engines.flower.deployment import of_kind
from engines.flower.processes import Programs, free_port
from fedmtl import capabilities
from fedmtl.config.file import dump_config
from fedmtl.experiment.run import start_run
from fedmtl.runs.folder import RunFolder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="counts processes in /proc"),
]

PLUGINS = Path(__file__).parents[2] / "examples" / "plugins"


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Programs that find the plug-in by an entry point, as if its package were installed."""
    package = tmp_path / "package"
    (package / "update_noise-1.0.dist-info").mkdir(parents=True)
    (package / "update_noise-1.0.dist-info" / "METADATA").write_text("Name: update_noise\nVersion: 1.0\n")
    entry = "[fedmtl]\nupdate_noise = noise_package:CAPABILITY\n"
    (package / "update_noise-1.0.dist-info" / "entry_points.txt").write_text(entry)
    lines = ("import update_noise", "from fedmtl.capabilities import find", "CAPABILITY = find('update_noise')")
    (package / "noise_package.py").write_text("\n".join(lines))
    paths = [str(package), str(PLUGINS), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    started = Programs(tmp_path)
    yield started
    started.end()


def test_a_site_filters_its_update_as_a_client_of_one_machine_does(make_config, programs, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(PLUGINS))
    monkeypatch.setattr(capabilities, "_REGISTERED", {})
    sys.modules.pop("update_noise", None)
    import_module("update_noise")
    # One site with all tasks: every process takes seconds to start.
    only = ("clients={site: {tasks: [sentiment, paraphrase, similarity]}}", "training.num_rounds=1")
    config = make_config(*only, "methods={update_noise: {max_norm: 0.05, noise: 0.001}}")
    (tmp_path / "run.yaml").write_text(dump_config(config))
    (tmp_path / "policy.yaml").write_text("methods: [update_noise]\n")
    at = f"127.0.0.1:{free_port()}"
    server = programs.start("server", "server", "--config", "run.yaml", "--listen", at, "--name", "deployed")
    tasks = "sentiment,paraphrase,similarity"
    site = programs.start("site", "client", "--client-id", "site", "--tasks", tasks, "--policy", "policy.yaml",
                          "--server", at)  # fmt: skip
    alone = start_run(config, "alone")
    plain = start_run(make_config(*only), "plain")
    assert server.wait() == 0, server.text()
    assert site.wait() == 0, site.text()
    ends = [of_kind(run, "end")[0] for run in (RunFolder(Path(config.output) / "deployed"), alone, plain)]
    assert ends[0]["weights_sha256"] == ends[1]["weights_sha256"] != ends[2]["weights_sha256"]
