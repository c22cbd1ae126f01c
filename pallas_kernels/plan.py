"""How the neurons of a feed-forward layer are divided among ways to compute them."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class FfnPlan:
    """Bands of neurons, by their number: `| dense band | sparse band | silent band |`.

    For a caller that orders neurons by how often they fire, the busiest first. The order is
    free: permuting the rows of all three weights together leaves the layer as it is.

    Attributes:
      dense_band: so many first neurons are computed by dense matmuls, for all tokens, which is
        cheaper for a neuron that fires on more than about 1 % of them. With all neurons here
        nothing is packed. The result does not depend on it, up to the order of sums.
      silent_band: so many last neurons are left out, as if their gates were closed on every
        token. Their weights get no gradient, and `FfnStats.fired` has 0 for them. It is the
        caller's promise that they do not fire; nothing checks it.
    """

    dense_band: int = 0
    silent_band: int = 0

    def check(self, num_neurons: int) -> None:
        """Raises ValueError unless the bands fit a layer, and leave it a neuron to compute."""
        if self.dense_band < 0 or self.silent_band < 0:
            raise ValueError(f"plan: bands must not be negative, got {self}")
        if self.silent_band >= num_neurons or self.dense_band + self.silent_band > num_neurons:
            raise ValueError(f"plan: {self} does not fit a layer of {num_neurons} neurons")
