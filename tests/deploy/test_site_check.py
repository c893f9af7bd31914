"""A site's look at its files before it joins: what its terminal and its record get, and when it does not start."""

import pytest

from fedmtl.deploy.site_check import check_files
from fedmtl.deploy.site_worker import SiteSettings, start_site
from fedmtl.engines.flower.audit import Audit, entries, verify
from fedmtl.engines.processes import WorkerPool
from fedmtl.errors import PolicyError
from fedmtl.federation.policy import Policy, policy_text, read_policy

ROWS = ["privateword jane.doe@example.org\tgood", "privateword two\tbad", "privateword three\tgood", "a fourth\tbad"]


@pytest.fixture
def look(tmp_path):
    """Check a site of these lines, and return what it said."""

    def run(rows=ROWS, header="text\tlabel", **policy):
        (tmp_path / "notes.tsv").write_text("\n".join([header, *rows]) + "\n")
        files = {"notes": str(tmp_path / "notes.tsv")}
        rules = Policy.model_validate(policy)
        settings = SiteSettings("a", ("notes",), tmp_path, tmp_path / "spool", files, policy=rules)
        said = []
        check_files(WorkerPool(start_site, settings, 0), settings, said.append, Audit(tmp_path))
        return said

    return run


def test_what_is_found_is_said_and_recorded_without_a_word_of_the_data(look, tmp_path):
    said = look()
    assert said == [
        "warning: notes, train: 1 example has what looks like personal data (1 e-mail addresses)",
    ]
    (entry,) = entries(tmp_path)
    assert (entry["way"], entry["kind"], entry["decision"]) == ("here", "check", "accepted")
    assert (entry["rows"], entry["personal"], entry["warnings"]) == (4, 1, 1)
    assert "privatew" not in (tmp_path / "audit.jsonl").read_text() + " ".join(said)
    assert verify(tmp_path).broken is None


def test_a_policy_can_forbid_personal_data(look, tmp_path):
    with pytest.raises(PolicyError, match="1 examples here have what looks like personal data, the policy allows 0"):
        look(max_personal_data=0)
    (entry,) = entries(tmp_path)
    assert entry["decision"] == "refused"
    assert look(max_personal_data=1)


def test_columns_that_the_policy_does_not_name_count_only_where_it_names_none(look):
    rows = [f"words of {number}\tx@example.org\t{'good' if number % 2 else 'bad'}" for number in range(8)]
    named = {"notes": {"text": ["text"], "label": "label"}}
    assert look(rows, "text\tsender\tlabel", max_personal_data=0, tasks=named) == []
    with pytest.raises(PolicyError, match="8 examples here"):
        look(rows, "text\tsender\tlabel", max_personal_data=0)


def test_a_file_that_cannot_be_read_is_left_to_the_run_unless_the_policy_limits_personal_data(look, tmp_path):
    (said,) = look([*ROWS, "privateword"])
    assert said.startswith("the files could not be checked: ")
    assert "line 6: has 1 values" in said
    assert "privatew" not in said
    with pytest.raises(PolicyError, match="the policy limits personal data"):
        look([*ROWS, "privateword"], max_personal_data=0)


def test_files_over_which_the_look_itself_fails_are_such_files_too(look, tmp_path, monkeypatch):
    def fails(parts):
        raise RecursionError("too deep")

    monkeypatch.setattr("fedmtl.tasks.check.check_parts", fails)
    (said,) = look()
    assert said.startswith("the files could not be checked: RecursionError: too deep")
    (entry,) = entries(tmp_path)
    assert entry["decision"] == "unreadable"
    with pytest.raises(PolicyError, match="the policy limits personal data"):
        look(max_personal_data=0)


def test_the_key_is_in_the_policy_file_and_in_its_words(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text(policy_text(Policy.model_validate({"max_personal_data": 0})))
    assert read_policy(path).max_personal_data == 0
    assert "at most 0 examples with what looks like personal data" in read_policy(path).words()
    assert Policy().max_personal_data is None


@pytest.mark.parametrize("name", ["dev.tsv", "dev_matched.tsv", "validation_mismatched.csv"])
def test_every_file_that_scores_a_task_is_looked_over(tmp_path, name):
    folder = tmp_path / "root/mnli"
    folder.mkdir(parents=True)
    for file in ("train.tsv", name):
        separator = "," if file.endswith(".csv") else "\t"
        address = "jane.doe@example.org" if file == name else "nobody"
        lines = [
            ("sentence1", "sentence2", "label"),
            (f"write to {address}", "now", "neutral"),
            ("a", "b", "entailment"),
        ]
        (folder / file).write_text("\n".join(map(separator.join, lines)) + "\n")
    rules = Policy.model_validate({"max_personal_data": 0})
    settings = SiteSettings("a", ("mnli",), tmp_path, tmp_path / "spool", {}, root=str(tmp_path / "root"), policy=rules)
    with pytest.raises(PolicyError, match="1 examples here have what looks like personal data"):
        check_files(WorkerPool(start_site, settings, 0), settings, [].append, Audit(tmp_path))
