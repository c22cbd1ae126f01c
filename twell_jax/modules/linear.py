"""A linear layer whose weight gradient is f32."""

import jax
import jax.numpy as jnp
from flax import nnx


def make_linear(
    in_features: int, out_features: int, *, use_bias, kernel_init, dtype, param_dtype, rngs
) -> nnx.Linear:
    """`nnx.Linear`, computed in `dtype`, with a kernel gradient that is not rounded to it.

    So it is also summed over devices in f32.
    """

    def promote(arrays, *, dtype):
        # The kernel is rounded in `_product`.
        inputs, kernel, bias = arrays
        return inputs.astype(dtype), kernel, None if bias is None else bias.astype(dtype)

    return nnx.Linear(
        in_features,
        out_features,
        use_bias=use_bias,
        kernel_init=kernel_init,
        dtype=dtype,
        param_dtype=param_dtype,
        promote_dtype=promote,
        dot_general=lambda inputs, kernel, *_, **__: _product(inputs, kernel),
        rngs=rngs,
    )


@jax.custom_vjp
def _product(x, kernel):
    return x @ kernel.astype(x.dtype)


def _product_forward(x, kernel):
    narrow = kernel.astype(x.dtype)
    # An empty array carries the kernel's dtype to the backward pass.
    return x @ narrow, (x, narrow, jnp.zeros((0,), kernel.dtype))


def _product_backward(residuals, cotangent):
    x, narrow, like_kernel = residuals
    d_x = cotangent @ narrow.T
    d_kernel = jnp.einsum("...i,...o->io", x, cotangent, preferred_element_type=jnp.float32)
    return d_x, d_kernel.astype(like_kernel.dtype)


_product.defvjp(_product_forward, _product_backward)
