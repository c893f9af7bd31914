"""Every setup of the study of multi-task methods, and which row of which table it is.

The report: A. J. Sood, C. Heskett, S. Lee, "Strategies for Optimization of minBERT for Multi-Task Learning",
Stanford CS224N, 2024. Its tables keep their numbers here. Where we differ:

* Every multi-task row trains on the same number of examples; the report's table 4 had 3.3 times the steps of the others
  (13 times the examples with batches of 64). A single-task model gets as many as a whole multi-task one, or, in rows of
  their own, a third: then the three together cost what the multi-task model does.
* A step of `joint` has a batch of every task, so these rows take a third of the steps.
* The report's LoRA is W + a B A; PEFT divides by the rank, so its a is `alpha: a * rank` here.
* It does not say which mode its combined model has LoRA in: `full_model`, in which its PALs train as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedmtl.study.setups import Settings, merged

# Later than any round: the task is scored and never trained.
NEVER = 1_000_000_000
THIRD = 1 / 3


@dataclass(frozen=True)
class Tasks:
    """The three tasks in the report's order."""

    sentiment: str
    paraphrase: str
    similarity: str

    def __iter__(self) -> Iterator[str]:
        return iter((self.sentiment, self.paraphrase, self.similarity))


TASKS = Tasks("sst5", "qqp", "stsb")


@dataclass(frozen=True)
class Setup:
    """One kind of run: what it changes in the base, its share of the base's steps, and a task it trains alone.

    `rate` multiplies the base's learning rate.
    """

    settings: Settings = field(default_factory=dict)
    share: float = 1.0
    rate: float = 1.0
    trains: str | None = None
    without_cfimdb: bool = False


@dataclass(frozen=True)
class Row:
    """A row of a table: its words, its setup, and the report's row of these words where it has one."""

    words: str
    setup: str
    report: str | None = None
    is_single: bool = False


LORA = [(1, 1), (4, 1), (8, 1), (16, 1), (1, 8), (4, 8), (8, 8), (16, 8), (16, 16)]
# (radius, weight): the report calls them alpha and lambda.
SMART = [("1e-5", "1e-4"), ("1e-5", "1e-3"), ("1e-5", "1e-2"), ("1e-2", "1e-3"), ("1e-2", "1e-2"), ("1e-2", "1e-1")]
ADAPTERS = {
    "low-rank": ("Low-rank", {"kind": "low_rank"}),
    "pals": ("PALs", {"kind": "pals"}),
    "pals-shared": ("PALs Shared V", {"kind": "pals", "share": "projections"}),
    "mixed": ("Mixed Adaption", {"kind": "mixed"}),
    "pals-all": ("PALs Shared V, SA", {"kind": "pals", "share": "all"}),
}


def setups(tasks: Tasks, batch_size: int) -> dict[str, Setup]:
    """Every setup by its name, which is the name of its cells."""
    return {
        **_baselines(tasks),
        **_schedules(),
        **_lora(),
        **_adapters(tasks),
        **_smart(),
        **_combined(batch_size),
    }


def _baselines(tasks: Tasks) -> dict[str, Setup]:
    return {
        "single-sentiment": Setup(trains=tasks.sentiment),
        "single-paraphrase": Setup(trains=tasks.paraphrase),
        "single-similarity": Setup(trains=tasks.similarity),
        "third-sentiment": Setup(trains=tasks.sentiment, share=THIRD),
        "third-paraphrase": Setup(trains=tasks.paraphrase, share=THIRD),
        "third-similarity": Setup(trains=tasks.similarity, share=THIRD),
        "single-sentiment-no-cfimdb": Setup(trains=tasks.sentiment, without_cfimdb=True),
        "epoch": _scheduled("epoch"),
        "annealed-no-cfimdb": Setup(without_cfimdb=True),
    }


def _scheduled(kind: str, share: float = 1.0, **training: Any) -> Setup:
    return Setup({"training": {"task_schedule": kind, **training}}, share)


def _schedules() -> dict[str, Setup]:
    return {
        "annealed": _scheduled("annealed"),
        "annealed-eval-5": Setup({"training": {"task_schedule": "annealed"}, "evaluation": {"every": 5}}),
        **{
            kind.replace("_", "-"): _scheduled(kind)
            for kind in ("random", "round_robin", "proportional", "temperature", "even")
        },
        "joint": _scheduled("joint", THIRD),
        "joint-pcgrad": _scheduled("joint", THIRD, gradients="pcgrad"),
        "joint-uncertainty": _scheduled("joint", THIRD, loss_weighting="uncertainty"),
    }


def _lora() -> dict[str, Setup]:
    last_linear = {
        f"lora-r{rank}-a{alpha}": Setup(_lora_settings(rank, alpha * rank, "last_linear")) for rank, alpha in LORA
    }
    return {
        **last_linear,
        "lora-full-r4-a8": Setup(_lora_settings(4, 32, "full_model")),
        "lora-adapters-r4": Setup(_lora_settings(4, 32, "adapters")),
        "lora-adapters-r8": Setup(_lora_settings(8, 64, "adapters")),
        # Few values that start at zero: what suits all weights moves them little.
        "lora-adapters-r4-fast": Setup(_lora_settings(4, 32, "adapters"), rate=10.0),
    }


def _lora_settings(rank: int, alpha: float, mode: str) -> Settings:
    return {"model": {"lora": {"rank": rank, "alpha": alpha, "mode": mode}}}


def _adapter_settings(given: Mapping[str, Any], **more: Any) -> Settings:
    return {"model": {"adapters": {**given, **more}}}


def _adapters(tasks: Tasks) -> dict[str, Setup]:
    wired = {
        f"{name}{suffix}": Setup(_adapter_settings(given, wiring=wiring))
        for name, (_, given) in ADAPTERS.items()
        for wiring, suffix in (("alternative", "-aa"), ("parallel", ""))
    }
    shared = ADAPTERS["pals-shared"][1]
    alone = _adapter_settings(shared, wiring="parallel", tasks=[tasks.sentiment])
    return {**wired, "pals-shared-sentiment": Setup(alone)}


def _smart_settings(radius: str, weight: str, **more: Any) -> Settings:
    return {"training": {"smart": {"radius": float(radius), "weight": float(weight), **more}}}


def _smart() -> dict[str, Setup]:
    grid = {f"smart-radius{radius}-weight{weight}": Setup(_smart_settings(radius, weight)) for radius, weight in SMART}
    return {
        **grid,
        "smart-perturb-both": Setup(_smart_settings("1e-2", "1e-3", perturb="both")),
        "smart-bregman": Setup(_smart_settings("1e-2", "1e-3", bregman=1.0)),
    }


def _combined(batch_size: int) -> dict[str, Setup]:
    pals = _adapter_settings(ADAPTERS["pals-shared"][1], wiring="parallel")
    with_smart = merged(pals, _smart_settings("1e-2", "1e-5"))
    return {
        "combined-1": Setup(with_smart),
        "combined-2": Setup(merged(with_smart, _lora_settings(4, 32, "full_model"))),
        "combined-ours": Setup(
            merged(merged(pals, _smart_settings("1e-2", "1e-3")), {"training": {"task_schedule": "round_robin"}})
        ),
        "combined-3": Setup(merged(pals, {"training": {"batch_size": 4 * batch_size}}), share=1 / 4),
    }


def rows(tables: Sequence[int], *, has_cfimdb: bool) -> dict[int, list[Row]]:
    """The rows of each table that compares runs, in the report's order, ours after them."""
    every = {
        1: _lora_rows(),
        2: _adapter_rows(),
        3: _smart_rows(),
        4: [
            *(Row(f"Configuration {number}", f"combined-{number}", f"Configuration {number}") for number in (1, 2, 3)),
            Row("round robin, PALs Shared V, SMART α=1e-2, λ=1e-3", "combined-ours"),
        ],
        5: _baseline_rows(has_cfimdb),
        6: _schedule_rows(),
        7: [Row("Baseline", "epoch", "Baseline"), Row("Final", "combined-1", "Final")],
    }
    return {number: every[number] for number in tables}


def _baseline_rows(has_cfimdb: bool) -> list[Row]:
    single = [
        Row(f"Baseline Finetune {name}", f"single-{role}", f"Baseline Finetune {name}", is_single=True)
        for name, role in (("SST", "sentiment"), ("Para", "paraphrase"), ("STS", "similarity"))
    ]
    thirds = [
        Row(f"{name}, a third of the steps", f"third-{role}", is_single=True)
        for name, role in (("SST", "sentiment"), ("Para", "paraphrase"), ("STS", "similarity"))
    ]
    baseline = Row("Baseline Finetune Multitask", "epoch", "Baseline Finetune Multitask")
    without = [
        Row("SST without CFIMDB", "single-sentiment-no-cfimdb", is_single=True),
        Row("Multitask AS without CFIMDB", "annealed-no-cfimdb"),
    ]
    return [*single, *thirds, baseline, Row("Multitask AS", "annealed"), *(without if has_cfimdb else [])]


def _schedule_rows() -> list[Row]:
    theirs = {
        "Multitask Random Batch": "random",
        "Multitask Round-Robin Batch": "round-robin",
        "Multitask AS Batch": "annealed",
        "Multitask AS Batch (Eval Epochs = 5)": "annealed-eval-5",
    }
    ours = ("proportional", "temperature", "even", "joint", "joint-pcgrad", "joint-uncertainty")
    return [*(Row(words, name, words) for words, name in theirs.items()), *(Row(name, name) for name in ours)]


def _lora_rows() -> list[Row]:
    last_linear = [Row(words := f"LLL + LoRA r={r}, α={a}", f"lora-r{r}-a{a}", words) for r, a in LORA]
    return [
        Row("FM (Baseline)", "annealed", "FM (Baseline)"),
        *last_linear,
        Row("FM + LoRA r=4, α=8", "lora-full-r4-a8", "FM + LoRA r=4, α=8"),
        Row("heads and LoRA r=4, α=8", "lora-adapters-r4"),
        Row("heads and LoRA r=8, α=8", "lora-adapters-r8"),
        Row("heads and LoRA r=4, α=8, ten times the rate", "lora-adapters-r4-fast"),
    ]


def _adapter_rows() -> list[Row]:
    listed = [
        Row(f"{words}{aa}", f"{name}{suffix}", f"{words}{aa}")
        for name, (words, _) in ADAPTERS.items()
        for aa, suffix in ((" (AA)", "-aa"), ("", ""))
    ]
    alone = "PALs Shared V (SST only)"
    return [Row("no adapters", "annealed"), *listed, Row(alone, "pals-shared-sentiment", alone)]


def _smart_rows() -> list[Row]:
    grid = [Row(words := f"SMART α={r}, λ={w}", f"smart-radius{r}-weight{w}", words) for r, w in SMART]
    return [
        Row("no SMART", "annealed"),
        *grid,
        Row("α=1e-2, λ=1e-3, both perturbed", "smart-perturb-both"),
        Row("α=1e-2, λ=1e-3, Bregman 1", "smart-bregman"),
    ]
