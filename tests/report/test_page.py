import ast
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import fedmtl.report
from fedmtl.errors import FedmtlError, RunNotFound
from fedmtl.report.page import write_report

from .fake_run import CONFIG, DIGEST, build_events, clients, page_of, start, training, write_folder

HOSTILE = "<script>alert('x')</script>"
WITHOUT_END = {"meta", "br"}


class Reader(HTMLParser):
    """Collects text, tags and attributes; fails on a tag that is not closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in WITHOUT_END:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += f"{data}|"


RUNS = {
    "whole": build_events(),
    "before training": build_events(0, num_rounds=0),
    "still running": [*build_events(3, ended=False), *training(4)],
    "only started": [start()],
    "empty": [],
    "no evaluation": [event for event in build_events() if event["event"] != "evaluation"],
    "no round": [event for event in build_events() if event["event"] != "round"],
}


def test_the_hash_of_the_weights_stands_with_what_it_depends_on():
    with_kernels = Reader(page_of(build_events(kernels="compiled", device="cpu"))).text
    assert f"{DIGEST}|the same with torch 2.11.0 and compiled kernels on a CPU like this|" in with_kernels
    # On a GPU bits may differ from run to run.
    assert "on a CPU like this" not in Reader(page_of(build_events(kernels="triton", device="cuda"))).text


@pytest.mark.parametrize("events", RUNS.values(), ids=RUNS)
def test_page_is_well_formed_whatever_the_run_left(events):
    page = page_of(events)
    reader = Reader(page)
    assert page.startswith("<!doctype html>")
    assert sum(tag == "section" for tag, _ in reader.tags) == 10
    assert "nan" not in reader.text.lower().split("|")


@pytest.mark.parametrize("events", RUNS.values(), ids=RUNS)
def test_page_asks_for_nothing_outside_itself(events):
    page = page_of(events)
    for _, attributes in Reader(page).tags:
        assert not {"src", "srcset", "data", "action"} & set(attributes)
        assert (attributes.get("href") or "#").startswith("#")
    assert "url(" not in page
    assert "@import" not in page
    assert "http://" not in page
    assert "https://" not in page
    assert "default-src 'none'" in page.replace("&#x27;", "'")


def test_data_cannot_become_markup():
    events = build_events(2)
    events[0]["encoder"] = HOSTILE
    events[0]["tasks"][HOSTILE] = events[0]["tasks"].pop("sst2")
    for event in events:
        if event.get("task") == "sst2":
            event["task"] = HOSTILE
        if event["event"] == "clients":
            event["clients"][HOSTILE] = event["clients"].pop("forum")
        if event.get("client") == "forum":
            event["client"] = HOSTILE
        if event["event"] == "plan":
            event["rules"].insert(0, [HOSTILE, HOSTILE])
        if event["event"] == "data":
            event["source"] = HOSTILE
    events.insert(-1, {"event": "failure", "round": 2, "client": HOSTILE, "reason": f'"{HOSTILE}', "bytes_down": 1})
    events[-1]["reason"] = HOSTILE
    page = page_of(events, f"</code></pre>{HOSTILE}", HOSTILE)
    reader = Reader(page)
    assert "script" not in {tag for tag, _ in reader.tags}
    assert "<script" not in page
    assert reader.text.count(HOSTILE) > 8


def test_synthetic_badge_is_there_only_for_synthetic_data():
    assert "|synthetic data|" in Reader(page_of(build_events())).text
    assert "|synthetic data|" not in Reader(page_of(build_events(synthetic=False))).text


def test_status_and_its_reason_are_shown():
    events = build_events(2)
    events[-1].update(status="failed", reason="round 3: 1 client answered, 2 are needed")
    text = Reader(page_of(events)).text
    assert "|failed|synthetic data|round 3: 1 client answered, 2 are needed|" in text
    assert "2 of 8" in text


def test_run_without_end_is_not_called_done():
    text = Reader(page_of(build_events(3, ended=False))).text
    assert "|not ended|" in text
    assert "|done|" not in text


def test_end_before_a_resume_does_not_count():
    first = build_events(2)
    again = build_events(3, ended=False)
    resumed = [*first, *(event for event in again if event.get("round") == 3)]
    assert "|not ended|" in Reader(page_of(resumed)).text


def test_totals_are_the_sums_over_rounds():
    # Rounds 1 and 2, all but library (it joins in 3), up: (800 + 850 + 900 + 950 + 1000) kB = 4.5 MB each.
    # Down: 5 * 900 kB = 4.5 MB each.
    text = Reader(page_of(build_events(2))).text
    assert "|Sent by clients|9 MB|Sent to clients|9 MB|" in text


def test_hash_can_be_copied_whole():
    assert f"|{DIGEST}|" in Reader(page_of(build_events())).text


def test_config_is_shown_as_it_is():
    assert f"|{CONFIG}|" in Reader(page_of(build_events())).text


def test_failure_names_client_round_and_reason():
    text = Reader(page_of(build_events())).text
    reason = "encoder.layer.1.output.dense.weight: has a value that is not finite"
    assert f"|forum|4|{reason}|900 kB|" in text
    assert "No client failed." not in text
    assert "|No client failed.|" in Reader(page_of(build_events(3))).text


def test_client_row_adds_up_its_updates_and_failures():
    # forum, 8 rounds: 7 updates of 950 kB = 6.65 MB up; 8 * 900 kB = 7.2 MB down; 3.5 s each.
    assert "|forum|all|7|1|3.5 s|6.65 MB|7.2 MB|" in Reader(page_of(build_events())).text


def test_early_stop_and_late_joining_are_marked_in_the_curves():
    text = Reader(page_of(build_events())).text
    assert "|stopped, best round 4|" in text
    stopped = (
        "qqp stopped early after round 7 (score .725): its head and the layers that are its alone stay as they were"
    )
    assert f"{stopped} in round 4, which scored .741." in text
    assert "it scores " in text
    assert "|joins|" not in text
    late = build_events()
    for event in late:
        if event["event"] == "round" and event["round"] < 3:
            event["tasks"]["stsb"] = 0
    assert "|joins|" in Reader(page_of(late)).text


def test_unbounded_metrics_do_not_flatten_the_curves():
    events = build_events()
    for event in events:
        if event["event"] == "evaluation" and event["task"] == "stsb":
            event["metrics"]["r2"] = -20.0
    # A tick of -10 or -20 would show that r2 shares the axis of pearson.
    assert not re.search(r"\|−\d0\|", Reader(page_of(events)).text)


def test_every_level_of_the_plan_is_named():
    text = Reader(page_of(build_events())).text
    # 3,972,864 of 4,386,565 parameters is 90.6 %.
    assert "|embeddings|all|3,972,864|90.6%|" in text
    assert "|encoder.layer.1|group|198,272|4.5%|" in text
    assert "|heads.stsb|client|129|<0.1%|" in text
    assert "|heads.*|task|" in text
    assert "Groups of tasks: pair (qqp, stsb)." in text


def test_data_says_where_validation_came_from():
    text = Reader(page_of(build_events())).text
    # Of 1,110 examples, 900 were there in rounds 1 and 2 and all in the other six: 7.62 passes.
    assert "|stsb|regression|data/stsb/train.tsv.gz|1,110|7.62|12 |1.1%|123 |cut from train|" in text


def test_partition_map_shows_rounds_and_examples():
    reader = Reader(page_of(build_events()))
    assert "|library|from 3|" in reader.text
    assert "|bank|until 6|" in reader.text
    assert "1,200 examples: negative 900, positive 300" in reader.text


def test_two_hundred_clients_become_bars_not_rows():
    many = clients()
    many["clients"] = {f"c{i}": {"tasks": {"sst2": {"examples": i, "labels": {"positive": i}}}} for i in range(1, 201)}
    page = page_of([start(), many])
    # Sizes 1 to 200: the median is 100.5, shown as a whole number.
    assert "200 clients, 1–200 examples (median 100)" in page
    assert page.count('class="bar"') == 200
    assert "Examples per client and task" not in page


def test_pictures_and_tables_speak_to_those_who_do_not_see_them():
    page = page_of(build_events())
    for picture in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
        assert re.match(r'<svg role="img" [^>]*><title>[^<]+</title><desc>[^<]+</desc>', picture)
    for _, attributes in (entry for entry in Reader(page).tags if entry[0] == "th"):
        assert attributes["scope"] in {"row", "col"}


def test_writing_replaces_the_page_and_leaves_nothing_else(tmp_path):
    folder = write_folder(tmp_path / "night-run")
    (folder / "report.html").write_text("old")
    page = write_report(folder)
    assert page == folder / "report.html"
    assert "<h1>night-run</h1>" in page.read_text(encoding="utf-8")
    assert {path.name for path in folder.iterdir()} == {"config.yaml", "events.jsonl", "report.html"}


def test_same_folder_gives_the_same_page(tmp_path):
    folder = write_folder(tmp_path / "run")
    first = write_report(folder).read_bytes()
    assert write_report(folder).read_bytes() == first


def test_half_written_last_line_is_ignored(tmp_path):
    folder = write_folder(tmp_path / "run", build_events(2, ended=False))
    whole = write_report(folder).read_bytes()
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"event": "round", "rou')
    assert write_report(folder).read_bytes() == whole


def test_broken_line_is_named(tmp_path):
    folder = write_folder(tmp_path / "run", build_events(0))
    text = (folder / "events.jsonl").read_text()
    (folder / "events.jsonl").write_text("{oops\n" + text)
    with pytest.raises(FedmtlError, match=r"events\.jsonl, line 1: is not JSON"):
        write_report(folder)


def test_folder_without_events_is_no_run(tmp_path):
    with pytest.raises(RunNotFound, match=r"events\.jsonl: no such file"):
        write_report(tmp_path)


def test_report_needs_only_the_standard_library():
    needed = set()
    for path in Path(fedmtl.report.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                needed |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                needed.add(str(node.module).split(".")[0])
    allowed = {
        "__future__",
        "collections",
        "csv",
        "dataclasses",
        "html",
        "io",
        "json",
        "math",
        "pathlib",
        "statistics",
        "typing",
    }
    assert needed <= allowed | {"fedmtl"}


def test_thousands_of_clients_are_drawn_in_part_and_listed_where_they_took_part():
    many = clients()
    many["clients"] = {f"c{i}": {"tasks": {"sst2": {"examples": i, "labels": {"positive": i}}}} for i in range(1, 2401)}
    update = {
        "event": "update",
        "round": 1,
        "client": "c7",
        "tasks": {},
        "seconds": 1.0,
        "bytes_up": 1,
        "bytes_down": 1,
    }
    page = page_of([start(), many, update])
    assert "2,400 clients, 1–2,400 examples (median 1,200), one in 10 is drawn" in page
    assert "1 of 1 client that were sampled, of 2,400 in all" in page
    assert len(page) < 200_000


def test_what_a_step_and_the_servers_lessons_cost_is_told_where_there_is_something_to_tell():
    plain = Reader(page_of(build_events())).text
    assert "passes forward" not in plain
    assert "teacher" not in plain
    lessons = [
        {"event": "distillation", "round": at, "losses": {"sst2": 0.5 / at}, "steps": 30, "seconds": 2.0}
        for at in (1, 2)
    ]
    events = [{**event, "step_passes": {"forward": 4, "backward": 3}} if event["event"] == "start" else event
              for event in build_events()]  # fmt: skip
    told = Reader(page_of([*events, *lessons])).text
    assert "4 passes forward, 3 back" in told
    assert "60 steps in 4" in told
    assert "sst2 .500 to .250" in told


def decided(number: int, cosine: float, before: str, after: str) -> dict[str, object]:
    layer = {"before": before, "after": after, "reason": "tasks disagree for 3 rounds" if before != after else "stays"}
    told = {"layer": "encoder.layer.1", "agreement": {"sst2/qqp": cosine, "sst2/stsb": 0.9}, "measured": {}, **layer}
    return {"event": "sharing", "round": number, "layers": [told]}


def test_what_the_server_changed_is_shown():
    events = [
        *build_events(),
        decided(1, -0.25, "all", "all"),
        decided(2, -0.375, "all", "task"),
        {"event": "task_weights", "round": 1, "weights": {"sst2": 1.0, "qqp": 1.0}},
        {"event": "task_weights", "round": 2, "weights": {"sst2": 0.75, "qqp": 1.25}},
    ]
    page = page_of(events)
    text = Reader(page).text
    # the lowest of the two pairs
    assert "−.250|" in text
    assert "−.375|→ task|" in text
    assert "Round 2: encoder.layer.1 went from all to task; tasks disagree for 3 rounds." in text
    assert "Task weights by round|At the end: sst2 .750, qqp 1.250.|" in text
    plain = Reader(page_of(build_events())).text
    assert "Task weights" not in plain
    assert "Agreement of the tasks" not in plain


def test_a_long_run_shows_its_moves_and_some_of_the_other_rounds():
    moves = [decided(at, 0.5, "all", "task" if at == 102 else "all") for at in range(1, 201)]
    shown = Reader(page_of([*build_events(), *moves])).text
    assert "→ task" in shown
    assert shown.count(".500|") < 60


def test_the_rules_of_scopes_are_shown_with_where_none_can_help():
    scopes = {"all": {"rule": "multi_krum", "clients": 6}, "task:stsb": {"rule": "multi_krum", "clients": 2}}
    event = {"event": "aggregation", "round": 0, "scopes": scopes, "helpless": ["task:stsb"]}
    assert "Aggregation rules" not in page_of(build_events())
    page = page_of([*build_events(), event])
    assert "Aggregation rules at the start" in page
    assert "fewer than three clients share a scope: task:stsb (2)." in page
