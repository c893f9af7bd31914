import csv
import xml.etree.ElementTree as ElementTree

import pytest

from fedmtl.cli import main
from fedmtl.errors import ConfigError
from fedmtl.runs.folder import RunFolder
from fedmtl_studies.wire import Pair, Point, last_points, parse_pairs, study_wire, to_csv, wire_page
from raw_events import raw_events

POINTS = [
    Point("fp32", 1, {"overall": 0.5, "a<b": None}, 100, 50, 2),
    Point("fp32", 2, {"overall": 0.75, "a<b": 0.25}, 200, 100, 4),
    Point("int8", 2, {"overall": 0.7, "a<b": 0.2}, 50, 25, 4),
]


def test_codecs_are_for_both_ways_or_one_for_each():
    assert parse_pairs("fp32, int8,int8/topk,int8") == [
        Pair("fp32", "fp32"),
        Pair("int8", "int8"),
        Pair("int8", "topk"),
    ]
    assert [pair.name for pair in parse_pairs("int8,int8/topk")] == ["int8", "int8-topk"]


@pytest.mark.parametrize("text", ["topk", "int4", "int8/fp64", "", ","])
def test_other_codecs_are_named(text):
    with pytest.raises(ConfigError, match="--codecs"):
        parse_pairs(text)


def test_the_table_has_a_row_for_every_codec_and_round():
    assert to_csv(POINTS).splitlines() == [
        "codec,round,overall,a<b,bytes_down,bytes_up,updates",
        "fp32,1,0.500000,,100,50,2",
        "fp32,2,0.750000,0.250000,200,100,4",
        "int8,2,0.700000,0.200000,50,25,4",
    ]
    assert last_points(POINTS) == POINTS[1:]


def test_the_page_draws_every_point_and_escapes_names():
    page = wire_page("a study", POINTS)
    assert page.count('class="spot"') == 3 + 2
    assert "fp32, round 2: .750 for 300 B" in page
    assert "a<b" not in page
    body = page[page.index("<main>") : page.index("</main>") + len("</main>")]
    assert ElementTree.fromstring(body).findall(".//polyline")


def test_a_study_runs_every_codec_from_the_same_seed(make_config):
    folder, points = study_wire(
        make_config("training.num_rounds=1"), parse_pairs("fp32,int8/topk"), "small", lambda pair: lambda event: None
    )
    with (folder / "wire.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["codec"], row["round"]) for row in rows] == [
        ("fp32", "0"), ("fp32", "1"), ("int8-topk", "0"), ("int8-topk", "1"),
    ]  # fmt: skip
    # the same start, and nothing sent yet
    assert rows[0]["overall"] == rows[2]["overall"]
    assert rows[0]["bytes_up"] == rows[2]["bytes_up"] == "0"
    exact, lossy = last_points(points)
    assert lossy.total_bytes < exact.total_bytes / 3
    for point in (exact, lossy):
        events = raw_events(RunFolder(folder / point.codec))
        assert point.bytes_up == sum(event["bytes_up"] for event in events if event["event"] == "update")
        assert point.messages == 6
    assert (folder / "wire.html").exists()


def test_nothing_travels_to_a_central_client(make_config):
    with pytest.raises(ConfigError, match="nothing travels"):
        study_wire(make_config("mode=centralized"), parse_pairs("int8"), "no", lambda pair: lambda event: None)


def test_the_command(make_config, monkeypatch, capsys, tmp_path):
    from fedmtl.config.file import dump_config

    path = tmp_path / "small.yaml"
    path.write_text(dump_config(make_config("training.num_rounds=1")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["fedmtl", "study", "wire", str(path), "--codecs", "int8"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "down int8, up int8" in out
    assert "small-wire/wire.html" in out
