"""A configuration small enough to train in a test, and data for it."""

import json

import numpy as np

from twell_jax.data import store
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

VOCAB_SIZE = 259
TEXT = "The quick brown fox jumps over the lazy dog, and then it does so again. "


def make_config(data_path) -> Config:
    """A fresh configuration of a model of 30 k parameters."""
    return Config(
        model=TransformerConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            intermediate_size=64,
            num_layers=2,
            num_heads=2,
            dtype="float32",
            ffn_backend="reference",
        ),
        data=DataConfig(path=str(data_path), sequence_length=16),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=3),
        l1=L1Config(coefficient=1e-3),
        train=TrainConfig(num_steps=12, batch_size=8),
        log=LogConfig(every_steps=2, sample_tokens=4),
        checkpoint=CheckpointConfig(every_steps=4, keep=10),
    )


def write_data(folder, num_documents=40):
    """A prepared folder of short documents made of bytes; the separator is token 0."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    rng = np.random.default_rng(0)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(folder / store.TOKENIZER))
    writers = {split: store.SplitWriter(folder, split, "uint16") for split in store.SPLITS}
    for number in range(num_documents):
        first = int(rng.integers(0, 40))
        ids = tokenizer.encode(TEXT[first:]).ids
        writers["validation" if number % 10 == 9 else "train"].write(np.asarray([*ids, 0]))
    for writer in writers.values():
        writer.close()
    manifest = {
        "format_version": store.FORMAT_VERSION,
        "splits": {split: writer.manifest() for split, writer in writers.items()},
        "record_tokens": store.RECORD_TOKENS,
        "token_dtype": "uint16",
        "vocab_size": VOCAB_SIZE,
    }
    (folder / store.MANIFEST).write_text(json.dumps(manifest))
    return folder
