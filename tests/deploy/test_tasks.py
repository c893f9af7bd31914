"""What a server without the text knows of its tasks, and when a site trains which."""

from __future__ import annotations

import pytest

from fedmtl.config.file import load_config
from fedmtl.deploy.tasks import AT_SITES, check_deployable, scheduled_tasks, server_config, server_data
from fedmtl.errors import ConfigError

OWN = "tasks.complaints={kind: classification, text: [message], label: topic, labels: [billing, other]}"


def test_a_task_without_a_source_is_scored_at_the_sites():
    config = server_config(load_config(None, [OWN]))
    assert config.evaluation.where == "clients"
    part = server_data(config)["complaints"]
    assert (part.task.labels, part.origin, len(part.train), len(part.validation)) == (
        ("billing", "other"),
        AT_SITES,
        0,
        0,
    )


def test_a_server_that_should_score_what_it_does_not_have_says_so():
    with pytest.raises(ConfigError, match=r"evaluation\.where: found server, which has no examples of complaints"):
        server_config(load_config(None, [OWN, "evaluation.where=server"]))


def test_labels_are_named_where_no_example_shows_them():
    config = server_config(load_config(None, [OWN.replace(", labels: [billing, other]", "")]))
    with pytest.raises(ConfigError, match=r"tasks\.complaints\.labels: found nothing, and the server has no examples"):
        server_data(config)


def test_a_server_keeps_validation_and_no_training_examples():
    part = server_data(server_config(load_config(None, ["tasks.sentiment={val_samples: 30}"])))["sentiment"]
    assert (len(part.train), len(part.validation)) == (0, 30)


def test_centralized_runs_are_not_deployed():
    with pytest.raises(ConfigError, match="mode: found centralized"):
        check_deployable(load_config(None, ["mode=centralized", "tasks.sentiment={}"]))


def test_a_site_trains_what_it_brought_unless_the_config_says_otherwise():
    overrides = [
        "tasks={sentiment: {}, paraphrase: {from_round: 3}, similarity: {}}",
        "clients={a: {tasks: [sentiment, paraphrase], until_round: 5}, b: {tasks: [similarity]}}",
    ]
    config = load_config(None, overrides)
    both = ("paraphrase", "sentiment")
    assert scheduled_tasks(config, "a", both, 1) == ("sentiment",)
    assert scheduled_tasks(config, "a", both, 3) == ("sentiment", "paraphrase")
    assert scheduled_tasks(config, "a", both, 6) == ()
    assert scheduled_tasks(config, "a", ("sentiment",), 3) == ("sentiment",)
    # What it is enrolled for beyond the config has no schedule of its own.
    assert scheduled_tasks(config, "a", ("similarity",), 1) == ("similarity",)
    assert scheduled_tasks(config, "stranger", ("similarity",), 1) == ("similarity",)
