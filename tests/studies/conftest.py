import pytest

from fedmtl.cli import main


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """`fedmtl study` with these arguments, in a folder of its own: its exit code, what it wrote, its errors."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["fedmtl", "study", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run
