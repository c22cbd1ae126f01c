"""Evaluation on held-out text: every token once, weighted by tokens."""

import dataclasses

import jax
import numpy as np

from twell_jax.console import progress_bar
from twell_jax.data.pipeline import evaluation_batches
from twell_jax.training.config import Config


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Result of one pass over a split.

    Attributes:
      cross_entropy: mean over all targets, in nats.
      unigram_entropy: entropy in nats of the distribution of the targets: the
        cross-entropy of the best model that sees no context.
      num_targets: number of targets.
      l1: mean over layers and tokens of the sum of |h|; None with dense layers.
      l0: `[num_layers]` mean number of active neurons of a token; None with dense layers.
      silent_fraction: `[num_layers]` share of neurons that never fired; likewise.
    """

    cross_entropy: float
    unigram_entropy: float
    num_targets: int
    l1: float | None
    l0: list[float] | None
    silent_fraction: list[float] | None


def evaluate(
    config: Config, data_path: str, eval_step, params, sharding: jax.sharding.Sharding | None = None
) -> Evaluation:
    """Runs `eval_step` (jitted, from `make_eval_step`) over the validation split.

    With several processes each reads the whole split and uses its part of every batch,
    which `sharding` names.
    """
    batch_size = config.train.micro_batch_size or config.train.batch_size
    batches = evaluation_batches(
        data_path, sequence_length=config.data.sequence_length, batch_size=batch_size
    )
    totals = None
    target_counts = np.zeros(config.model.vocab_size, np.int64)
    with progress_bar("evaluating", total=None) as advance:
        for batch in batches:
            target_counts += np.bincount(
                batch["targets"][batch["loss_mask"]], minlength=config.model.vocab_size
            )
            if sharding is not None:
                batch = {name: _to_devices(array, sharding) for name, array in batch.items()}
            # Sums go on in f64 and int64 on the host: a long split overflows less.
            sums = jax.tree.map(_wide, jax.device_get(eval_step(params, batch)))
            totals = sums if totals is None else jax.tree.map(np.add, totals, sums)
            advance()
    num_targets, num_tokens = int(totals["num_targets"]), int(totals["num_tokens"])
    share = target_counts[target_counts > 0] / num_targets
    sparse = "l0" in totals
    return Evaluation(
        cross_entropy=float(totals["cross_entropy"] / num_targets),
        unigram_entropy=float(-np.sum(share * np.log(share))),
        num_targets=num_targets,
        l1=float(np.mean(totals["l1"]) / num_tokens) if sparse else None,
        l0=(totals["l0"] / num_tokens).tolist() if sparse else None,
        silent_fraction=np.mean(totals["fired"] == 0, axis=-1).tolist() if sparse else None,
    )


def _to_devices(array, sharding):
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _wide(array):
    array = np.asarray(array)
    return array.astype(np.int64 if np.issubdtype(array.dtype, np.integer) else np.float64)
