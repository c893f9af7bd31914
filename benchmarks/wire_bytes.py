"""Bytes of one client and round, down and up, as `results.csv` counts them: bert-tiny's shape on real text.

    python benchmarks/wire_bytes.py --data FOLDER --tokenizer FOLDER --out wire_bytes.json

FOLDER of the data has sst2, qqp and stsb as `data.root` wants them; the tokenizer's has 30,522 pieces for the figures
in docs/wire.md. The encoder has 2 layers, 128 wide, with random weights: sizes do not depend on them. `one task`: three
clients, 300 samples of one task each. `three tasks`: one client with 300 samples of each. Two rounds are run, and the
second is shown: its updates carry what the first one lost.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

TASKS = ("sst2", "qqp", "stsb")
CODECS = {
    "fp32": (),
    "fp16": ("wire.down=fp16", "wire.up=fp16"),
    "int8": ("wire.down=int8", "wire.up=int8"),
    "int8, topk 5%": ("wire.down=int8", "wire.up=topk", "wire.topk_share=0.05"),
    "int8, topk 1%": ("wire.down=int8", "wire.up=topk", "wire.topk_share=0.01"),
}
CLIENTS = {
    "one task": [f"clients={{{', '.join(f'{task}: {{tasks: [{task}]}}' for task in TASKS)}}}"],
    "three tasks": [f"clients={{all: {{tasks: [{', '.join(TASKS)}]}}}}"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=300)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        encoder = make_encoder(arguments.tokenizer, Path(folder) / "encoder")
        fixed = [
            f"model.server_model={encoder}",
            f"data.root={arguments.data.resolve()}",
            *(f"tasks.{task}={{train_samples: {arguments.samples}, val_samples: 8}}" for task in TASKS),
            "training.num_rounds=2",
            "compute.device=cpu",
            f"output={folder}/runs",
        ]
        for clients, settings in CLIENTS.items():
            for codec, wire in CODECS.items():
                results += measure([*fixed, *settings, *wire], clients, codec)
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


def make_encoder(tokenizer: Path, folder: Path) -> Path:
    from transformers import AutoTokenizer, BertConfig, BertModel

    pieces = AutoTokenizer.from_pretrained(tokenizer)
    BertModel(
        BertConfig(
            vocab_size=len(pieces),
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=512,
        )
    ).save_pretrained(folder)
    pieces.save_pretrained(folder)
    return folder


def measure(settings: list[str], clients: str, codec: str) -> list[dict[str, Any]]:
    from fedmtl.config.file import load_config
    from fedmtl.experiment.run import start_run
    from fedmtl.runs.events import UpdateEvent
    from fedmtl.runs.log import read_events

    run = start_run(load_config(None, ["defaults=plain", *settings]), "bytes")
    found = []
    for event in read_events(run):
        if isinstance(event, UpdateEvent) and event.round == 2:
            down, up = event.bytes_down / 1e6, event.bytes_up / 1e6
            found.append({"clients": clients, "client": event.client, "codec": codec, "mb_down": down, "mb_up": up})
            print(f"{clients:12} {event.client:5} {codec:14} down {down:.3f}  up {up:.3f}  sum {down + up:.3f} MB")
    return found


if __name__ == "__main__":
    main()
