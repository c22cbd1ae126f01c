"""A model of 1.3 M parameters that trains on two CPU cores in a few minutes.

Its text is the source of Python's standard library, so that nothing is downloaded.
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
            vocab_size=2048,
            hidden_size=128,
            intermediate_size=512,
            num_layers=4,
            num_heads=4,
            dtype="float32",  # CPUs compute bf16 more slowly than f32
        ),
        data=DataConfig(path="stdlib", sequence_length=128, stdlib_vocab_size=2048),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=50),
        l1=L1Config(coefficient=8e-3, warmup_steps=100),
        train=TrainConfig(num_steps=900, batch_size=16),
        log=LogConfig(every_steps=10, sample_prompt="def "),
        checkpoint=CheckpointConfig(every_steps=100),
    )
