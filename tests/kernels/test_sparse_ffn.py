"""`sparse_ffn` against the f64 truth: every output and gradient, row by row."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import sparse_ffn
from tests.kernels.backends import BACKENDS, F32_BACKENDS, with_backends
from tests.kernels.cases import TABLE, Case, make_inputs
from tests.kernels.judge import GRADIENTS, assert_rows_close, run
from tests.kernels.truth import ffn_truth, loss_truth, naive_ffn, row_errors


def sparse(backend):
    """`sparse_ffn` on `backend` with positional arguments."""
    return lambda x, w_gate, w_up, w_down, token_mask: sparse_ffn(
        x, w_gate, w_up, w_down, token_mask=token_mask, backend=backend
    )


def run_backend(backend, inputs):
    """`run` of `sparse_ffn`; the outputs of a GPU backend without a gradient being taken.

    (Another program: with one, the forward pass may be made by other kernels.)
    """
    y, stats, gradients = run(sparse(backend), inputs)
    if backend != "reference":
        y, stats = jax.jit(sparse(backend))(
            inputs.x, inputs.w_gate, inputs.w_up, inputs.w_down, inputs.token_mask
        )
    return y, stats, gradients


@pytest.mark.parametrize(("case", "backend"), with_backends(c for c in TABLE if not c.poison))
def test_equals_truth(case, backend):
    inputs = make_inputs(case)
    truth = ffn_truth(inputs)
    y, stats, gradients = run_backend(backend, inputs)
    naive_y, _, naive_gradients = run(naive_ffn, inputs)

    assert y.dtype == inputs.x.dtype and y.shape == inputs.x.shape
    num_tokens = int(np.prod(case.tokens))
    assert_rows_close("y", y, truth["y"], naive_y, case.intermediate_size)
    np.testing.assert_array_equal(stats.fired, truth["fired"])
    assert int(stats.num_tokens) == truth["num_tokens"]
    # Sums of at most 2.6e5 f32 terms, pairwise: 32 roundings is generous.
    np.testing.assert_allclose(stats.l0, truth["l0"], rtol=32 * 2**-24)
    # l1 also sees g and u rounded to the dtype: one rounding each, and one of h.
    eps = float(jnp.finfo(case.dtype).eps)
    np.testing.assert_allclose(stats.l1, truth["l1"], rtol=max(2 * eps, 32 * 2**-24))
    assert set(gradients) == {name for name in GRADIENTS if name in truth}
    for name, gradient in gradients.items():
        assert gradient.dtype == inputs.x.dtype
        contraction = case.intermediate_size if name == "dx" else num_tokens
        assert_rows_close(name, gradient, truth[name], naive_gradients[name], contraction)

    idle = ~truth["support"].any(axis=1)
    assert np.all(np.asarray(y).reshape(-1, case.hidden_size)[idle] == 0)
    assert np.all(np.asarray(gradients["dx"]).reshape(-1, case.hidden_size)[idle] == 0)


@pytest.mark.parametrize(("case", "backend"), with_backends(c for c in TABLE if c.poison))
def test_non_finite_token_stays_alone(case, backend):
    inputs = make_inputs(case)
    truth = ffn_truth(inputs)
    y, stats, gradients = run_backend(backend, inputs)
    healthy = np.arange(len(y)) != inputs.poisoned
    counted = inputs.token_mask is None or bool(inputs.token_mask[inputs.poisoned])
    active = truth["support"][inputs.poisoned]
    assert active.any()

    assert not np.isfinite(np.asarray(y, np.float32)[inputs.poisoned]).any()
    assert np.isfinite(stats.l1) == (not counted)
    np.testing.assert_array_equal(stats.fired, truth["fired"])
    with np.errstate(invalid="ignore"):
        clean_columns = np.isfinite(np.asarray(inputs.x, np.float32)[inputs.poisoned])
    for name in GRADIENTS[1:]:
        if name in gradients:
            rows = np.asarray(gradients[name], np.float32)
            hidden = np.isfinite(rows[active]).all(axis=1)
            assert not hidden.any(), f"{name}: a bad token was hidden"
            assert np.isfinite(rows[~active][:, clean_columns]).all(), f"{name}: it spread"
    # Without a gate, dx sees the token's own values only through the sign of a NaN.
    bad_dx = np.asarray(gradients["dx"], np.float32)[inputs.poisoned]
    np.testing.assert_array_equal(np.isfinite(bad_dx), np.isfinite(truth["dx"][inputs.poisoned]))
    if case.gated:
        assert not np.isfinite(bad_dx).any()

    # The naive layer, spared the bad token, judges the healthy ones. The number of
    # tokens stays the same, so their L1 gradient does, too.
    spared = dataclasses.replace(inputs, x=inputs.x.at[inputs.poisoned].set(0))
    naive_y, _, naive_gradients = run(naive_ffn, spared)
    size = case.intermediate_size
    assert_rows_close("y", y, truth["y"], naive_y, size, rows=healthy)
    dx, naive_dx = gradients["dx"], naive_gradients["dx"]
    assert_rows_close("dx", dx, truth["dx"], naive_dx, size, rows=healthy)


SMALL = Case((7,), 64, 128, 0.3, "float32")


@pytest.mark.parametrize("backend", F32_BACKENDS)
@pytest.mark.parametrize("gated", [True, False])
def test_gradients_equal_autodiff_of_the_formula(backend, gated):
    inputs = make_inputs(Case((33,), 64, 128, 0.3, "float32", gated=gated, mask="random"))
    _, stats, gradients = run(sparse(backend), inputs)
    _, l1, expected = run(naive_ffn, inputs)
    np.testing.assert_allclose(stats.l1, l1, rtol=1e-6)
    for name, gradient in gradients.items():
        scale = np.abs(expected[name]).max()
        np.testing.assert_allclose(gradient, expected[name], rtol=0, atol=8 * 2**-23 * scale)


@pytest.mark.parametrize("backend", F32_BACKENDS)
@pytest.mark.parametrize("gated", [True, False])
def test_gradients_equal_finite_differences(backend, gated):
    """Of the formula in f64, forward only, at f32 inputs; in directions and single entries."""
    inputs = make_inputs(Case((7,), 64, 128, 0.3, "float32", gated=gated, mask="random"))
    # Gates lie on multiples of 1/64. Half such a step of bias moves all off the kink at 0.
    first = "w_gate" if gated else "w_up"
    weight = getattr(inputs, first)
    inputs = dataclasses.replace(inputs, **{first: weight.at[:, 0].add(1 / 512)})
    _, _, gradients = run(sparse(backend), inputs)
    rng = np.random.default_rng(1)
    step = 1e-6
    for name, gradient in gradients.items():
        argument = np.asarray(getattr(inputs, name.removeprefix("d")), np.float64)
        gradient = np.asarray(gradient, np.float64)
        norm = np.linalg.norm(gradient)
        directions = [*rng.normal(size=(4, *argument.shape)), gradient.copy()]
        for _ in range(4):
            directions.append(np.zeros(argument.shape))
            directions[-1].flat[rng.integers(argument.size)] = 1
        for direction in directions:
            direction /= np.linalg.norm(direction)
            ahead, back = (
                loss_truth(inputs, **{name.removeprefix("d"): argument + sign * step * direction})
                for sign in (1, -1)
            )
            # The difference of two f64 sums is exact to 1e-8 of a gradient of this size.
            error = abs((ahead - back) / (2 * step) - np.sum(gradient * direction))
            assert error <= 8 * 2**-23 * norm, f"{name}: {error:.3g} of {norm:.3g}"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("gated", [True, False])
def test_l1_gradient_survives_bf16(backend, gated):
    """An L1 term of 2^-12 of the other gradient would round away if it were added in bf16.

    Most of it is lost in the roundings behind it. What is left must point where the same
    change points in f32. If the term is added in bf16, the cosine of the two is 0.2 without a
    gate; with one nothing is left at all, as all elements of hidden_bar are made 1.25. (Its product
    with a gate often lies between two bf16 numbers, where the L1 term decides the rounding.)
    """
    inputs = make_inputs(Case((257,), 64, 128, 1.0, "bfloat16", gated=gated))
    if gated:
        inputs = dataclasses.replace(
            inputs,
            y_bar=jnp.zeros_like(inputs.y_bar).at[:, 0].set(1.25),
            w_down=inputs.w_down.at[:, 0].set(1),
        )
    wide = dataclasses.replace(
        inputs,
        **{
            name: array.astype(jnp.float32)
            for name in ("x", "w_gate", "w_up", "w_down", "y_bar")
            if (array := getattr(inputs, name)) is not None
        },
    )
    hidden_bar = np.asarray(wide.y_bar @ wide.w_down.T)
    strength = 257 * 2**-12.5 * float(np.sqrt(np.mean(hidden_bar**2)))

    def change(inputs, backend):
        with_l1, without = (
            np.asarray(
                run(sparse(backend), dataclasses.replace(inputs, l1_bar=l1_bar))[2]["dx"],
                np.float64,
            )
            for l1_bar in (strength, 0.0)
        )
        return with_l1 - without

    # Not every backend serves f32.
    rounded, expected = change(inputs, backend), change(wide, "reference")
    assert np.linalg.norm(rounded) > 0
    cosine = np.sum(rounded * expected) / np.linalg.norm(rounded) / np.linalg.norm(expected)
    assert cosine > (0.1 if gated else 0.4), cosine


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_infinite_up_under_a_closed_gate_counts_nothing(backend):
    """x is finite, but the product with w_up overflows on one token for half of the neurons."""
    inputs = make_inputs(Case((7,), 64, 128, 0.3, "bfloat16"))
    token, column = 3, 5
    huge = 1e20
    inputs = dataclasses.replace(
        inputs,
        x=inputs.x.at[:, column].set(0).at[token, column].set(huge),
        w_gate=inputs.w_gate.at[:, column].set(0),
        w_up=inputs.w_up.at[:, column].set(0),
    )
    closed = np.flatnonzero(~ffn_truth(inputs)["support"][token])[::2]
    assert len(closed) > 10
    inputs = dataclasses.replace(inputs, w_up=inputs.w_up.at[closed, column].set(huge))
    truth = ffn_truth(inputs)
    y, stats, gradients = run_backend(backend, inputs)
    naive_y, _, _ = run(naive_ffn, dataclasses.replace(inputs, x=inputs.x.at[token].set(0)))
    healthy = np.arange(7) != token
    assert np.isfinite(np.asarray(y, np.float32)).all()
    assert np.isfinite(stats.l1)
    assert_rows_close("y", y, truth["y"], naive_y, 128, rows=healthy)
    limit = 4 * float(jnp.finfo(jnp.bfloat16).eps)
    assert row_errors(y, truth["y"])[token] <= limit
    for name, gradient in gradients.items():
        assert np.isfinite(np.asarray(gradient, np.float32)).all(), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_bit_equal_runs(backend):
    """Outputs and gradients, twice in one compilation, and again in another one."""
    inputs = make_inputs(Case((64,), 192, 344, 0.05, "bfloat16"))

    def compiled():
        @jax.jit
        def outputs_and_gradients(x, w_gate, w_up, w_down):
            def loss(*arguments):
                y, stats = sparse_ffn(*arguments, backend=backend)
                return jnp.sum(y * inputs.y_bar).astype(jnp.float32) + stats.l1, (y, stats)

            return jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(x, w_gate, w_up, w_down)

        return outputs_and_gradients

    args = (inputs.x, inputs.w_gate, inputs.w_up, inputs.w_down)
    function = compiled()
    first, second, third = function(*args), function(*args), compiled()(*args)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    jax.tree.map(np.testing.assert_array_equal, first, third)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.zeros((7, 65))}, "w_gate: has 64 columns"),
        ({"x": jnp.zeros((7, 64), jnp.float16)}, "x: dtype must be float32 or bfloat16"),
        ({"x": jnp.zeros(())}, r"x: shape must be \[\.\.\., size\]"),
        ({"w_gate": jnp.zeros((127, 64))}, "w_gate: has 127 neurons"),
        ({"w_down": jnp.zeros((64, 128))}, "w_down: has 128 columns"),
        ({"w_up": jnp.zeros((128, 64), jnp.bfloat16)}, "w_up: dtype bfloat16 differs"),
        ({"w_up": jnp.zeros((128,))}, "w_up: shape must be"),
        ({"token_mask": jnp.ones((7,))}, "token_mask: dtype must be bool"),
        ({"token_mask": jnp.ones((8,), bool)}, r"token_mask: shape must be \(7,\)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_input_is_named(change, message):
    inputs = make_inputs(SMALL)
    arguments = {name: getattr(inputs, name) for name in ("x", "w_gate", "w_up", "w_down")}
    arguments |= {"token_mask": None} | change
    with pytest.raises(ValueError, match=message):
        sparse_ffn(**arguments)


def test_no_tokens():
    inputs = make_inputs(SMALL)
    y, stats = sparse_ffn(inputs.x[:0], inputs.w_gate, inputs.w_up, inputs.w_down)
    assert y.shape == (0, 64)
    assert float(stats.l1) == float(stats.l0) == int(stats.num_tokens) == 0


def test_table_has_the_densities_it_names():
    for case in TABLE:
        if case.poison or np.prod(case.tokens) < 64:
            continue
        share = ffn_truth(make_inputs(case))["support"].mean()
        if case.density in (0.0, 1.0):
            assert share == case.density, str(case)
        else:
            assert case.density / 2 < share < case.density * 2, str(case)
