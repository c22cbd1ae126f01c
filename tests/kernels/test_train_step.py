"""A whole train step through the Triton kernels, interpreted."""

import jax
import numpy as np
import pytest

from pallas_kernels import FfnPlan, dispatch, packed_ffn
from pallas_kernels.triton_gpu import backward, launch
from pallas_kernels.triton_gpu import ffn as triton_ffn
from tests.training.helpers import make_config
from tests.training.test_step import batch_with
from twell_jax.training.state import initial_state
from twell_jax.training.step import make_train_step

BANDS = ((160, 0), (40, 0), (0, 0))


@pytest.mark.parametrize("remat", ["none", "ffn"])
def test_it_equals_the_step_of_the_reference(monkeypatch, remat):
    """One layer dense, one of two bands, one sparse; under jit, and recomputed."""
    pytest.importorskip("triton", minversion="3.7")
    if jax.default_backend() == "gpu":
        pytest.skip("Triton is not asked to interpret where it can run")
    from tests.kernels import triton_interpreted

    for module in (launch, backward):
        monkeypatch.setattr(module, "call", triton_interpreted.call)
    # At this size a few more active neurons would make it dense.
    config = packed_ffn.FfnConfig(max_active_share=1.0)
    layer = packed_ffn.make_sparse_ffn(triton_ffn.KERNELS, config)
    triton = dispatch.Implementation(lambda *_, **__: None, layer, trains_by_kernels=True)
    monkeypatch.setitem(dispatch._OPERATIONS["triton"], "sparse_ffn", triton)

    config = make_config("nowhere")
    config.model.dtype = "bfloat16"
    config.model.hidden_size, config.model.intermediate_size = 64, 160
    config.model.num_layers = len(BANDS)
    config.model.remat = remat
    config.train.batch_size = 2
    # For f32 sums of different order to be compared, see `test_step`.
    config.optimizer.eps = 1e-4
    batch = batch_with((16, 9))
    state = initial_state(config)
    # The first input of every layer is nearly constant, and closes nearly all gates.
    table = state.params["embedding"]["embedding"]
    state.params["embedding"]["embedding"] = table.at[:, 0].set(2.0)
    for block in state.params["blocks"].values():
        block["ffn"]["w_gate"] = block["ffn"]["w_gate"].at[:, 0].set(-0.5)
    expected_state, expected = jax.jit(make_train_step(config))(state, batch)
    assert np.all((expected["l0"] > 0.1) & (expected["l0"] < 16))

    config.model.ffn_backend = "triton"
    plans = [FfnPlan(*bands) for bands in BANDS]
    new_state, metrics = jax.jit(make_train_step(config, plans))(state, batch)
    # By kernels, and some tokens of the last layer in the pool.
    assert np.all(np.asarray(metrics["dense_share"]) < 0.5)
    assert metrics["dense_share"][0] == 0 < metrics["dense_share"][2]
    for name, value in expected.items():
        if name != "dense_share":
            np.testing.assert_allclose(metrics[name], value, rtol=2**-7, err_msg=name)
    np.testing.assert_array_equal(new_state.steps_since_fired, expected_state.steps_since_fired)
    # The first moment is the gradient times 0.1.
    for layer in range(len(BANDS)):
        for name in ("w_gate", "w_up", "w_down"):
            actual, wanted = (
                np.asarray(s.opt_state[1].mu["blocks"][layer]["ffn"][name], np.float64)
                for s in (new_state, expected_state)
            )
            assert np.linalg.norm(wanted) > 0
            assert np.linalg.norm(actual - wanted) <= 2**-5 * np.linalg.norm(wanted), name
