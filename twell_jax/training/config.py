"""Everything a run depends on, as typed fields; `--config.section.field=value` sets one."""

import dataclasses

from twell_jax.errors import ConfigError
from twell_jax.modules.config import TransformerConfig, check_at_least, check_choice, check_positive
from twell_jax.sharding import DATA, FSDP, MESH_AXES, TENSOR

STDLIB = "stdlib"
ON_NONFINITE = ("stop", "skip")


def _check_share(field, value):
    if not 0 <= value <= 1:
        raise ConfigError(f"{field}: must be from 0 to 1, got {value}")


@dataclasses.dataclass
class DataConfig:
    """Where the text comes from.

    Attributes:
      path: folder made by `python -m twell_jax.prepare`; "stdlib" prepares the source
        of the running Python's standard library into a folder of WORKDIR/data.
      sequence_length: tokens of a training example.
      stdlib_vocab_size: size of the tokenizer trained on the standard library.
      stdlib_max_bytes: how much of the standard library to use; 0 means all of it.
    """

    path: str = STDLIB
    sequence_length: int = 1024
    stdlib_vocab_size: int = 2048
    stdlib_max_bytes: int = 0

    def validate(self, prefix: str) -> None:
        """Raises ConfigError naming the first wrong field."""
        check_at_least(f"{prefix}sequence_length", self.sequence_length, 2)
        check_at_least(f"{prefix}stdlib_vocab_size", self.stdlib_vocab_size, 257)
        check_at_least(f"{prefix}stdlib_max_bytes", self.stdlib_max_bytes, 0)


@dataclasses.dataclass
class MeshConfig:
    """Devices along each axis of the mesh; see `twell_jax.sharding`. One may be -1: the rest.

    Attributes:
      data: copies of the weights, each with its share of a batch.
      fsdp: parts that weights and optimizer state are cut into, each with its share of a batch.
      tensor: parts that hidden neurons, heads and vocabulary are cut into.
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1

    def validate(self, prefix: str) -> None:
        """Raises ConfigError naming the first wrong field."""
        shape = (self.data, self.fsdp, self.tensor)
        for name, size in zip(MESH_AXES, shape, strict=True):
            if size != -1:
                check_at_least(f"{prefix}{name}", size, 1)
        if shape.count(-1) > 1:
            raise ConfigError(f"{prefix}*: only one axis may be -1, got {shape}")


@dataclasses.dataclass
class OptimizerConfig:
    """AdamW behind a global-norm clip; linear warm-up, then a cosine to the floor.

    Attributes:
      learning_rate: the peak, reached by the last warm-up step.
      warmup_steps: steps of the linear warm-up.
      final_learning_rate_ratio: learning rate of the last step over the peak.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      weight_decay: of matrices; norms and biases are never decayed.
      decay_embeddings: decay the embedding and the head, too.
      clip_norm: largest global gradient norm; 0 clips nothing.
    """

    learning_rate: float = 1e-3
    warmup_steps: int = 100
    final_learning_rate_ratio: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay_embeddings: bool = False
    clip_norm: float = 1.0

    def validate(self, prefix: str) -> None:
        """Raises ConfigError naming the first wrong field."""
        check_positive(f"{prefix}learning_rate", self.learning_rate)
        check_at_least(f"{prefix}warmup_steps", self.warmup_steps, 0)
        _check_share(f"{prefix}final_learning_rate_ratio", self.final_learning_rate_ratio)
        for field in ("b1", "b2"):
            decay = getattr(self, field)
            if not 0 <= decay < 1:
                raise ConfigError(f"{prefix}{field}: must be from 0 to below 1, got {decay}")
        check_positive(f"{prefix}eps", self.eps)
        check_at_least(f"{prefix}weight_decay", self.weight_decay, 0)
        check_at_least(f"{prefix}clip_norm", self.clip_norm, 0)


@dataclasses.dataclass
class L1Config:
    """The penalty that makes the layers sparse: `coefficient * mean over layers of l1`.

    Attributes:
      coefficient: of the penalty; where the controller starts, with `target_l0`.
      warmup_steps: the coefficient rises linearly from 0 over these steps; with
        `target_l0` it is the goal of the controller that falls to the target over them.
      target_l0: mean number of active neurons of a layer, per token, that a controller
        holds by moving the coefficient; 0 keeps the coefficient fixed.
      min_coefficient: the controller's lower limit.
      max_coefficient: the controller's upper limit.
    """

    coefficient: float = 2e-4
    warmup_steps: int = 0
    target_l0: float = 0.0
    min_coefficient: float = 1e-7
    max_coefficient: float = 1e-1

    def validate(self, prefix: str) -> None:
        """Raises ConfigError naming the first wrong field."""
        check_at_least(f"{prefix}coefficient", self.coefficient, 0)
        check_at_least(f"{prefix}warmup_steps", self.warmup_steps, 0)
        check_at_least(f"{prefix}target_l0", self.target_l0, 0)
        if self.target_l0:
            check_positive(f"{prefix}min_coefficient", self.min_coefficient)
            check_at_least(f"{prefix}max_coefficient", self.max_coefficient, self.min_coefficient)
            if not self.min_coefficient <= self.coefficient <= self.max_coefficient:
                raise ConfigError(
                    f"{prefix}coefficient: the controller starts from it, so it must lie in "
                    f"[{self.min_coefficient}, {self.max_coefficient}], got {self.coefficient}"
                )


@dataclasses.dataclass
class TrainConfig:
    """The run itself.

    Attributes:
      num_steps: optimizer steps.
      batch_size: examples of a step, over all devices.
      micro_batch_size: examples that are computed at once; gradients are accumulated
        over `batch_size / micro_batch_size` of them. 0 computes the whole batch at once.
      seed: of the initial weights and of the order of the data.
      z_loss: weight of the squared log-normaliser of the logits, added to the loss.
      loss_chunk_tokens: tokens of a device whose logits are held at once: a chunk of 8192
        over a vocabulary of 49,152 takes 1.6 GB. 0 holds those of the whole micro-batch.
      on_nonfinite: what a step with a NaN or inf in its loss or gradient does, after its
        update was discarded: "stop" the run, or "skip" the step and go on.
      max_skipped_in_a_row: so many skipped steps without a good one between end the run.
      dead_after_steps: a neuron that has not fired on any token of so many steps counts as
        dead: a window of that many times `batch_size * data.sequence_length` tokens.
      revive_every_steps: steps between revivals of dead neurons, see
        `twell_jax.training.revive`; 0 revives none.
    """

    num_steps: int = 1000
    batch_size: int = 64
    micro_batch_size: int = 0
    seed: int = 0
    z_loss: float = 0.0
    loss_chunk_tokens: int = 8192
    on_nonfinite: str = "stop"
    max_skipped_in_a_row: int = 20
    dead_after_steps: int = 100
    revive_every_steps: int = 0

    def validate(self, prefix: str) -> None:
        """Raises ConfigError naming the first wrong field."""
        check_at_least(f"{prefix}num_steps", self.num_steps, 1)
        check_at_least(f"{prefix}batch_size", self.batch_size, 1)
        check_at_least(f"{prefix}micro_batch_size", self.micro_batch_size, 0)
        check_at_least(f"{prefix}seed", self.seed, 0)
        if self.micro_batch_size and self.batch_size % self.micro_batch_size:
            raise ConfigError(
                f"{prefix}micro_batch_size: must divide batch_size = {self.batch_size}, "
                f"got {self.micro_batch_size}"
            )
        check_at_least(f"{prefix}z_loss", self.z_loss, 0)
        check_at_least(f"{prefix}loss_chunk_tokens", self.loss_chunk_tokens, 0)
        check_choice(f"{prefix}on_nonfinite", self.on_nonfinite, ON_NONFINITE)
        check_at_least(f"{prefix}max_skipped_in_a_row", self.max_skipped_in_a_row, 1)
        check_at_least(f"{prefix}dead_after_steps", self.dead_after_steps, 1)
        check_at_least(f"{prefix}revive_every_steps", self.revive_every_steps, 0)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a step."""
        return self.batch_size // (self.micro_batch_size or self.batch_size)


@dataclasses.dataclass
class PlanConfig:
    """How sparse layers are divided into a dense and a sparse band, see `pallas_kernels.plan`.

    Plans follow the measured firing rates. They change the speed, not the function, and only
    where kernels serve the backward pass: elsewhere nothing is planned.

    Attributes:
      every_steps: steps between new plans; 0 packs all neurons of all layers from the start.
      min_gain: predicted share of a layer's time that a new plan must save. A new one costs a
        compilation of the step.
    """

    every_steps: int = 200
    min_gain: float = 0.03

    def validate(self, prefix: str) -> None:
        """Raises ConfigError naming the first wrong field."""
        check_at_least(f"{prefix}every_steps", self.every_steps, 0)
        _check_share(f"{prefix}min_gain", self.min_gain)


@dataclasses.dataclass
class LogConfig:
    """What a run reports, and how often; none of it changes the training.

    Attributes:
      every_steps: steps between rows of metrics.
      evaluate_every_steps: steps between evaluations on held-out text; 0 evaluates at
        the end only.
      sample_prompt: start of the text that is generated at the end.
      sample_tokens: number of tokens to generate.
      sample_temperature: of the sampling; 0 takes the likeliest token.
    """

    every_steps: int = 10
    evaluate_every_steps: int = 0
    sample_prompt: str = ""
    sample_tokens: int = 100
    sample_temperature: float = 0.8

    def validate(self, prefix: str) -> None:
        """Raises ConfigError naming the first wrong field."""
        check_at_least(f"{prefix}every_steps", self.every_steps, 1)
        check_at_least(f"{prefix}evaluate_every_steps", self.evaluate_every_steps, 0)
        check_at_least(f"{prefix}sample_tokens", self.sample_tokens, 0)
        check_at_least(f"{prefix}sample_temperature", self.sample_temperature, 0)


@dataclasses.dataclass
class CheckpointConfig:
    """When to save.

    Attributes:
      every_steps: steps between checkpoints; the last step is always saved.
      keep: how many of the newest checkpoints to keep.
    """

    every_steps: int = 500
    keep: int = 2

    def validate(self, prefix: str) -> None:
        """Raises ConfigError naming the first wrong field."""
        check_at_least(f"{prefix}every_steps", self.every_steps, 1)
        check_at_least(f"{prefix}keep", self.keep, 1)


@dataclasses.dataclass
class Config:
    """A whole run."""

    model: TransformerConfig = dataclasses.field(default_factory=TransformerConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    l1: L1Config = dataclasses.field(default_factory=L1Config)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    plan: PlanConfig = dataclasses.field(default_factory=PlanConfig)
    log: LogConfig = dataclasses.field(default_factory=LogConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)

    def validate(self) -> None:
        """Raises ConfigError naming, as a flag, the first field that is wrong."""
        for field in dataclasses.fields(self):
            getattr(self, field.name).validate(f"--config.{field.name}.")
        if self.optimizer.warmup_steps >= self.train.num_steps:
            raise ConfigError(
                "--config.optimizer.warmup_steps: must be less than train.num_steps = "
                f"{self.train.num_steps}, got {self.optimizer.warmup_steps}"
            )
        if self.model.param_dtype != "float32":
            raise ConfigError(
                "--config.model.param_dtype: training needs float32, got "
                f"{self.model.param_dtype!r}: with a bfloat16 parameter most updates round to "
                "nothing. model.dtype sets what the model computes in"
            )
        if self.model.ffn == "dense" and (self.l1.coefficient or self.l1.target_l0):
            raise ConfigError(
                "--config.l1.coefficient: the dense layer has no activation statistics; set "
                "l1.coefficient and l1.target_l0 to 0, or model.ffn to sparse"
            )
        if self.model.ffn == "dense" and self.train.revive_every_steps:
            raise ConfigError(
                "--config.train.revive_every_steps: dense layers do not know dead neurons; set "
                "it to 0, or model.ffn to sparse"
            )
        if self.l1.target_l0 >= self.model.intermediate_size:
            raise ConfigError(
                "--config.l1.target_l0: must be less than model.intermediate_size = "
                f"{self.model.intermediate_size}, got {self.l1.target_l0}"
            )

    def check_divides(self, mesh_shape: dict[str, int]) -> None:
        """Raises ConfigError if something does not divide over a mesh, with the numbers."""
        batch_devices = mesh_shape[DATA] * mesh_shape[FSDP]
        kv_heads = self.model.resolved_num_kv_heads
        for field, size, axes, devices in (
            ("train.batch_size", self.train.batch_size, "data * fsdp", batch_devices),
            ("train.micro_batch_size", self.train.micro_batch_size, "data * fsdp", batch_devices),
            ("model.hidden_size", self.model.hidden_size, FSDP, mesh_shape[FSDP]),
            ("model.intermediate_size", self.model.intermediate_size, TENSOR, mesh_shape[TENSOR]),
            ("model.num_kv_heads", kv_heads, TENSOR, mesh_shape[TENSOR]),
            ("model.vocab_size", self.model.vocab_size, TENSOR, mesh_shape[TENSOR]),
        ):
            if size % devices:
                raise ConfigError(
                    f"--config.{field}: {size} does not divide over the {devices} devices of "
                    f"{axes} in the mesh {dict(mesh_shape)}"
                )
