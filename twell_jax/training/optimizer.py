"""AdamW, its schedule, and which parameters it decays."""

import jax
import optax

from twell_jax.training.config import OptimizerConfig


def learning_rate_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Learning rate of update number 1, 2, … `num_steps`; update 0 would have none.

    The peak belongs to update `warmup_steps`, the floor to update `num_steps`.
    """
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0 if config.warmup_steps else config.learning_rate,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=num_steps,
        end_value=config.learning_rate * config.final_learning_rate_ratio,
    )


def decay_mask(params, decay_embeddings: bool):
    """True for the parameters that weight decay applies to: matrices, by default no tables.

    Tables are the token embedding and the head.
    """

    def decays(path, leaf):
        is_table = path[0].key in ("embedding", "head")
        return leaf.ndim >= 2 and (decay_embeddings or not is_table)

    return jax.tree.map_with_path(decays, params)


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """AdamW up to its learning rate, which the train step multiplies in.

    The step owns the learning rate because it counts every step, also the ones whose
    update is discarded.
    """
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    return optax.chain(
        clip,
        optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps),
        optax.add_decayed_weights(
            config.weight_decay, mask=lambda params: decay_mask(params, config.decay_embeddings)
        ),
    )
