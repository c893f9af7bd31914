"""The guide's start-up summary and per-round lines, with the true counts of bert-tiny's shape."""

from pathlib import Path

import pytest
from transformers import BertConfig, BertModel

from model.tiny import make_tokenizer

SUMMARY = """\
MTL Server Model Summary:
  Base Model: {encoder}
  Tasks: ['sst2', 'qqp', 'stsb']
  Shared Parameters: 4,385,920
  Task 'sst2' Head: 258 parameters
  Task 'qqp' Head: 258 parameters
  Task 'stsb' Head: 129 parameters
  Total Parameters: 4,386,565
"""
ROUND = """\
=== Round {number}/2 ===
Aggregating updates from 3 clients across 3 tasks
  Task 'sst2': 1 clients
  Task 'qqp': 1 clients
  Task 'stsb': 1 clients
Aggregated 39 shared parameters from ALL 3 clients, counted as tensors
Aggregated 2 parameters for task 'sst2' head from 1 clients, counted as tensors
Aggregated 2 parameters for task 'qqp' head from 1 clients, counted as tensors
Aggregated 2 parameters for task 'stsb' head from 1 clients, counted as tensors
"""


@pytest.fixture
def bert_tiny(tmp_path: Path) -> Path:
    # 30,522 tokens, two layers, 128 wide: embeddings 3,906,816 + 65,536 + 256 + 256, layers 2 x 198,272, pooler 16,512.
    # The tokenizer knows fewer tokens than the table has rows, as many published ones do.
    shape = BertConfig(
        vocab_size=30522,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=512,
        max_position_embeddings=512,
    )
    BertModel(shape).save_pretrained(tmp_path / "bert-tiny")
    make_tokenizer("bert").save_pretrained(tmp_path / "bert-tiny")
    return tmp_path / "bert-tiny"


def test_the_lines_of_the_guide(cli, bert_tiny, tmp_path):
    (tmp_path / "guide.yaml").write_text("""\
model: {server_model: ./bert-tiny, client_model: ./bert-tiny, pool: pooler, pair: cross}
data: {source: embedded}
training: {num_rounds: 2, local_steps: 1, batch_size: 4, learning_rate: 2e-5}
tasks:
  sst2: {train_samples: 8, val_samples: 8}
  qqp: {train_samples: 8, val_samples: 8}
  stsb: {train_samples: 8, val_samples: 8}
compute: {workers: 0, device: cpu}
""")
    done = cli("run", "guide.yaml", "--verbose")
    assert (done.code, done.err) == (0, "")
    assert SUMMARY.format(encoder=bert_tiny) in done.out
    for number in (1, 2):
        assert ROUND.format(number=number) in done.out
    assert done.out.index("=== Round 1/2 ===") > done.out.index("  after round 0: sst2 accuracy ")
    assert "report: runs/guide/report.html" in done.out.splitlines()[-1]
