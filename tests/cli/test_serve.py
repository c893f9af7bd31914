"""`fedmtl serve` on the command line: what it says before it listens, and where it does not begin."""

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("onnxruntime")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["none.onnx"], "none.onnx: no such file; write it with `fedmtl export RUN --to onnx`"),
        (["none"], "none: "),
        (["x.onnx", "--client", "a"], "--client a: an ONNX file has one set of values"),
        (["x.onnx", "--queue", "8"], "--queue 8: a request of --texts 64 would never fit; give at least as many"),
        (["none.onnx", "--host", "203.0.113.9"], "serve: cannot listen on 203.0.113.9:0 ("),
    ],
)
def test_what_cannot_be_served_is_one_line(cli, arguments, error):
    done = cli("serve", *arguments, "--port", "0")
    assert done.code == 2
    assert done.error.startswith(error)


def test_a_missing_extra_is_one_line(cli, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli("serve", "x.onnx").error == (
        "serve: needs starlette, which is not installed; run `pip install -c constraints.txt '.[serve]'`"
        " in the folder of fedmtl's source"
    )


@pytest.mark.slow
def test_it_says_where_it_answers_and_warns_of_an_open_port(cli, exported, monkeypatch):
    monkeypatch.setattr("fedmtl.predict.serve.serve", lambda served, limits, listening, host, ready: ready())
    done = cli("serve", str(exported[1]), "--port", "0", "--threads", "1")
    assert done.code == 0
    assert "(onnx: single, cross, dual, score) answers at http://127.0.0.1:" in done.out
    assert "warning" not in done.out
    opened = cli("serve", str(exported[1]), "--port", "0", "--threads", "1", "--host", "0.0.0.0")
    assert opened.out.startswith("warning: 0.0.0.0 is open to others, without accounts and TLS; put a proxy")
