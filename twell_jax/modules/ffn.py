"""Feed-forward layers: the sparse one, and the dense one that people compare with."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import BACKENDS, FfnPlan, FfnStats
from twell_jax.modules.config import ACTIVATIONS, check_choice
from twell_jax.modules.initializers import linear_init, row_init
from twell_jax.modules.sharded_ffn import sharded_sparse_ffn


def _create_weights(
    module, hidden_size, intermediate_size, gated, dtype, param_dtype, down_init, rngs
):
    """Neuron-major `[H, D]` parameters; `w_gate` is None in the non-gated layer."""
    shape = (intermediate_size, hidden_size)
    # The gate draws last, so that up and down do not depend on whether there is one.
    module.w_up = nnx.Param(row_init(rngs.params(), shape, param_dtype))
    module.w_down = nnx.Param(down_init(rngs.params(), shape, param_dtype))
    module.w_gate = nnx.Param(row_init(rngs.params(), shape, param_dtype)) if gated else None
    module.dtype = dtype


def _weights(module):
    weights = (module.w_gate, module.w_up, module.w_down)
    return tuple(None if weight is None else weight[...] for weight in weights)


class SparseFFN(nnx.Module):
    """`(relu(x Wg') * (x Wu')) Wd`, or `relu(x Wu') Wd`, with its activation statistics.

    How fast the zeros of the activation make it is up to the backend: the reference, the only
    one on CPUs, costs what a dense layer costs.

    To make it sparse, add `coefficient * stats.l1` to the loss, averaged over layers.
    The weights are neuron-major, `[intermediate_size, hidden_size]`.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        gated: bool = True,
        backend: str = "auto",
        plan: FfnPlan = FfnPlan(),  # noqa: B008
        dtype=jnp.bfloat16,
        param_dtype=jnp.float32,
        down_init=linear_init,
        rngs: nnx.Rngs,
    ):
        """`backend`: one of `pallas_kernels.BACKENDS`; `down_init`: initialiser of `w_down`.

        `plan`: which neurons are computed how; over a mesh it is that of one tensor shard.
        """
        check_choice("backend", backend, BACKENDS)
        _create_weights(
            self, hidden_size, intermediate_size, gated, dtype, param_dtype, down_init, rngs
        )
        self.backend = backend
        self.plan = plan

    def __call__(
        self, x: jax.Array, token_mask: jax.Array | None = None
    ) -> tuple[jax.Array, FfnStats]:
        """Applies the layer.

        Args:
          x: `[..., hidden_size]`.
          token_mask: bool `[...]`, True for the tokens that count in the statistics.

        Returns:
          `y`, `[..., hidden_size]` in `dtype`, and the statistics of this layer.
        """
        return sharded_sparse_ffn(
            x.astype(self.dtype),
            *_weights(self),
            token_mask,
            backend=self.backend,
            plan=self.plan,
        )


class DenseFFN(nnx.Module):
    """`(act(x Wg') * (x Wu')) Wd` (or `act(x Wu') Wd`) without statistics: the baseline.

    Same parameters as `SparseFFN`; with "relu" it is the same function.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str = "silu",
        gated: bool = True,
        dtype=jnp.bfloat16,
        param_dtype=jnp.float32,
        down_init=linear_init,
        rngs: nnx.Rngs,
    ):
        """`activation`: "relu", "silu" or "gelu" (its tanh form); `down_init`: of `w_down`."""
        check_choice("activation", activation, ACTIVATIONS)
        _create_weights(
            self, hidden_size, intermediate_size, gated, dtype, param_dtype, down_init, rngs
        )
        self.activation = activation

    def __call__(self, x: jax.Array, token_mask: jax.Array | None = None) -> tuple[jax.Array, None]:
        """Applies the layer; same arguments and result as `SparseFFN`, with None as statistics."""
        del token_mask
        activation = getattr(jax.nn, self.activation)
        w_gate, w_up, w_down = (
            None if weight is None else weight.astype(self.dtype) for weight in _weights(self)
        )
        x = x.astype(self.dtype)
        # The names that remat="ffn" saves.
        up = checkpoint_name(x @ w_up.T, "ffn_up")
        if w_gate is None:
            hidden = activation(up)
        else:
            hidden = activation(checkpoint_name(x @ w_gate.T, "ffn_gate")) * up
        return hidden @ w_down, None
