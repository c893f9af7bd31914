"""A site whose server's config names a teacher asks it itself, where its texts are, or says why it cannot."""

from __future__ import annotations

import numpy as np
import pytest

from fedmtl.deploy.server import _for_sites
from fedmtl.deploy.site_client import _open
from fedmtl.deploy.site_worker import SiteSettings
from fedmtl.deploy.terms import server_terms
from fedmtl.errors import ConfigError, PolicyError
from fedmtl.experiment.prepare import prepare
from fedmtl.experiment.run import start_run
from fedmtl.federation.handshake import Welcome
from fedmtl.federation.policy import Policy


def opened(config, folder, teacher=None):
    """What a site makes of the server's welcome, without a line between them."""
    plain = config.model_copy(update={"training": config.training.model_copy(update={"distillation": None})})
    prepared = prepare(plain)
    terms = server_terms(prepared.model, prepared.encoder.tokenizer, prepared.tasks)
    welcome = Welcome(run="1f", config=_for_sites(config), evaluated=False, max_bytes=1 << 30, terms=terms)
    policy = Policy(teacher=None if teacher is None else str(teacher))
    place = folder / "kept"
    settings = SiteSettings("sentiment_client_1", ("sentiment",), place, folder / "spool", device="cpu", policy=policy)
    return _open("", welcome, settings)


def test_a_site_has_the_outputs_that_the_run_on_one_machine_has(make_config, tmp_path):
    teacher = start_run(make_config("training.num_rounds=0"), "teacher")
    config = make_config(f"training.distillation={{teacher: {teacher.path}}}")
    elsewhere = config.training.distillation.model_copy(update={"teacher": "/where/the/server/has/it"})
    told = config.model_copy(update={"training": config.training.model_copy(update={"distillation": elsewhere})})
    theirs = prepare(config).population.train["sentiment_client_1"]["sentiment"]
    ours = opened(told, tmp_path, teacher.path).site.train_shard("sentiment_client_1", "sentiment")
    assert np.array_equal(ours.indices, theirs.indices)
    assert np.array_equal(ours.teacher_outputs(ours.indices), theirs.teacher_outputs(theirs.indices))


def test_a_site_that_cannot_reach_the_teacher_says_so(make_config, tmp_path):
    config = make_config(f"training.distillation={{teacher: {tmp_path / 'away'}}}")
    with pytest.raises(ConfigError, match=r"distillation.teacher: .*away holds no finished model on this machine"):
        opened(config, tmp_path, tmp_path / "away")


def test_a_site_opens_no_teacher_that_only_the_server_names(make_config, tmp_path):
    teacher = start_run(make_config("training.num_rounds=0"), "teacher")
    with pytest.raises(PolicyError, match="name its folder under teacher in the policy") as caught:
        opened(make_config(f"training.distillation={{teacher: {teacher.path}}}"), tmp_path)
    assert caught.value.code == "policy_teacher"


def test_a_teacher_at_the_server_is_no_business_of_sites(make_config, tmp_path):
    told = f"{{teacher: {tmp_path / 'away'}, where: server, texts: [{tmp_path / 'away.txt'}]}}"
    config = make_config(f"training.distillation={told}")
    assert _for_sites(config)["training"]["distillation"] is None
    assert opened(config, tmp_path).site.train_shard("sentiment_client_1", "sentiment").teacher is None
