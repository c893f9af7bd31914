"""What a run's workers import before they are forked, so that they share it. Loads no numeric library itself."""

from __future__ import annotations

from fedmtl.config import Config
from fedmtl.model.encoder_files import holds_bert_values

ENGINE = "fedmtl.engines.local"
# Other kinds of encoders import most of it too.
ENCODER_CODE = "transformers.models.bert.modeling_bert"
# Its import takes seconds.
LORA_CODE = "peft"


def worker_imports(config: Config) -> list[str]:
    """The engine, and transformers' code for models where values alone will not do."""
    values_only = config.compute.encoder != "plain" and holds_bert_values(config.model)
    lora = [] if config.model.lora is None else [LORA_CODE]
    return [ENGINE] if values_only else [ENGINE, ENCODER_CODE, *lora]
