"""`fedmtl serve`: what is answered, what is refused, what shares a pass, and what is counted."""

import asyncio
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import ClassVar

import numpy as np
import pytest

from fedmtl.errors import FedmtlError
from fedmtl.predict.answers import Prediction, to_prediction
from fedmtl.tasks.task import Task
from model.tiny import PAIRS, SINGLES, make_task

serve = pytest.importorskip("fedmtl.predict.serve", reason="needs the extra `serve`")
httpx = pytest.importorskip("httpx")
uvicorn = pytest.importorskip("uvicorn")

TASKS = {
    "mood": make_task("mood"),
    "topic": make_task("topic", labels=("x", "y", "<b>z</b>")),
    "alike": make_task("alike", text=("a", "b"), pair="dual"),
    "score": make_task("score", text=("a", "b"), kind="regression", score_range=(1.0, 5.0)),
}
SMALL = serve.Limits(body_bytes=2000, texts=4, characters=50, queue=8, batch=4, wait_seconds=0.005)


class Echo:
    """A model that answers with the number of letters of its row, and remembers what was computed together."""

    def __init__(self):
        self.calls = []
        self.open = threading.Event()
        self.open.set()

    def __call__(self, rows, tasks):
        self.calls.append((list(rows), tuple(tasks)))
        self.open.wait(10)
        if any("poison" in text for row in rows for text in row):
            raise ValueError(f"could not read {rows}")
        number = [float(sum(map(len, row))) for row in rows]
        return [[_said(task, value) for task in tasks] for value in number]

    def served(self):
        return serve.Served("toy", "onnx", TASKS, self)


def _said(task, value):
    if task == "score":
        return Prediction(task, None, value, {})
    return Prediction(task, "no", None, {"no": value, "yes": 0.0})


class Client:
    """Requests to an application without a socket, from any thread; it computes while the block lasts."""

    def __init__(self, service):
        self.service = service

    def __enter__(self):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        transport = httpx.ASGITransport(self.service.app(), raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://localhost:8000")
        self.running = self.do(self.start())
        return self

    async def start(self):
        return asyncio.create_task(self.service.batcher.run())

    def __exit__(self, *error):
        self.do(self.http.aclose())
        self.loop.call_soon_threadsafe(self.running.cancel)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.run_until_complete(asyncio.gather(self.running, return_exceptions=True))
        self.loop.close()
        self.service.batcher.close()

    def do(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(20)

    def get(self, path, **options):
        return self.do(self.http.get(path, **options))

    def post(self, path, **options):
        return self.do(self.http.post(path, **options))


@pytest.fixture
def model():
    return Echo()


@pytest.fixture
def client(model):
    service = serve.Service(model.served(), SMALL, serve.hosts_of("127.0.0.1"))
    with Client(service) as client:
        yield client


def test_every_head_that_fits_answers_texts_and_pairs(client, model):
    found = client.post("/predict", json={"texts": ["four", "two"]}).json()
    assert found["model"] == "toy"
    assert [[one["task"] for one in row] for row in found["predictions"]] == [["mood", "topic"]] * 2
    assert [row[0]["probabilities"]["no"] for row in found["predictions"]] == [4.0, 3.0]
    assert model.calls == [([("four",), ("two",)], ("mood", "topic"))]
    pairs = client.post("/predict", json={"pairs": [["ab", "c"]]}).json()["predictions"]
    assert pairs == [[{"task": "alike", "label": "no", "probabilities": {"no": 3.0, "yes": 0.0}},
                      {"task": "score", "score": 3.0}]]  # fmt: skip
    only = client.post("/predict", json={"pairs": [["ab", "c"]], "task": "score"}).json()["predictions"]
    assert only == [[{"task": "score", "score": 3.0}]]


def test_halves_of_characters_are_replaced_before_a_tokenizer_sees_them(client, model):
    body = '{"texts": ["a \\ud83d\\ude00", "b \\ud800"]}'
    assert client.post("/predict", content=body, headers={"Content-Type": "application/json"}).status_code == 200
    assert model.calls[0][0] == [("a \U0001f600",), ("b \ufffd",)]


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("{", "the body: bad JSON ("),
        ("[]", "the body is no JSON object; send "),
        ("{}", "found neither texts nor pairs; send "),
        ('{"texts": ["a"], "pairs": []}', "found texts and pairs; send "),
        ('{"texts": ["a"], "tusk": 1}', "'tusk': there is no such field; send "),
        ('{"texts": []}', "texts: is no list with something in it; send "),
        ('{"texts": "a"}', "texts: is no list with something in it; send "),
        ('{"texts": ["a", 1]}', "texts[1]: is not a text; send "),
        ('{"texts": ["a", " "]}', "texts[1]: is empty; send some words"),
        ('{"pairs": [["a"]]}', "pairs[0]: is not two texts, a list of two strings; send "),
        ('{"pairs": ["ab"]}', "pairs[0]: is not two texts, a list of two strings; send "),
        ('{"texts": ["a", "a", "a", "a", "a"]}', "texts: has 5, a request has 4 at most; send several"),
        (json.dumps({"texts": ["a" * 51]}), "texts[0]: has 51 characters, 50 at most; send its beginning"),
        ('{"texts": ["a"], "task": "mod"}', "toy has no task 'mod'; it has mood, topic, alike, score"),
        ('{"texts": ["a"], "task": "alike"}', "task alike takes two texts (a, b); 1 given"),
        ('{"texts": ["a"], "task": 1}', "task: is no name; there are mood, topic, alike, score"),
    ],
)
def test_a_wrong_request_is_one_line_that_says_what_is_accepted(client, model, body, error):
    found = client.post("/predict", content=body, headers={"Content-Type": "application/json"})
    assert found.status_code == 400
    assert found.json()["error"].startswith(error)
    assert "\n" not in found.json()["error"]
    assert model.calls == []


def test_bodies_hosts_paths_and_types_that_are_not_taken(client):
    assert client.post("/predict", json={"texts": ["a" * 3000]}).status_code == 413

    # Without a length, it is counted as it arrives.
    async def parts():
        for _ in range(30):
            yield b"x" * 100

    assert client.post("/predict", content=parts(), headers={"Content-Type": "application/json"}).status_code == 413
    plain = client.post("/predict", content='{"texts": ["a"]}', headers={"Content-Type": "text/plain"})
    assert plain.status_code == 415
    assert "not application/json" in plain.json()["error"]
    other = client.get("/health", headers={"Host": "elsewhere.example"})
    assert (other.status_code, "this host name is not served here" in other.json()["error"]) == (403, True)
    assert client.get("/health", headers={"Host": "127.0.0.1:9"}).status_code == 200
    assert client.get("/predict").json() == {"error": "/predict takes POST"}
    assert client.get("/../etc/passwd").json()["error"].startswith("no such path; there are /, /predict")


def test_the_queue_is_bounded_and_says_so(client, model):
    model.open.clear()
    with ThreadPoolExecutor(4) as pool:
        # The first is computed, and eight texts wait behind it.
        sent = [pool.submit(client.post, "/predict", json={"texts": ["a"]})]
        while not model.calls:
            time.sleep(0.001)
        sent += [pool.submit(client.post, "/predict", json={"texts": ["a"] * 4}) for _ in range(2)]
        while client.get("/health").json()["queue"] < 8:
            time.sleep(0.001)
        full = client.post("/predict", json={"texts": ["a"]})
        model.open.set()
        assert [one.result().status_code for one in sent] == [200, 200, 200]
    assert full.status_code == 503
    assert full.headers["retry-after"] == "1"
    assert full.json() == {"error": "the queue is full (8 texts wait); try again in a second"}


def test_requests_of_a_moment_share_a_pass_and_get_their_rows(model):
    async def ask():
        batcher = serve.Batcher(model.served(), SMALL, serve.Metrics())
        running = asyncio.create_task(batcher.run())
        texts = ["a", "bb", "ccc"]
        sent = [batcher.answer([(text,)], ("mood",)) for text in texts]
        pair = batcher.answer([("dddd", "e")], ("score",))
        # Five rows are one more than a batch has.
        large = batcher.answer([("f" * 6,)] * 2, ("mood",))
        found = await asyncio.gather(*sent, pair, large)
        running.cancel()
        batcher.close()
        return found

    *texts, pair, large = asyncio.run(ask())
    assert [row[0].probabilities["no"] for (row,) in texts] == [1.0, 2.0, 3.0]
    assert pair[0][0].score == 5.0
    assert [row[0].probabilities["no"] for row in large] == [6.0, 6.0]
    assert [(len(rows), tasks) for rows, tasks in model.calls] == [(3, ("mood",)), (1, ("score",)), (2, ("mood",))]


def test_a_request_waits_no_longer_than_it_should(model):
    async def ask():
        batcher = serve.Batcher(model.served(), serve.Limits(wait_seconds=0.2), serve.Metrics())
        running = asyncio.create_task(batcher.run())
        started = time.monotonic()
        await batcher.answer([("a",)], ("mood",))
        alone = time.monotonic() - started
        started = time.monotonic()
        await asyncio.gather(*(batcher.answer([("a",)], ("mood",)) for _ in range(32)))
        running.cancel()
        batcher.close()
        return alone, time.monotonic() - started

    alone, full = asyncio.run(ask())
    assert alone > 0.045
    # A full batch waits for nobody.
    assert full < 0.19


def test_one_request_that_cannot_be_computed_costs_no_other(client, model, caplog, capfd):
    model.open.clear()
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(client.post, "/predict", json={"texts": ["x"]})
        while not model.calls:
            time.sleep(0.001)
        sent = [pool.submit(client.post, "/predict", json={"texts": [text]}) for text in ("good", "poison secret")]
        while client.get("/health").json()["queue"] < 2:
            time.sleep(0.001)
        model.open.set()
        good, poison = (one.result() for one in sent)
        assert first.result().status_code == good.status_code == 200
    assert good.json()["predictions"][0][0]["probabilities"]["no"] == 4.0
    assert poison.status_code == 500
    assert poison.json() == {"error": "the model could not answer (ValueError)"}
    assert "secret" not in caplog.text + "".join(capfd.readouterr())


class Panic(BaseException):
    """As a library in Rust raises it: no Exception."""


def test_a_panic_of_the_model_costs_its_request_alone():
    def answer(rows, tasks):
        if rows == [("poison",)]:
            raise Panic(f"at {rows}")
        return Echo()(rows, tasks)

    with Client(serve.Service(serve.Served("toy", "onnx", TASKS, answer), SMALL, None)) as client:
        panic = client.post("/predict", json={"texts": ["poison"]})
        assert (panic.status_code, panic.json()) == (500, {"error": "the model could not answer (Panic)"})
        assert client.post("/predict", json={"texts": ["good"]}).status_code == 200
        assert client.get("/health").status_code == 200

    def cannot(rows, tasks):
        raise Panic

    broken = serve.Batcher(serve.Served("toy", "onnx", TASKS, cannot), SMALL, serve.Metrics())
    with pytest.raises(FedmtlError, match=r"^toy: the model cannot answer \(Panic\); write it anew$"):
        broken.warm_up()
    broken.close()


def test_nobody_waits_for_batches_that_are_no_longer_computed(client, model, monkeypatch):
    def fail():
        raise Panic

    monkeypatch.setattr(client.service.batcher, "_take", fail)
    for _ in range(2):
        found = client.post("/predict", json={"texts": ["a"]})
        assert (found.status_code, found.json()) == (503, {"error": serve.ENDED})
    assert client.get("/health").status_code == 503


def test_an_answer_that_is_no_number_is_an_error():
    broken = serve.Served("toy", "onnx", TASKS, lambda rows, tasks: [[Prediction("score", None, float("nan"), {})]])
    with Client(serve.Service(broken, SMALL, None)) as client:
        found = client.post("/predict", json={"pairs": [["a", "b"]], "task": "score"})
    assert (found.status_code, found.json()["error"]) == (
        500,
        "the model's answer is not a number; its weights are broken",
    )


def test_metrics_count_requests_seconds_batches_and_the_queue(client):
    for texts in (["a"], ["a", "b"], []):
        client.post("/predict", json={"texts": texts})
    client.get("/secret-path")
    text = client.get("/metrics").text
    assert 'fedmtl_requests_total{path="/predict",status="200"} 2' in text
    assert 'fedmtl_requests_total{path="/predict",status="400"} 1' in text
    assert 'fedmtl_requests_total{path="other",status="404"} 1' in text
    assert "secret-path" not in text
    assert "fedmtl_predict_seconds_count 3" in text
    assert 'fedmtl_predict_seconds_bucket{le="+Inf"} 3' in text
    # A batch of one and one of two.
    assert [line for line in text.splitlines() if line.startswith("fedmtl_batch_rows_b")][:3] == [
        'fedmtl_batch_rows_bucket{le="1"} 1',
        'fedmtl_batch_rows_bucket{le="2"} 2',
        'fedmtl_batch_rows_bucket{le="4"} 2',
    ]
    assert "fedmtl_queue_rows 0" in text
    line = re.compile(r'# (HELP|TYPE) fedmtl_\w+ .+|fedmtl_\w+(\{[a-z]+="[^"]+"(,[a-z]+="[^"]+")*\})? [0-9.e+-]+')
    assert all(line.fullmatch(one) for one in text.splitlines())


def test_the_model_and_the_api_are_described(client):
    known = client.get("/model").json()
    assert known["tasks"]["topic"] == {"kind": "classification", "texts": ["text"], "labels": ["x", "y", "<b>z</b>"],
                                       "range": None}  # fmt: skip
    assert known["tasks"]["score"]["range"] == [1.0, 5.0]
    assert known["limits"] == {"texts": 4, "characters": 50, "bytes": 2000}
    described = client.get("/openapi.json").json()
    assert described["openapi"] == "3.1.0"
    assert set(described["paths"]) == {"/predict", "/model", "/health", "/metrics"}
    schema = described["paths"]["/predict"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema["properties"]["task"]["enum"] == list(TASKS)
    assert schema["properties"]["texts"]["maxItems"] == 4


def test_the_page_needs_nothing_from_elsewhere_and_its_script_is_the_one_allowed(client):
    page = client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.search(r"https?://|src=|@import|url\(|innerHTML", page.text)
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert policy.count("'sha256-") == 2
    assert "unsafe" not in policy


class Finder:
    """A model with three kinds of answers, as their tasks give them for fixed outputs."""

    tasks: ClassVar = {
        "names": Task("names", "tagging", ("text",), "tags", "f1", labels=("LOC", "PER")),
        "moods": Task("moods", "multilabel", ("text",), "labels", "f1", labels=("anger", "fear", "joy")),
        "mood": TASKS["mood"],
    }
    # Tags O, B-LOC, I-LOC, B-PER, I-PER of the words of the text; labels; labels.
    outputs: ClassVar = {
        "names": 9.0 * np.eye(5)[[0, 3, 4, 0, 1]],
        "moods": np.array([9.0, -9.0, 9.0]),
        "mood": np.array([0.0, 2.0]),
    }

    def __call__(self, rows, tasks):
        return [[to_prediction(self.tasks[task], self.outputs[task], row) for task in tasks] for row in rows]

    def served(self):
        return serve.Served("finder", "onnx", self.tasks, self)


# The second sign is one letter of Python and two of JavaScript.
FOUND_IN = "\U0001f600 Ada Lovelace, London"


def test_spans_and_several_labels_are_answered_as_predict_says_them():
    with Client(serve.Service(Finder().served(), serve.Limits(), None)) as client:
        found = client.post("/predict", json={"texts": [FOUND_IN]}).json()["predictions"][0]
        described = client.get("/openapi.json").json()["paths"]["/predict"]["post"]["responses"]["200"]
    spans = [(each["start"], each["end"], each["label"], each["text"]) for each in found[0]["entities"]]
    assert spans == [(2, 14, "PER", "Ada Lovelace"), (16, 22, "LOC", "London")]
    assert found[1]["labels"] == ["anger", "joy"]
    assert list(found[1]["probabilities"]) == ["anger", "fear", "joy"]
    predictions = described["content"]["application/json"]["schema"]["properties"]["predictions"]
    properties = predictions["items"]["items"]["properties"]
    assert {key for answer in found for key in answer} <= set(properties)
    assert set(found[0]["entities"][0]) == set(properties["entities"]["items"]["properties"])


# As much of a browser as the page's script needs: elements are trees with a text, and answers come from a list.
BROWSER = """
const make = (tag) => ({ tag, children: [], listeners: {}, style: {}, textContent: "", className: "", value: "",
  append(...parts) { this.children.push(...parts); }, replaceChildren() { this.children = []; },
  addEventListener(kind, call) { this.listeners[kind] = call; } });
const elements = {};
globalThis.document = { createElement: make, getElementById: (id) => elements[id] ??= make(id) };
globalThis.location = { origin: "http://localhost" };
globalThis.fetch = async (path) => ({ ok: true, json: async () => (ANSWERS)[path] });
SCRIPT
const shown = (part) => typeof part === "string" ? part
  : part.className.startsWith("type") ? `[${part.className} ${part.textContent} ${part.children.map(shown)}]`
  : (part.className === "share best" ? "*" : "") + part.textContent + part.children.map(shown).join("");
setTimeout(async () => {
  document.getElementById("first").value = TEXT;
  await document.getElementById("form").listeners.submit({ preventDefault() {} });
  console.log(JSON.stringify(document.getElementById("answers").children.map((card) => card.children.map(shown))));
}, 0);
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the page's script")
def test_the_page_marks_spans_in_the_text_and_shows_which_labels_are_chosen():
    with Client(serve.Service(Finder().served(), serve.Limits(), None)) as client:
        answers = {"model": client.get("/model").json(),
                   "predict": client.post("/predict", json={"texts": [FOUND_IN]}).json()}  # fmt: skip
        script = re.search("<script>(.*)</script>", client.get("/").text, re.DOTALL)[1]
    program = BROWSER.replace("ANSWERS", json.dumps(answers)).replace("TEXT", json.dumps(FOUND_IN))
    # The page is strict by itself.
    done = subprocess.run(["node", "-e", program.replace("SCRIPT", f"(() => {{{script}}})();")],
                          capture_output=True, text=True, timeout=60)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    names, moods, mood = json.loads(done.stdout)
    assert names[1] == "\U0001f600 [type1 Ada Lovelace PER], [type0 London LOC]"
    assert [row.partition("1")[0].rstrip("0.9") for row in names[2:]] == ["*Ada Lovelace", "*London"]
    assert [row[:5] for row in moods[1:]] == ["*ange", "*joy1", "fear0"]
    assert len(mood) == 3


def test_a_head_is_bounded_in_size_and_time(model, monkeypatch):
    monkeypatch.setattr(serve, "HEAD_SECONDS", 0.1)
    config = serve.configure(serve.Service(model.served(), SMALL, serve.hosts_of("127.0.0.1")).app())
    config.load()

    async def ask(port, *parts):
        """What is answered until the connection is closed."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.03)
            return await asyncio.wait_for(reader.read(), 2)
        except ConnectionError:
            return b"reset"
        finally:
            writer.close()

    async def ask_all():
        state = uvicorn.server.ServerState()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: serve.Connection(config, state, {}), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        health = b"GET /health HTTP/1.1\r\nHost: LocalHost.:8\r\n"
        post = b"POST /no HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
        found = await asyncio.gather(
            ask(port),
            ask(port, *[b"G"] * 8),
            ask(port, health + b"A: " + b"a" * 500_000, *[b"a" * 500_000] * 3),
            ask(port, health, b"Connection: close\r\n\r\n"),
            ask(port, health + b"Host: evil\r\nConnection: close\r\n\r\n"),
            # What follows a body is bounded too, and a body is not.
            ask(port, post + b"0\r\nA: " + b"a" * 500_000, b"a" * 500_000),
            ask(port, post + b"1f400\r\n" + b"a" * 64_000, b"a" * 64_000 + b"\r\n0\r\n\r\n"),
            # A request after another has as long as the first, and no longer.
            ask(port, health + b"\r\n", b"GET /hea"),
        )
        server.close()
        return found

    silent, slow, large, good, twice, tail, body, second = asyncio.run(ask_all())
    assert (silent, slow in (b"", b"reset")) == (b"", True)
    assert large in (b"", b"reset")
    assert good.startswith(b"HTTP/1.1 200 ")
    assert twice.startswith(b"HTTP/1.1 400 ")
    assert (tail[:13], body[:13]) in [(start, b"HTTP/1.1 404 ") for start in (b"", b"reset", b"HTTP/1.1 404 ")]
    assert second.count(b"HTTP/1.1") == 1


def test_host_names_are_compared_whatever_their_case_and_only_one_is_taken(client):
    for host in ("LOCALHOST", "localhost.", "LocalHost.:8000"):
        assert client.get("/health", headers={"Host": host}).status_code == 200
    two = client.get("/health", headers=[("Host", "localhost"), ("Host", "localhost")])
    assert (two.status_code, two.json()) == (400, {"error": "found 2 Host headers; send one"})
    assert serve.is_loopback("LocalHost.")
    assert "localhost" in serve.hosts_of("LOCALHOST")


def test_only_this_machine_unless_a_host_is_named():
    assert [serve.is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "127.8.9.1")] == [True] * 4
    assert [serve.is_loopback(host) for host in ("0.0.0.0", "10.0.0.1", "::", "example.org")] == [False] * 4
    assert serve.hosts_of("0.0.0.0") is None
    with closing(serve.listen("127.0.0.1", 0)) as taken, pytest.raises(FedmtlError, match="cannot listen on ") as e:
        serve.listen("127.0.0.1", taken.getsockname()[1])
    assert "give another --port" in str(e.value)


def test_an_onnx_file_answers_as_predict_does(exported):
    from fedmtl.predict.onnx import answerable, open_onnx, predict_texts

    _, file = exported
    served = serve.open_served("", file, None, None, 1)
    assert served.backend == "onnx"
    model = open_onnx(file, 1)
    with Client(serve.Service(served, serve.Limits(), None)) as client:
        for name, rows in (("texts", SINGLES), ("pairs", PAIRS)):
            given = [row[0] for row in rows] if name == "texts" else [list(row) for row in rows]
            found = client.post("/predict", json={name: given}).json()["predictions"]
            wanted = predict_texts(model, rows, answerable(model, len(rows[0])))
            assert found == [[one.to_json() for one in row] for row in wanted]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "ended_by"), [("onnx", signal.SIGTERM), ("onnx", signal.SIGINT), ("torch", signal.SIGTERM)]
)
def test_a_server_over_a_socket_answers_many_and_ends_by_a_signal(exported, run_once, backend, ended_by):
    model = str(exported[1]) if backend == "onnx" else str(run_once().path)
    command = [sys.executable, "-m", "fedmtl", "serve", model, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            first = process.stdout.readline()
            assert f"({backend}: " in first, first + process.stdout.read()
            address = re.search(r"http://127\.0\.0\.1:\d+", first)[0]
            with httpx.Client(base_url=address) as client, ThreadPoolExecutor(8) as pool:
                sent = [pool.submit(client.post, "/predict", json={"texts": [f"a secret {n}"]}) for n in range(40)]
                found = [one.result() for one in sent]
                counted = client.get("/metrics").text
                page = client.get("/")
            assert {one.status_code for one in (*found, page)} == {200}
            assert 'fedmtl_requests_total{path="/predict",status="200"} 40' in counted
            # Fewer passes than requests: some shared one.
            assert int(re.search(r"fedmtl_batch_rows_count (\d+)", counted)[1]) < 40
        finally:
            process.send_signal(ended_by)
            rest = process.stdout.read()
    assert process.returncode == 0
    assert rest == "stopped\n"
