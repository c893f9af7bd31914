import json
import warnings

import pytest

from fedmtl.errors import ConfigError, DataError

with warnings.catch_warnings():
    # typer imports what newer versions of click deprecate.
    warnings.simplefilter("ignore", DeprecationWarning)
    import typer
    from typer.testing import CliRunner

    from fedmtl.cli.pretrain import pretrain

app = typer.Typer()
app.command()(pretrain)


def invoke(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_a_command_from_files_to_a_folder_and_its_card(teacher, sentences, tmp_path):
    more = tmp_path / "more.txt"
    more.write_text("one more text\n")
    files = ("--teacher", teacher, "--corpus", sentences, more, "--out", tmp_path / "out")
    small = ("--layers", 1, "--hidden", 16, "--vocab", 260, "--steps", 2, "--batch", 16, "--max-length", 32)
    result = invoke(*files, *small, "--no-hidden-loss", "--device", "cpu")
    assert "more.txt: 1 texts, 1 new chunks" in result.output.replace("\n", " ")
    assert "segments/s" in result.output
    assert "hidden" not in result.output.split("step 2")[1]
    card = tmp_path / "out" / "README.md"
    assert "Nothing yet." in card.read_text()
    (tmp_path / "measured.json").write_text(json.dumps({"measured": [{"task": "sst2", "mean": 0.851}]}))
    invoke("--out", tmp_path / "out", "--measured", tmp_path / "measured.json")
    assert "| sst2 | 0.8510 |" in card.read_text()
    assert "Nothing yet." not in card.read_text()


def test_without_a_teacher_it_says_so(tmp_path):
    with pytest.raises(ConfigError, match="--teacher: not given"):
        invoke("--corpus", "x.txt", "--out", tmp_path / "out")


def test_measured_numbers_need_a_card_and_rows(tmp_path):
    (tmp_path / "m.json").write_text("{}")
    with pytest.raises(DataError, match="no such card"):
        invoke("--out", tmp_path / "out", "--measured", tmp_path / "m.json")
    (tmp_path / "README.md").write_text("# x\n\n## Measured\n\nold\n")
    with pytest.raises(DataError, match="is not what is wanted"):
        invoke("--out", tmp_path, "--measured", tmp_path / "m.json")
