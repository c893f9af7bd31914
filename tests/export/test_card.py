import re

import yaml

from fedmtl.export.card import NOT_STATED, encoder_licence, model_card
from fedmtl.runs.events import EvaluationEvent
from fedmtl.runs.log import read_events


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
