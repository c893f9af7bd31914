"""The table of `fedmtl distill` in config/honoured.py is true: what it honours matters, what it refuses does not."""

import pytest
import torch

from compress.listening import Listener
from fedmtl.compress.distill.run import distill
from fedmtl.compress.distill.settings import DistillSettings
from fedmtl.config.file import load_config
from fedmtl.config.honoured import DISTILL
from fedmtl.errors import ConfigError
from fedmtl.experiment.run import start_run
from fedmtl.runs.log import read_events
from fedmtl.runs.summary import summarize
from small_config import SMALL

# Another value than the teacher's run has, for one key of every refused section at least.
REFUSED = (
    "mode=centralized", "model.client_model=random-1x32", "model.initial=random", "model.pool=mean",
    "model.pair=cross", "model.max_length=64", "model.head_dropout=0.7", "model.lora={rank: 2}",
    "model.adapters={size: 12, heads: 2}", "tasks.sentiment.metric=f1", "tasks.similarity.pair=cross",
    "tasks.sentiment.pool=mean", "tasks.sentiment.outputs=1", "tasks.sentiment.class_weights=balanced",
    "tasks.sentiment.dropout=0.9", "tasks.sentiment.auxiliary=true", "tasks.sentiment.weight=9",
    "tasks.sentiment.learning_rate=0.5", "tasks.sentiment.batch_size=3", "tasks.sentiment.patience=1",
    "tasks.sentiment.from_round=2", "tasks.sentiment.until_round=2", "partition.kind=dirichlet", "partition.alpha=3",
    "sharing.rules=[{'*': client}]", "training.num_rounds=7", "training.local_epochs=3", "training.local_steps=2",
    "training.learning_rate=0.9", "training.schedule=step", "training.warmup_rounds=1", "training.step_rounds=1",
    "training.step_factor=0.5", "training.task_weight_in=loss", "training.keep_optimizer=false",
    "training.proximal=1", "training.loss_weighting=fixed", "training.smart={}", "federation.average=uniform",
    "federation.clients_per_task=3", "wire.up=int8", "evaluation.every=2", "evaluation.batch_size=1",
    "checkpoint.every=1", "compute.workers=1", "compute.precision=fp32", "compute.encoder=plain",
    "methods={scaffold: {}}",
)  # fmt: skip
HONOURED = (
    "seed=5", "model.encoder_dropout=0.5", "tasks.sentiment.train_samples=9",
    "training.batch_size=5", "training.head_rate=50", "training.optimizer=sgd", "training.betas=[0.5, 0.6]",
    "training.epsilon=0.1", "training.weight_decay=0.9", "training.max_grad_norm=1e-3",
    "training.task_schedule=proportional",
)  # fmt: skip


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    sizes = (
        f"tasks.{task}={{train_samples: 12, val_samples: 8}}" for task in ("sentiment", "paraphrase", "similarity")
    )
    return start_run(load_config(None, [*SMALL, *sizes, "training.num_rounds=1", f"output={folder}"]), "teacher")


@pytest.fixture(scope="module")
def student(teacher, tmp_path_factory):
    """The digest of the student's values for some overrides of the teacher's config."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)

    def make(*overrides):
        config = load_config(teacher.config, [*overrides, f"output={tmp_path_factory.mktemp('students')}"])
        made = distill(
            teacher, config, DistillSettings("1x32", epochs_intermediate=1, epochs_prediction=1), "s", Listener()
        )
        return summarize(read_events(made.run), "s").weights_sha256

    yield make
    torch.set_num_threads(before)


def test_what_is_refused_changes_no_bit_of_the_student(student):
    for override in REFUSED:
        with pytest.raises(ConfigError, match="does not honour it"):
            DISTILL.check([override])
    assert student(*REFUSED) == student()


@pytest.mark.slow
@pytest.mark.parametrize("override", HONOURED)
def test_what_is_honoured_changes_the_student(student, override):
    DISTILL.check([override])
    assert student(override) != student()


def test_a_task_that_the_teacher_does_not_answer_is_refused(teacher, tmp_path):
    config = load_config(teacher.config, ["tasks.sst2={}", f"output={tmp_path}"])
    with pytest.raises(ConfigError, match=r"^tasks\.sst2: the teacher does not answer it; leave it out"):
        distill(teacher, config, DistillSettings("1x32"), "s", Listener())
