"""Answers of the model in this folder, with numpy, tokenizers and onnxruntime alone.

    python predict.py "a fine film"                    one text: every head that takes one
    python predict.py "a fine film" "a good movie"     a pair
    python predict.py --file lines.txt --task NAME     a text a line, or two with a tab between
    some-program | python predict.py                   a line in, an answer out

Each answer is one line of JSON. In Python:

    from predict import Model
    model = Model()
    model.predict([("a fine film",), ("a dull one",)])

`fedmtl export --to onnx` copies this file, as it is, into every folder that it writes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

FORMAT = 1
FILE_BATCH = 32
MOST_TEXTS = 2
# A word of a text, for heads that tag each: a run of letters and digits, or one sign.
WORD = re.compile(r"\w+|[^\w\s]")

Row = tuple[str, ...]


class Model:
    """The graph, the tokenizer and the tasks of a folder that `fedmtl export --to onnx` wrote."""

    def __init__(
        self, folder: str | os.PathLike[str] | None = None, graph: str | None = None, threads: int | None = None
    ) -> None:
        """Open a folder, by default the one this file lies in; `graph` is another file of it, such as an INT8 one."""
        self.folder = Path(__file__).parent if folder is None else Path(folder)
        self.facts: dict[str, Any] = json.loads((self.folder / "model.json").read_text(encoding="utf-8"))
        if self.facts.get("format") != FORMAT:
            raise ValueError(f"model.json: has format {self.facts.get('format')}, this predict.py reads {FORMAT}")
        self.tasks: dict[str, dict[str, Any]] = self.facts["tasks"]
        self.tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        self.windows = self._windows()
        self.session = _session(self.folder / (graph or self.facts["graph"]), threads)

    def _windows(self) -> dict[str, Any] | None:
        """How long texts are cut, and what fills windows up; the tokenizer then does neither."""
        if "windows" not in self.facts:
            return None
        shorten, fill = self.tokenizer.truncation or {}, self.tokenizer.padding or {}
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        found = {**self.facts["windows"], "length": self.facts["max_length"]}
        return {
            **found,
            "from_left": shorten["direction"] == "left",
            "padding": (fill["pad_id"], 0, fill["pad_type_id"]),
        }

    def predict(self, rows: Sequence[Row | str], task: str | None = None) -> list[list[dict[str, Any]]]:
        """For every row, a text or a pair of texts, the answers of one task or of every task that takes such rows."""
        wanted = [(row,) if isinstance(row, str) else tuple(row) for row in rows]
        if not wanted:
            return []
        names = self._fitting(wanted, task)
        # Two texts that are encoded apart are two rows of a call, so these tasks need another call.
        dual = [name for name in names if self.tasks[name]["pair"] == "dual"]
        found: dict[str, list[dict[str, Any]]] = {}
        for group in filter(None, ([name for name in names if name not in dual], dual)):
            encoded = self._encode(wanted, group)
            cuts = self._cuts(encoded)
            outputs = self.session.run([self.tasks[name]["output"] for name in group], self._feeds(encoded, cuts))
            for name, values in zip(group, outputs, strict=True):
                if self.tasks[name]["kind"] == "tagging":
                    of_tokens = values if self.windows is None else _of_tokens(values, cuts, encoded)
                    answers = [
                        answer_words(self.tasks[name], value, row[0], tokens.offsets)
                        for value, row, tokens in zip(of_tokens, wanted, encoded, strict=True)
                    ]
                else:
                    answers = [answer(self.tasks[name], value) for value in values]
                found[name] = [{"task": name, **each} for each in answers]
        return [[found[name][row] for name in names] for row in range(len(wanted))]

    def _fitting(self, rows: Sequence[Row], task: str | None) -> list[str]:
        count = len(rows[0])
        if any(len(row) != count for row in rows):
            raise ValueError("rows of one text and rows of two were given; give one kind at a time")
        if not all(text.strip() for row in rows for text in row):
            raise ValueError("a text is empty; give some words")
        fitting = [name for name, known in self.tasks.items() if len(known["texts"]) == count]
        if task is not None and task not in self.tasks:
            raise ValueError(f"there is no task {task}; there are {', '.join(self.tasks)}")
        if task is not None and task not in fitting:
            raise ValueError(f"task {task} takes {' and '.join(self.tasks[task]['texts'])}; {count} given")
        if not fitting:
            takes = "; ".join(f"{name} takes {' and '.join(known['texts'])}" for name, known in self.tasks.items())
            raise ValueError(f"no task takes {count} texts: {takes}")
        return fitting if task is None else [task]

    def _encode(self, rows: Sequence[Row], group: Sequence[str]) -> list[Any]:
        texts: list[Any] = [row[0] for row in rows]
        if len(rows[0]) == MOST_TEXTS:
            is_dual = self.tasks[group[0]]["pair"] == "dual"
            texts = [*texts, *(row[1] for row in rows)] if is_dual else list(rows)
        encoded: list[Any] = self.tokenizer.encode_batch(texts)
        return encoded

    def _cuts(self, encoded: Sequence[Any]) -> list[list[list[int]]]:
        return [] if self.windows is None else [cut(row.sequence_ids, self.windows) for row in encoded]

    def _feeds(self, encoded: Sequence[Any], cuts: Sequence[Sequence[Sequence[int]]]) -> dict[str, np.ndarray]:
        named = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
        offered = {name: [getattr(row, part) for row in encoded] for name, part in named.items()}
        if self.windows is not None:
            # A row for every window; of each text, which rows are its windows.
            width = max(len(tokens) for windows in cuts for tokens in windows)
            for (name, rows), blank in zip(offered.items(), self.windows["padding"], strict=True):
                offered[name] = [
                    [row[at] for at in tokens] + [blank] * (width - len(tokens))
                    for row, windows in zip(rows, cuts, strict=True)
                    for tokens in windows
                ]
            most, counts = max(map(len, cuts)), list(map(len, cuts))
            firsts = np.cumsum([0, *counts])
            offered["windows"] = [
                [first + n if n < count else -1 for n in range(most)]
                for first, count in zip(firsts, counts, strict=False)
            ]
        return {name: np.asarray(offered[name], dtype=np.int64) for name in self.facts["inputs"]}


def cut(of_texts: Sequence[int | None], windows: dict[str, Any]) -> list[list[int]]:
    """The tokens of each window of a text or a joined pair, by their number; `of_texts` says which text each is of.

    The first window begins with the text, further ones a stride later, and the last ends with it. Special tokens, of no
    text, are in each, and so is the shorter text of a pair.
    """
    length = windows["length"]
    if len(of_texts) <= length:
        return [list(range(len(of_texts)))]
    texts = [[at for at, text in enumerate(of_texts) if text == number] for number in (0, 1)]
    budget = length - sum(text is None for text in of_texts)
    longer = int(len(texts[1]) >= len(texts[0]))
    whole, shorter = texts[longer], texts[1 - longer]
    first = max(0, len(shorter) - budget // 2) if windows["from_left"] else 0
    shorter = shorter[first : first + budget // 2]
    size = budget - len(shorter)
    step = min(windows["stride"] or size, size)
    needed = 1 - (size - len(whole)) // step
    starts = [number * step for number in range(min(needed, windows["most"]))]
    if needed <= windows["most"]:
        starts[-1] = len(whole) - size
    if windows["from_left"]:
        starts = [len(whole) - size - start for start in reversed(starts)]
    stays = {at for at, text in enumerate(of_texts) if text is None} | set(shorter)
    return [sorted(stays | set(whole[start : start + size])) for start in starts]


def most_central(cuts: Sequence[Sequence[int]], count: int) -> list[tuple[int, int] | None]:
    """For each of so many tokens the window where it stands most central, and where it stands there."""
    found: list[tuple[int, int] | None] = [None] * count
    nearest = [math.inf] * count
    for number, tokens in enumerate(cuts):
        for at, token in enumerate(tokens):
            distance = abs(at - (len(tokens) - 1) / 2)
            if distance < nearest[token]:
                found[token], nearest[token] = (number, at), distance
    return found


def _of_tokens(
    outputs: np.ndarray, cuts: Sequence[Sequence[Sequence[int]]], encoded: Sequence[Any]
) -> Iterator[list[np.ndarray | None]]:
    """For every text the outputs of each of its tokens, from the window where it stands most central."""
    begin = 0
    for windows, row in zip(cuts, encoded, strict=True):
        found = most_central(windows, len(row.ids))
        yield [None if at is None else outputs[begin + at[0], at[1]] for at in found]
        begin += len(windows)


def answer_words(
    task: dict[str, Any],
    outputs: Sequence[np.ndarray | None] | np.ndarray,
    text: str,
    letters: Sequence[tuple[int, int]],
) -> dict[str, Any]:
    """The spans that are tagged, by the tag of each word's first token; `letters` are those of every token."""
    names = ["O", *(f"{prefix}-{label}" for label in task["labels"] for prefix in "BI")]
    found: list[dict[str, Any]] = []
    at, open_kind = 0, ""
    for match in WORD.finditer(text):
        while at < len(letters) and (letters[at][1] <= match.start() or letters[at][0] == letters[at][1]):
            at += 1
        of_word = outputs[at] if at < len(letters) and letters[at][0] < match.end() else None
        if of_word is None:
            # Cut off, or nothing to the tokenizer.
            open_kind = ""
            continue
        logits = of_word.astype(np.float64)
        shares = np.exp(logits - logits.max())
        share, number = float(shares.max() / shares.sum()), int(shares.argmax())
        prefix, _, kind = names[number].partition("-")
        if kind and (prefix == "B" or kind != open_kind):
            found.append({"start": match.start(), "end": match.end(), "label": kind, "probability": share})
        elif kind:
            found[-1]["end"] = match.end()
            found[-1]["probability"] = min(found[-1]["probability"], share)
        open_kind = kind
    return {"entities": [{**each, "text": text[each["start"] : each["end"]]} for each in found]}


def answer(task: dict[str, Any], outputs: np.ndarray) -> dict[str, Any]:
    """One row of a head's outputs in words: a label with every label's probability, or a score in its range.

    The outputs of a kind of task that only a package beside fedmtl knows are given as they are.
    """
    values = [float(value) for value in outputs]
    if task["kind"] == "regression":
        low, high = task["score_range"]
        return {"score": float(np.clip(low + (high - low) * values[0], low, high))}
    if task["kind"] != "classification":
        return {"outputs": values}
    # One output z of two labels stands for (0, z).
    logits = [0.0, values[0]] if len(values) == 1 else values
    shares = [math.exp(value - max(logits)) for value in logits]
    probabilities = {label: share / sum(shares) for label, share in zip(task["labels"], shares, strict=True)}
    return {"label": max(probabilities, key=lambda label: probabilities[label]), "probabilities": probabilities}


def _session(graph: Path, threads: int | None) -> Any:
    if not graph.is_file():
        raise ValueError(f"{graph}: no such file; give a graph that lies in this folder")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or os.cpu_count() or 1
    options.inter_op_num_threads = 1
    # Waiting threads leave the cores to others.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    # On a CPU the fused operator is slower than the two it replaces.
    slow = ["SkipLayerNormFusion"]
    return onnxruntime.InferenceSession(
        str(graph), options, providers=["CPUExecutionProvider"], disabled_optimizers=slow
    )


def _rows(lines: Iterable[str]) -> Iterator[Row]:
    """Yield the texts of every line that is not blank."""
    for number, line in enumerate(lines, start=1):
        row = tuple(line.rstrip("\r\n").split("\t"))
        if len(row) > MOST_TEXTS:
            raise ValueError(f"line {number}: has {len(row)} texts; give one a line, or two with a tab between")
        if line.strip():
            yield row


def _mended(text: str) -> str:
    """Replace bytes of the command line that are no UTF-8, which the tokenizer would refuse."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _answer_all(model: Model, rows: Iterable[Row], batch: int, task: str | None) -> None:
    left = iter(rows)
    while chunk := list(islice(left, batch)):
        for row, predictions in zip(chunk, model.predict(chunk, task), strict=True):
            print(json.dumps({"texts": list(row), "predictions": predictions}), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer what the command line, a file or stdin gives; an error is one line and exit code 2."""
    described, _, usage = (__doc__ or "").partition("\n\n")
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=described, epilog=usage, formatter_class=shape)
    parser.add_argument("texts", nargs="*", help="one text, or two for a pair; none reads lines from stdin")
    parser.add_argument("--file", help="a text a line, or two with a tab between")
    parser.add_argument("--task", help="only this task; otherwise every head that fits")
    parser.add_argument("--graph", help="another graph of this folder, such as model.dynamic.onnx")
    parser.add_argument("--threads", type=int, help="threads to compute with; otherwise one per core")
    given = parser.parse_args(arguments)
    try:
        if given.texts and given.file:
            raise ValueError("found texts and --file; give one of them")
        if len(given.texts) > MOST_TEXTS:
            raise ValueError(f"takes one text, or two for a pair; {len(given.texts)} given. Use --file for many")
        model = Model(graph=given.graph, threads=given.threads)
        if given.texts:
            _answer_all(model, [tuple(map(_mended, given.texts))], 1, given.task)
        elif given.file:
            with Path(given.file).open(encoding="utf-8-sig") as lines:
                _answer_all(model, _rows(lines), FILE_BATCH, given.task)
        else:
            _answer_all(model, _rows(sys.stdin), 1, given.task)
    except BrokenPipeError:
        # The reader has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        print(f"predict.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
