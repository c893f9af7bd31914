import os
import subprocess
import sys

from fedmtl.compress.pretrain.segments import train_vocabulary
from fedmtl.model.wordpiece import SPECIAL, wrap_tokenizer
from fedmtl.tasks.embedded import embedded_columns

TEXTS = embedded_columns("paraphrase", "train")["sentence1"][:300]
PRINT = (
    "from fedmtl.tasks.embedded import embedded_columns as c;"
    "from fedmtl.compress.pretrain.segments import train_vocabulary as t;"
    "print(list(t(c('paraphrase', 'train')['sentence1'][:300], 250)))"
)


def test_special_tokens_come_first_and_ids_are_whole():
    pieces = train_vocabulary(TEXTS, 250)
    assert list(pieces)[:5] == list(SPECIAL)
    assert list(pieces.values()) == list(range(250))


def test_another_process_trains_the_same_vocabulary():
    # The trainer's hash tables are seeded per process.
    environment = {**os.environ, "RAYON_NUM_THREADS": "1"}
    other = subprocess.run([sys.executable, "-c", PRINT], capture_output=True, text=True, check=True, env=environment)
    assert other.stdout.strip() == str(list(train_vocabulary(TEXTS, 250)))


def test_texts_are_lower_case_and_unknown_characters_one_piece():
    tokenizer = wrap_tokenizer(train_vocabulary(TEXTS, 250), model_max_length=32)
    assert tokenizer("The")["input_ids"] == tokenizer("the")["input_ids"]
    encoded = tokenizer("the 漢")["input_ids"]
    assert encoded[0], encoded[-1] == tokenizer.convert_tokens_to_ids(["[CLS]", "[SEP]"])
    assert encoded[-2] == tokenizer.unk_token_id


def test_few_texts_give_fewer_pieces_than_asked_for():
    pieces = train_vocabulary(["a b", "ab"], 300)
    assert set(pieces) == {*SPECIAL, "a", "b", "##b", "ab"}
