"""The feed-forward layer in f64 numpy, written from the formulas, for judging backends."""

import jax
import jax.numpy as jnp
import numpy as np


def ffn_truth(inputs) -> dict[str, np.ndarray]:
    """Every output and gradient of `sparse_ffn`, by name, with tokens flattened to `[M]`."""

    def wide(array):
        return None if array is None else np.asarray(array.astype(jnp.float32), np.float64)

    d = inputs.x.shape[-1]
    x, y_bar = wide(inputs.x).reshape(-1, d), wide(inputs.y_bar).reshape(-1, d)
    w_gate, w_up, w_down = wide(inputs.w_gate), wide(inputs.w_up), wide(inputs.w_down)
    mask = np.ones(len(x), bool)
    if inputs.token_mask is not None:
        mask = np.asarray(inputs.token_mask).reshape(-1)
    num_tokens = mask.sum()
    factor = 1.0 / max(num_tokens, 1)

    with np.errstate(invalid="ignore"):
        up = x @ w_up.T
        gate = up if w_gate is None else x @ w_gate.T
        support = ~(gate <= 0)
        hidden = np.where(support, up if w_gate is None else gate * up, 0.0)
        out = {
            "y": hidden @ w_down,
            "l1": factor * np.abs(hidden)[mask].sum(),
            "l0": factor * support[mask].sum(),
            "fired": support[mask].sum(axis=0),
            "num_tokens": num_tokens,
        }
        l1_term = np.where(mask[:, None], inputs.l1_bar * factor * np.sign(hidden), 0.0)
        hidden_bar = np.where(support, y_bar @ w_down.T + l1_term, 0.0)
        if w_gate is None:
            up_bar = hidden_bar
            out["dx"] = up_bar @ w_up
        else:
            up_bar = np.where(support, hidden_bar * gate, 0.0)
            gate_bar = np.where(support, hidden_bar * up, 0.0)
            out["dx"] = up_bar @ w_up + gate_bar @ w_gate
            out["dw_gate"] = gate_bar.T @ x
        out["dw_up"] = up_bar.T @ x
        out["dw_down"] = hidden.T @ y_bar
        out["support"] = support
    return out


def loss_truth(inputs, **moved) -> float:
    """`sum(y y_bar) + l1_bar l1` in f64, forward only; `moved` replaces arguments by f64 arrays."""
    wide = {
        name: np.asarray(array.astype(jnp.float32), np.float64)
        for name in ("x", "w_gate", "w_up", "w_down", "y_bar")
        if (array := getattr(inputs, name)) is not None
    } | moved
    up = wide["x"] @ wide["w_up"].T
    gate = up if inputs.w_gate is None else wide["x"] @ wide["w_gate"].T
    hidden = np.maximum(gate, 0) * (1 if inputs.w_gate is None else up)
    per_token = np.abs(hidden).sum(axis=-1)
    mask = np.ones(per_token.shape, bool)
    if inputs.token_mask is not None:
        mask = np.asarray(inputs.token_mask)
    l1 = per_token[mask].sum() / max(mask.sum(), 1)
    return float(np.sum(hidden @ wide["w_down"] * wide["y_bar"]) + inputs.l1_bar * l1)


def naive_ffn(x, w_gate, w_up, w_down, token_mask):
    """The layer as anyone would write it, differentiated by JAX; returns (y, l1)."""
    if w_gate is None:
        hidden = jax.nn.relu(x @ w_up.T)
    else:
        hidden = jax.nn.relu(x @ w_gate.T) * (x @ w_up.T)
    mask = jnp.ones(x.shape[:-1], bool) if token_mask is None else token_mask
    per_token = jnp.sum(jnp.abs(hidden.astype(jnp.float32)), axis=-1)
    l1 = jnp.sum(jnp.where(mask, per_token, 0)) / jnp.maximum(jnp.sum(mask), 1)
    return hidden @ w_down, l1


def row_errors(actual, truth) -> np.ndarray:
    """Relative error of every row, in the norm of the largest finite true row.

    Rows are judged one by one, on the common scale of the output: a single wrong row
    shows, and a row of rounding noise around zero does not.
    """
    actual = np.asarray(jnp.asarray(actual).astype(jnp.float32), np.float64)
    truth = np.asarray(truth, np.float64).reshape(-1, actual.shape[-1])
    actual = actual.reshape(truth.shape)
    norms = np.linalg.norm(truth, axis=-1)
    scale = norms[np.isfinite(norms)].max(initial=np.finfo(np.float64).tiny)
    with np.errstate(invalid="ignore"):
        return np.linalg.norm(actual - truth, axis=-1) / scale
