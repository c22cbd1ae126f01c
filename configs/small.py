"""56 M parameters, for one GPU.

The text is the standard library's source unless --config.data.path names a folder made
by `python -m twell_jax.prepare`; with 100 M tokens of prose it is a useful experiment.
"""

from twell_jax.modules import TransformerConfig
from twell_jax.training.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    L1Config,
    LogConfig,
    OptimizerConfig,
    TrainConfig,
)


def get_config() -> Config:
    """The configuration."""
    return Config(
        model=TransformerConfig(
            vocab_size=16384,
            hidden_size=768,
            intermediate_size=2112,
            num_layers=6,
            num_heads=12,
        ),
        data=DataConfig(path="stdlib", sequence_length=1024, stdlib_vocab_size=16384),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=200),
        l1=L1Config(coefficient=2e-4, warmup_steps=200),
        train=TrainConfig(num_steps=1800, batch_size=64),
        log=LogConfig(every_steps=10, evaluate_every_steps=600),
        checkpoint=CheckpointConfig(every_steps=300),
    )
