"""Every setting of a run: its shape, its default and the rules it obeys (schema), and its file."""

from fedmtl.config.kinds import Section
from fedmtl.config.methods import (
    AdaptersConfig,
    DistillationConfig,
    LoraConfig,
    PruningConfig,
    SmartConfig,
    TaskWeightingConfig,
)
from fedmtl.config.schema import (
    Average,
    CheckpointConfig,
    ComputeConfig,
    Config,
    EvaluationConfig,
    FederationConfig,
    Level,
    Mode,
    ModelConfig,
    ServerOptimizerConfig,
    TrainingConfig,
    WireConfig,
)
from fedmtl.config.sharing import AdaptiveSharingConfig, SharingConfig
from fedmtl.config.tasks import (
    ClientConfig,
    DataConfig,
    HeadConfig,
    Pair,
    PartitionConfig,
    Pool,
    SourceConfig,
    TaskConfig,
)

__all__ = [
    "AdaptersConfig",
    "AdaptiveSharingConfig",
    "Average",
    "CheckpointConfig",
    "ClientConfig",
    "ComputeConfig",
    "Config",
    "DataConfig",
    "DistillationConfig",
    "EvaluationConfig",
    "FederationConfig",
    "HeadConfig",
    "Level",
    "LoraConfig",
    "Mode",
    "ModelConfig",
    "Pair",
    "PartitionConfig",
    "Pool",
    "PruningConfig",
    "Section",
    "ServerOptimizerConfig",
    "SharingConfig",
    "SmartConfig",
    "SourceConfig",
    "TaskConfig",
    "TaskWeightingConfig",
    "TrainingConfig",
    "WireConfig",
]
