"""Attacks on a federation: taps on the messages of a cell, and the numbers that say how well each attack did.

* Membership: a loss below a threshold says that an example was trained on (Yeom et al. 2018). Calibrated, the loss is
  compared with that of models which never saw the example (Watson et al. 2022; with the logit of Carlini et al. 2022,
  whose offline form it is with one variance for all examples).
* Words: the rows of the token table that an update moved are the words of the texts behind it.
* Poisoning: one client trains on flipped labels or returns the negative of its update, and lies about its examples.

What a tap finds is lines of JSON beside the run that it was on. Nothing here is random.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal

from fedmtl_studies.library import RunFolder

View = Literal["model", "update", "sum"]
FALSE_POSITIVES = 0.01
CLAIM = 10**6
# A row of noise is further out than this with a chance of some billionths, by the median absolute deviation.
FAR_OUT = 9.0


# -- how well an attack did -------------------------------------------------------------------------------------------


def auc(members: Sequence[float], others: Sequence[float]) -> float:
    """Return the chance that a member scores above one of the others, ties counted half: 0.5 is guessing."""
    ordered = sorted(others)
    wins = sum(bisect_left(ordered, score) + bisect_right(ordered, score) for score in members)
    return wins / (2 * len(members) * len(others))


def true_positives(members: Sequence[float], others: Sequence[float], false: float = FALSE_POSITIVES) -> float:
    """Return the share of members above a threshold that at most the share `false` of the others is above."""
    allowed = math.floor(false * len(others) + 1e-9)
    threshold = sorted(others, reverse=True)[allowed] if allowed < len(others) else -math.inf
    return sum(score > threshold for score in members) / len(members)


def calibrated(losses: Sequence[float], references: Sequence[Sequence[float]]) -> list[float]:
    """Return how much surer of an example a model is than those that never saw it: large is a member.

    Sureness is the logit of the chance that a model gives the right label, as a loss near 0 says little of how near.
    """
    by_example = zip(*references, strict=True)
    return [sureness(loss) - mean(map(sureness, known)) for loss, known in zip(losses, by_example, strict=True)]


def sureness(loss: float) -> float:
    """Return log(p / (1 - p)) of the chance p = exp(-loss)."""
    return -loss - math.log(-math.expm1(-max(loss, 1e-12)))


@dataclass(frozen=True)
class Losses:
    """The losses of one model on a client's training examples and on others that nobody trained on."""

    members: tuple[float, ...]
    others: tuple[float, ...]

    def by_threshold(self) -> tuple[float, float]:
        """Return the attack by the loss alone: its AUC, and its true positives at 1% false ones."""
        scores = [-loss for loss in self.members], [-loss for loss in self.others]
        return auc(*scores), true_positives(*scores)

    def by_calibration(self, references: Sequence[Losses]) -> tuple[float, float]:
        """Return the same of the attack that knows models which saw neither."""
        scores = (
            calibrated(self.members, [reference.members for reference in references]),
            calibrated(self.others, [reference.others for reference in references]),
        )
        return auc(*scores), true_positives(*scores)


@dataclass(frozen=True)
class Words:
    """What the rows of a token table give away of the words that a client's texts use.

    `ranked` is the share of its words among as many rows, those that moved furthest: an attacker who knows how many
    there are. `precision` and `recall` are of the rows that stand out, which takes no knowledge. `chance` is what
    `ranked` would be if rows were drawn blindly. `rows` are those that moved at all.
    """

    used: int
    rows: int
    ranked: float
    precision: float
    recall: float
    chance: float


def recovered_words(moved: Sequence[float], used: Iterable[int], known: Iterable[int] = ()) -> Words:
    """Say what an attacker reads off how far every row of a table moved; `known` ids, such as [CLS], do not count."""
    left_out = set(known)
    words = set(used) - left_out
    ids = [number for number in range(len(moved)) if number not in left_out]
    # Rows that did not move at all are no guess.
    ordered = sorted((number for number in ids if moved[number] > 0), key=lambda number: (-moved[number], number))
    likely = set(ordered[: len(words)])
    far = _outliers([moved[number] for number in ids])
    found = {number for number in ids if moved[number] > far}
    right = len(found & words)
    return Words(
        used=len(words),
        rows=len(ordered),
        ranked=len(likely & words) / len(words),
        precision=right / len(found) if found else 0.0,
        recall=right / len(words),
        chance=len(words) / len(ids),
    )


def _outliers(moved: Sequence[float]) -> float:
    """Return the distance above which a row stands out: none where most rows did not move."""
    middle = median(moved)
    deviation = median(abs(value - middle) for value in moved)
    return middle + FAR_OUT * deviation


# -- taps -------------------------------------------------------------------------------------------------------------


def findings_path(run: RunFolder) -> Path:
    return run.path / "attack.jsonl"


def read_findings(run: RunFolder) -> list[dict[str, Any]]:
    """Return what a tap wrote down, the last of each view and round: a cell that was resumed wrote some twice."""
    path = findings_path(run)
    lines = path.read_text().splitlines() if path.exists() else []
    found = {}
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # Its process was killed while it wrote; the round was trained again.
        found[(entry["kind"], entry["view"], entry["round"])] = entry
    return list(found.values())


def laid_out(extra: Mapping[str, Any], trained: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return vectors that a capability sent in place of an update as the values of their scope, one after the other.

    So a server reads a masked update that knows how it was put together: the `trained` values of a scope by name.
    """
    found: dict[Any, Any] = {}
    for vectors in (slot for one in extra.values() for slot in one.tensors.values()):
        for key, vector in vectors.items():
            values = [each for each in sorted(trained) if each.scope == key.scope]
            if vector.dim() != 1 or vector.numel() != sum(trained[each].numel() for each in values):
                continue
            parts = vector.double().split([trained[each].numel() for each in values])
            found |= {each: part.view(trained[each].shape) for each, part in zip(values, parts, strict=True)}
    return found


class _Tapped:
    """An engine that passes everything on; `answered` may return another answer than the client's."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def clients(self) -> Mapping[str, Any]:
        known: Mapping[str, Any] = self.engine.clients()
        return known

    def run(self, jobs: Iterable[Any], deadline: float) -> Iterator[Any]:
        for answer in self.engine.run(map(self.sent, jobs), deadline):
            yield self.answered(answer)

    def sent(self, job: Any) -> Any:
        return job

    def answered(self, answer: Any) -> Any:
        return answer

    def predict(self, state: Any, batch_size: int) -> Any:
        return self.engine.predict(state, batch_size)

    def close(self) -> None:
        self.engine.close()


@dataclass(frozen=True)
class Curious:
    """A server that follows the protocol and looks at what it is sent by `client`, and at the model of every round.

    With the files `members` and `others` it notes the losses of both; with `reads_words` what the token rows of the
    first round's update, and of the sum of all updates, say of the client's words.
    """

    client: str
    task: str
    members: str = ""
    others: str = ""
    reads_words: bool = False

    def open_engine(self, prepared: Any, run: RunFolder) -> Any:
        from fedmtl_studies.computing import open_engine

        return _CuriousEngine(open_engine(prepared, run), self, prepared, run)


class _CuriousEngine(_Tapped):
    def __init__(self, engine: Any, tap: Curious, prepared: Any, run: RunFolder) -> None:
        super().__init__(engine)
        self.tap, self.prepared, self.file = tap, prepared, findings_path(run)
        self.job: Any = None
        paths = (tap.members, tap.others) if tap.members else ()
        self.shards = [self._shard(Path(path)) for path in paths]

    def sent(self, job: Any) -> Any:
        if job.kind == "train" and job.client == self.tap.client:
            self.job = job
        return job

    def answered(self, answer: Any) -> Any:
        delta = getattr(answer, "delta", None)
        if delta is not None and self.job is not None and answer.client == self.tap.client:
            if self.shards:
                self._note_losses("update", answer.round, self.job.plan, self._moved(delta))
            if self.tap.reads_words and answer.round == 1:
                table = self.prepared.server.table
                trained = {key: one for key, one in self.job.weights.items() if self.job.plan.trains(key)}
                if table in {key.name for key in trained}:
                    self._note_words("update", delta or laid_out(answer.extra, trained), answer.rows)
                else:
                    # A table that is fixed or stays at its client is in nothing that a server sees.
                    for view in ("update", "sum"):
                        self._note_words(view, {}, None)
            self.job = None
        return answer

    def predict(self, state: Any, batch_size: int) -> Any:
        if self.shards:
            self._note_losses("model", state.round, state.plan, state.weights)
        if self.tap.reads_words and state.round == 1:
            before = self.prepared.state.weights
            table = self.prepared.server.table
            self._note_words(
                "sum", {key: state.weights[key] - before[key] for key in before if key.name == table}, None
            )
        return super().predict(state, batch_size)

    def _moved(self, delta: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return the client's model as the server can put it together: what it sent, and how far that moved."""
        fixed = {key: value for key, value in self.prepared.state.weights.items() if key.scope == "fixed"}
        before = {**fixed, **self.job.weights}
        return {key: value + delta[key] if key in delta else value for key, value in before.items()}

    def _shard(self, path: Path) -> Any:
        import numpy as np

        from fedmtl_studies.computing import TextShard, encode_texts, labelled_sets

        task = self.prepared.tasks[self.tap.task]
        examples = labelled_sets(task, path)[task.name]
        tokenizer, length = self.prepared.encoder.tokenizer, self.prepared.config.model.max_length
        tokens = encode_texts(task, examples.texts, tokenizer, length)
        return TextShard(tokens, examples.labels, np.arange(len(examples.labels), dtype=np.int64))

    def _note_losses(self, view: View, round_number: int, plan: Any, weights: dict[Any, Any]) -> None:
        import torch

        from fedmtl_studies.computing import BoundModel, predict_together

        name = self.tap.task
        bound = BoundModel(self.prepared.model, plan, [name], "", weights, read=True)
        losses = []
        for shard in self.shards:
            outputs, _ = predict_together(bound, [name], shard, 64, torch.device("cpu"), labelled=False)
            chances = torch.from_numpy(outputs[name]).double().log_softmax(1)
            losses.append((-chances[torch.arange(len(chances)), torch.from_numpy(shard.labels)]).tolist())
        self._note(kind="losses", view=view, round=round_number, members=losses[0], others=losses[1])

    def _note_words(self, view: View, delta: Mapping[Any, Any], rows: Any) -> None:
        moved = [0.0] * self.prepared.model.vocabulary_size
        for key, value in delta.items():
            if key.name == self.prepared.server.table:
                ids = range(len(moved)) if rows is None else rows.tolist()
                for number, norm in zip(ids, value.float().norm(dim=1).tolist(), strict=True):
                    moved[number] = max(moved[number], norm)
        shards = self.prepared.population.train[self.tap.client].values()
        used = (number for shard in shards for ids in shard.used_ids() for number in ids.tolist())
        special = self.prepared.encoder.tokenizer.all_special_ids
        self._note(kind="words", view=view, round=1, **vars(recovered_words(moved, used, special)))

    def _note(self, **finding: Any) -> None:
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finding) + "\n")


@dataclass(frozen=True)
class Attack:
    """What a hostile client does: train on flipped labels, multiply its update, lie about how many examples it has."""

    words: str
    flips: bool = False
    factor: float = 1.0
    claims: Literal["", "updates", "joining"] = ""


ATTACKS: Mapping[str, Attack] = {
    "honest": Attack("is honest"),
    "labels": Attack("trains on flipped labels", flips=True),
    "labels-claim": Attack("the same, and claims a million examples in its updates", flips=True, claims="updates"),
    "labels-join": Attack("the same, and claims them when it joins", flips=True, claims="joining"),
    # About as long as an update may be where `max_update_norm` leaves room for the longest honest one.
    "sign-3": Attack("returns its update times -3", factor=-3.0),
    "sign-10": Attack("returns its update times -10", factor=-10.0),
}


@dataclass(frozen=True)
class Hostile:
    """A client that behaves as one of the attacks says; what its file has to say for that is its cell's business."""

    client: str
    attack: str

    def open_engine(self, prepared: Any, run: RunFolder) -> Any:
        from fedmtl_studies.computing import open_engine

        return HostileEngine(open_engine(prepared, run), self.client, ATTACKS[self.attack])


class HostileEngine(_Tapped):
    """An engine whose hostile client changes its answers on the way."""

    def __init__(self, engine: Any, client: str, attack: Attack) -> None:
        super().__init__(engine)
        self.client, self.attack = client, attack

    def clients(self) -> Mapping[str, Any]:
        known = super().clients()
        if self.attack.claims != "joining":
            return known
        examples = dict.fromkeys(known[self.client].num_examples, CLAIM)
        return {**known, self.client: replace(known[self.client], num_examples=examples)}

    def answered(self, answer: Any) -> Any:
        delta = getattr(answer, "delta", None)
        if not delta or answer.client != self.client:
            return answer
        if self.attack.claims:
            # Whoever claims it when joining claims it in every update.
            answer = replace(answer, num_examples=dict.fromkeys(answer.num_examples, CLAIM))
        if self.attack.factor == 1.0:
            return answer
        return replace(answer, delta={key: self.attack.factor * value for key, value in delta.items()})
