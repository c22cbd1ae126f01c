"""Initial weights: truncated normal with variance `scale / fan_in`."""

from flax import nnx

# [inputs, outputs], the layout of nnx.Linear.
linear_init = nnx.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")

# [outputs, inputs]: the gate and up weights of a feed-forward layer, [H, D]; an
# embedding that also serves as head, [vocab, D].
row_init = nnx.initializers.variance_scaling(
    1.0, "fan_in", "truncated_normal", in_axis=-1, out_axis=-2
)


def residual_init(num_layers: int):
    """For `[inputs, outputs]` weights that write to the residual stream.

    Variance is divided by the number of writers, two a block, so that what all of them
    together add to the stream does not grow with depth (GPT-2).
    """
    return nnx.initializers.variance_scaling(0.5 / num_layers, "fan_in", "truncated_normal")
