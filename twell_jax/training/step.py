"""One optimizer step, and one evaluation step."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from pallas_kernels import FfnPlan, FfnStats
from twell_jax.sharding import TENSOR, active_axes, axis_size
from twell_jax.training.config import Config
from twell_jax.training.l1_penalty import effective_coefficient, update_l1_state
from twell_jax.training.losses import linear_cross_entropy
from twell_jax.training.optimizer import learning_rate_schedule, make_optimizer
from twell_jax.training.state import Activity, TrainState, model_graph

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]


# Weight of the newest step in `Activity`.
_NEWEST = 0.1


def make_train_step(
    config: Config, plans: Sequence[FfnPlan] | None = None
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """A function `(state, batch) -> (state, metrics)`, to be jitted with the state donated.

    The loss is the cross-entropy summed over all targets of the batch and divided by
    their number, plus the L1 coefficient times the mean over layers of l1, itself the
    mean over all real tokens of the batch. How the batch is cut into micro-batches
    changes neither: each one is weighted by its tokens.

    An update whose loss or gradient is not finite is discarded: the step counts, and
    nothing else of the state changes.

    Metrics are f32 scalars: `loss`, `cross_entropy`, `grad_norm` (before clipping),
    `learning_rate`, `finite` (0 or 1), `num_targets`, and with sparse layers `l1_coefficient`,
    `l1` and arrays by layer: `l0`, `dead_fraction`, `max_steps_since_fired` (of its neurons),
    `dense_share` (of tokens that did not fit the format of the backend).

    `plans`, one for every layer, change the speed alone.
    """
    graph = model_graph(config.model, plans)
    optimizer = make_optimizer(config.optimizer)
    schedule = learning_rate_schedule(config.optimizer, config.train.num_steps)
    num_micro_batches = config.train.num_micro_batches

    def loss_of_micro_batch(params, batch, coefficient, num_targets, num_tokens):
        losses, aux = _token_losses(config, nnx.merge(graph, params), batch, config.train.z_loss)
        scale = 1.0 / jnp.maximum(num_targets, 1)
        loss = losses.total * scale
        cross_entropy = losses.cross_entropy * scale
        stats = aux.ffn_stats
        if stats is not None:
            weight = stats.num_tokens / jnp.maximum(num_tokens, 1)
            stats = stats._replace(l1=stats.l1 * weight, l0=stats.l0 * weight)
            loss = loss + coefficient * jnp.mean(stats.l1)
        return loss, (cross_entropy, stats)

    def loss_and_gradient(params, batch, coefficient):
        """Token-weighted (loss, (cross-entropy, stats)) and gradient of the whole batch."""
        num_targets = jnp.sum(batch["loss_mask"])
        num_tokens = jnp.sum(batch["segment_ids"] != 0)

        def of_micro_batch(micro_batch):
            return jax.value_and_grad(loss_of_micro_batch, has_aux=True)(
                params, micro_batch, coefficient, num_targets, num_tokens
            )

        if num_micro_batches == 1:
            return of_micro_batch(batch)
        micro_batches = jax.tree.map(_split_into_micro_batches, batch)
        # All parts are weighted by their share of the whole, so they add up.
        first = jax.tree.map(lambda array: array[0], micro_batches)
        zeros = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(of_micro_batch, first)
        )

        def add(total, micro_batch):
            return jax.tree.map(jnp.add, total, of_micro_batch(micro_batch)), None

        return jax.lax.scan(add, zeros, micro_batches)[0]

    def _split_into_micro_batches(array):
        # Every num_micro_batches-th example: each device keeps its own ones.
        split = array.reshape(-1, num_micro_batches, *array.shape[1:])
        return jnp.moveaxis(split, 1, 0)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        coefficient = effective_coefficient(config.l1, state.l1, state.step)
        (loss, (cross_entropy, stats)), gradient = loss_and_gradient(
            state.params, batch, coefficient
        )
        grad_norm = optax.tree.norm(gradient)
        learning_rate = schedule(state.step + 1)
        direction, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        params = jax.tree.map(
            lambda p, d: (p - learning_rate * d).astype(p.dtype), state.params, direction
        )
        activity = _updated_activity(state, stats, batch["inputs"].size)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        new_state = TrainState(
            step=state.step,
            params=params,
            opt_state=opt_state,
            l1=_updated_l1(config, state, stats),
            steps_since_fired=_updated_steps_since_fired(state, stats),
            activity=activity,
            num_skipped=state.num_skipped,
        )
        new_state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new_state, state)
        new_state = TrainState(
            **{
                **vars(new_state),
                "step": state.step + 1,
                "num_skipped": state.num_skipped + ~finite,
            }
        )
        metrics = {
            "loss": loss,
            "cross_entropy": cross_entropy,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "finite": finite,
            "num_targets": jnp.sum(batch["loss_mask"]),
        }
        if stats is not None:
            dead = new_state.steps_since_fired >= config.train.dead_after_steps
            metrics |= {
                "l1_coefficient": coefficient,
                "l1": jnp.mean(stats.l1),
                "l0": stats.l0,
                "dead_fraction": jnp.mean(dead, axis=-1),
                "max_steps_since_fired": jnp.max(new_state.steps_since_fired, axis=-1),
                "dense_share": _dense_share(stats, batch["inputs"].size),
            }
        return new_state, jax.tree.map(lambda m: jnp.asarray(m, jnp.float32), metrics)

    return train_step


def _token_losses(config, model, batch: Batch, z_loss: float):
    features, aux = model.features(batch["inputs"], batch["segment_ids"], batch["positions"])
    losses = linear_cross_entropy(
        features,
        model.head_weights(),
        batch["targets"],
        batch["loss_mask"],
        z_loss=z_loss,
        chunk_tokens=config.train.loss_chunk_tokens,
    )
    return losses, aux


def _updated_l1(config: Config, state: TrainState, stats: FfnStats | None):
    if stats is None:
        return state.l1
    return update_l1_state(
        config.l1,
        state.l1,
        state.step,
        jnp.mean(stats.l0),
        fresh_l0=config.model.intermediate_size / 2,  # ReLU of a symmetric distribution
    )


def _updated_steps_since_fired(state: TrainState, stats: FfnStats | None):
    if stats is None:
        return None
    return jnp.where(stats.fired > 0, 0, state.steps_since_fired + 1)


def _dense_share(stats: FfnStats, num_tokens: int):
    # A token counts once for every shard of its neurons.
    return stats.num_dense / (num_tokens * axis_size(active_axes((TENSOR,))))


def _updated_activity(state: TrainState, stats: FfnStats | None, num_tokens: int):
    if stats is None:
        return None
    # Every layer sees the same real tokens; with none of them nothing is learnt of the rates.
    real_tokens = stats.num_tokens[0]
    now = Activity(
        firing_rates=stats.fired / jnp.maximum(real_tokens, 1),
        dense_share=_dense_share(stats, num_tokens),
        weight=jnp.float32(1),
    )
    share = jnp.where(real_tokens > 0, _NEWEST, 0)
    return jax.tree.map(lambda old, new: old + share * (new - old), state.activity, now)


def make_eval_step(
    config: Config, plans: Sequence[FfnPlan] | None = None
) -> Callable[[dict, Batch], dict[str, jax.Array]]:
    """A function `(params, batch) -> sums`, to be jitted.

    Sums over the batch, to be added up over batches: `cross_entropy`, `num_targets`,
    `num_tokens`, and with sparse layers by layer `l1`, `l0`, `fired`. `plans` as for training.
    """
    graph = model_graph(config.model, plans)

    def eval_step(params, batch):
        losses, aux = _token_losses(config, nnx.merge(graph, params), batch, z_loss=0.0)
        sums = {
            "cross_entropy": losses.cross_entropy,
            "num_targets": jnp.sum(batch["loss_mask"]),
            "num_tokens": jnp.sum(batch["segment_ids"] != 0),
        }
        if aux.ffn_stats is not None:
            stats = aux.ffn_stats
            sums |= {
                "l1": stats.l1 * stats.num_tokens,
                "l0": stats.l0 * stats.num_tokens,
                "fired": stats.fired,
            }
        return sums

    return eval_step
