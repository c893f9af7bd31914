import re
import shutil

import pytest
import yaml

from fedmtl.errors import FedmtlError
from fedmtl.export.card import NOT_STATED, encoder_licence, model_card
from fedmtl.runs.events import EvaluationEvent
from fedmtl.runs.folder import RunFolder
from fedmtl.runs.log import read_events
from fedmtl.runs.summary import TestScore, note_test_scores


def front_matter(card):
    _, front, body = card.split("---\n", 2)
    return yaml.safe_load(front), body


def test_a_card_has_the_runs_tasks_scores_counts_plan_and_usage(run_once):
    run = run_once()
    front, body = front_matter(model_card(run, "five lines"))
    assert front["library_name"] == "transformers"
    assert "fedmtl" in front["tags"]
    scored = {
        event.task: event for event in read_events(run) if isinstance(event, EvaluationEvent) and event.round == 2
    }
    for task in ("sentiment", "paraphrase", "similarity"):
        metric, value = next((name, value) for name, value in scored[task].metrics.items() if value is not None)
        row = next(line for line in body.splitlines() if line.startswith(f"| `{task}` | validation"))
        assert f"| 24 | 2 | {metric} {value:.4f}" in row
        assert re.search(rf"\| `{task}` \| 40 \| 2 \| 24 \|", body)
    for words in ("## Use\n\nfive lines", "`heads.*`: task", "No noise was added", "no encoder whose licence applies"):
        assert words in body
    assert "client_1" not in body


def test_the_scores_are_of_the_round_that_is_named(run_once):
    body = front_matter(model_card(run_once(), "", round=1))[1]
    assert re.search(r"\| `sentiment` \| validation \| 24 \| 1 \|", body)


def test_scores_on_a_test_set_are_those_that_evaluate_left_of_the_models_round(run_once, tmp_path):
    run = RunFolder(shutil.copytree(run_once().path, tmp_path / "copy"))
    assert "no scores on a test set (`fedmtl evaluate RUN --test` adds them)" in model_card(run, "")
    scores = [
        TestScore(set="sentiment", round=at, examples=30, metrics={"accuracy": at / 4, "f1": None}) for at in (1, 2)
    ]
    note_test_scores(run, scores)
    note_test_scores(run, [scores[1].model_copy(update={"examples": 31})])
    body = model_card(run, "")
    assert "| `sentiment` | test | 31 | 2 | accuracy 0.5000 |" in body
    assert "| `sentiment` | test | 30 |" not in body
    assert "| `sentiment` | test | 30 | 1 | accuracy 0.2500 |" in model_card(run, "", round=1)
    run.test_scores.write_text('{"scores": [{"set": 1}]}')
    with pytest.raises(FedmtlError, match=r"test-scores\.json: .*remove it"):
        model_card(run, "")


def test_an_encoders_licence_is_read_from_its_card_or_not_stated(tmp_path):
    assert encoder_licence("tiny") == "apache-2.0"
    for text, licence in {
        "---\nlicense: mit\n---\nwords": "mit",
        "license: mit": NOT_STATED,
        "---\nlicense: [mit]\n---\n": NOT_STATED,
        "---\nlicense: '](http://x)'\n---\n": NOT_STATED,
        "---\nlicense: {{\n---\n": NOT_STATED,
    }.items():
        (tmp_path / "README.md").write_text(text)
        assert encoder_licence(str(tmp_path)) == licence
    assert encoder_licence(str(tmp_path / "none")) == NOT_STATED
