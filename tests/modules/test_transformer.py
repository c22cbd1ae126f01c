"""The transformer: attention, packing, tying, remat, and its feed-forward layers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from twell_jax import Attention, DenseFFN, RMSNorm, SparseFFN, Transformer, TransformerConfig
from twell_jax.modules import apply_rope, attention, positions_in_segments
from twell_jax.modules.attention import select_implementation
from twell_jax.modules.config import REMAT_POLICIES

CONFIG = TransformerConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    dtype="float32",
    ffn_backend="reference",
)
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (3, 12)).astype(np.int32)
# A few additions in another order; f32 sums of up to 48 terms of size 1.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def make(**changes):
    return Transformer(dataclasses.replace(CONFIG, **changes), rngs=nnx.Rngs(0))


def test_shapes_dtypes_and_stats():
    logits, aux = make(dtype="bfloat16")(TOKENS)
    assert logits.shape == (3, 12, 61)
    assert logits.dtype == jnp.float32
    assert aux.ffn_stats.l1.shape == aux.ffn_stats.l0.shape == (2,)
    assert aux.ffn_stats.fired.shape == (2, 48)
    np.testing.assert_array_equal(aux.ffn_stats.num_tokens, [36, 36])
    for leaf in jax.tree.leaves(nnx.state(make(), nnx.Param)):
        assert leaf.dtype == jnp.float32


def test_no_token_sees_a_later_one():
    model = make()
    changed = TOKENS.copy()
    changed[:, 7:] = (changed[:, 7:] + 1) % CONFIG.vocab_size
    before, after = model(TOKENS)[0], model(changed)[0]
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert np.abs(before[:, 7:] - after[:, 7:]).max() > 1e-3


def test_packed_documents_equal_separate_ones():
    model = make()
    first, second = TOKENS[:1, :5], TOKENS[1:2, :4]
    padding = np.zeros((1, 3), np.int32)
    packed = np.concatenate([first, second, padding], axis=1)
    segments = np.array([[1] * 5 + [2] * 4 + [0] * 3], np.int32)
    logits, aux = model(packed, segments)
    for part, alone in ((logits[:, :5], first), (logits[:, 5:9], second)):
        np.testing.assert_allclose(part, model(alone)[0], **CLOSE)
    fired = sum(model(alone)[1].ffn_stats.fired for alone in (first, second))
    np.testing.assert_array_equal(aux.ffn_stats.fired, fired)
    np.testing.assert_array_equal(aux.ffn_stats.num_tokens, [9, 9])


def test_positions_restart_with_segments():
    segments = jnp.asarray([[1, 1, 1, 2, 2, 3, 0, 0]])
    np.testing.assert_array_equal(positions_in_segments(segments), [[0, 1, 2, 0, 1, 0, 0, 1]])


def test_rope_depends_on_distance_only():
    query, key = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 16))

    def score(query_position, key_position):
        def rotate(x, position):
            return apply_rope(x, jnp.full((1, 1), position, jnp.int32), 10000.0)

        return float(jnp.sum(rotate(query, query_position) * rotate(key, key_position)))

    assert score(3, 1) == pytest.approx(score(103, 101), abs=1e-4)
    assert abs(score(3, 1) - score(3, 2)) > 1e-3
    # The half-split pairing: component i turns with component i + 8.
    unit = jnp.zeros((1, 1, 1, 16)).at[..., 0].set(1)
    turned = apply_rope(unit, jnp.ones((1, 1), jnp.int32), 10000.0)[0, 0, 0]
    np.testing.assert_allclose(turned[jnp.array([0, 8])], [np.cos(1), np.sin(1)], rtol=1e-6)


def test_grouped_queries_equal_repeated_keys():
    grouped = Attention(32, 4, num_kv_heads=2, dtype=jnp.float32, rngs=nnx.Rngs(0))
    full = Attention(32, 4, dtype=jnp.float32, rngs=nnx.Rngs(1))
    for name in ("query", "out"):
        getattr(full, name).kernel[...] = getattr(grouped, name).kernel[...]
    for name in ("key", "value"):
        kernel = getattr(grouped, name).kernel[...].reshape(32, 2, 8)
        getattr(full, name).kernel[...] = jnp.repeat(kernel, 2, axis=1).reshape(32, 32)
    x = jax.random.normal(jax.random.key(2), (2, 6, 32))
    positions = jnp.broadcast_to(jnp.arange(6), (2, 6))
    np.testing.assert_allclose(grouped(x, positions), full(x, positions), **CLOSE)


def test_qkv_bias():
    assert make().blocks[0].attention.query.bias is None
    biased = make(qkv_bias=True).blocks[0].attention
    assert biased.query.bias is not None
    assert biased.value.bias is not None
    assert biased.out.bias is None


def test_head_dim_may_differ():
    model = make(head_dim=16)
    assert model.blocks[0].attention.query.kernel.shape == (32, 64)
    assert model.blocks[0].attention.key.kernel.shape == (32, 32)
    assert model.blocks[0].attention.out.kernel.shape == (64, 32)
    assert np.isfinite(model(TOKENS)[0]).all()


def test_attention_implementation(monkeypatch, caplog):
    call = {"head_dim": 64, "dtype": jnp.bfloat16, "length": 12, "masked": True}
    assert select_implementation("xla", **call) == "xla"
    assert select_implementation("auto", **call) == "xla"
    assert not caplog.records
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(attention, "_logged", set())
    monkeypatch.setattr(attention, "_compute_capability", lambda: 8.0)
    assert select_implementation("auto", **call) == "cudnn"
    assert select_implementation("auto", **{**call, "length": 13, "masked": False}) == "cudnn"
    for change, reason in (
        ({"dtype": jnp.float32}, "dtype float32"),
        ({"head_dim": 256}, "head_dim 256, only multiples of 8 up to 128"),
        ({"head_dim": 12}, "head_dim 12"),
        ({"length": 13}, "an odd length, 13"),
    ):
        for _ in range(2):
            assert select_implementation("auto", **{**call, **change}) == "xla"
        (record,) = caplog.records
        assert reason in record.message
        caplog.clear()
    monkeypatch.setattr(attention, "_compute_capability", lambda: 9.0)
    assert select_implementation("auto", **{**call, "head_dim": 256}) == "cudnn"


@pytest.mark.parametrize("tied", [True, False])
def test_head_tying(tied):
    model = make(tie_embeddings=tied)
    assert (model.head is None) == tied

    def loss(model):
        return jnp.mean(jax.nn.logsumexp(model(TOKENS)[0], axis=-1))

    gradient = nnx.grad(loss)(model)["embedding"]["embedding"][...]
    unused = np.setdiff1d(np.arange(CONFIG.vocab_size), TOKENS)
    assert len(unused)
    # An unused token's row gets a gradient only through the head.
    assert (np.abs(gradient[unused]).max() > 0) == tied
    # The gradient of the shared table is the sum of those of its two uses.
    if tied:
        separate = make(tie_embeddings=False)
        separate.head[...] = model.embedding.embedding[...]
        parts = nnx.grad(loss)(separate)
        total = parts["embedding"]["embedding"][...] + parts["head"][...]
        np.testing.assert_allclose(gradient, total, rtol=1e-5, atol=1e-7)


def loss_stats_gradient(model):
    def loss(model):
        logits, aux = model(TOKENS, jnp.asarray(np.sort(TOKENS % 3, axis=1)))
        value = jnp.mean(jax.nn.logsumexp(logits, axis=-1)) + 0.1 * jnp.mean(aux.ffn_stats.l1)
        return value, aux.ffn_stats

    (value, stats), gradient = nnx.value_and_grad(loss, has_aux=True)(model)
    return value, stats, nnx.to_pure_dict(gradient)


@pytest.mark.parametrize("remat", [name for name in REMAT_POLICIES if name != "none"])
@pytest.mark.parametrize("gated", [True, False])
def test_remat_changes_nothing(remat, gated):
    plain = loss_stats_gradient(make(gated=gated))
    rematerialised = loss_stats_gradient(make(gated=gated, remat=remat))
    # Recomputation may be fused differently: equal up to a rounding or two.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), plain, rematerialised
    )


@pytest.mark.parametrize("changes", [{}, {"ffn": "dense", "activation": "silu"}])
def test_remat_recomputes_what_it_says(changes):
    """Number of matmuls in a gradient: "ffn" spares gate and up of every layer."""

    def matmuls(remat):
        graph, params = nnx.split(make(remat=remat, **changes))

        def loss(params):
            return jnp.sum(nnx.merge(graph, params)(TOKENS)[0])

        return jax.jit(jax.grad(loss)).lower(params).as_text().count("stablehlo.dot_general")

    # Of a block: 4 projections, 2 of attention itself, and gate and up; a block's last matmul
    # is not needed to recompute its inside.
    assert matmuls("full") - matmuls("ffn") == 2 * CONFIG.num_layers
    assert matmuls("ffn") > matmuls("none")


@pytest.mark.parametrize("gated", [True, False])
def test_dense_relu_equals_sparse(gated):
    sparse = SparseFFN(32, 48, gated=gated, dtype=jnp.float32, rngs=nnx.Rngs(3))
    dense = DenseFFN(32, 48, activation="relu", gated=gated, dtype=jnp.float32, rngs=nnx.Rngs(3))
    jax.tree.map(
        np.testing.assert_array_equal,
        nnx.to_pure_dict(nnx.state(sparse)),
        nnx.to_pure_dict(nnx.state(dense)),
    )
    x = jax.random.normal(jax.random.key(0), (2, 5, 32))
    (y, stats), (dense_y, dense_stats) = sparse(x), dense(x)
    np.testing.assert_allclose(y, dense_y, **CLOSE)
    assert dense_stats is None
    assert 0 < stats.l0 < 48


@pytest.mark.parametrize("activation", ["relu", "silu", "gelu"])
def test_dense_transformer(activation):
    logits, aux = make(ffn="dense", activation=activation)(TOKENS)
    assert np.isfinite(logits).all()
    assert aux.ffn_stats is None


def test_rms_norm():
    norm = RMSNorm(32, eps=0.0, dtype=jnp.bfloat16)
    norm.scale[...] = jnp.full((32,), 2.0)
    x = 100 * jax.random.normal(jax.random.key(0), (4, 32))
    y = np.asarray(norm(x), np.float64)
    assert norm(x).dtype == jnp.bfloat16
    np.testing.assert_allclose(np.sqrt(np.mean(y**2, axis=-1)), 2.0, rtol=2**-8)


def test_what_blocks_add_does_not_grow_with_depth():
    """Without the scale of `residual_init` 16 layers would add 2.8 times as much as 2."""
    added = {}
    for num_layers in (2, 16):
        model = make(num_layers=num_layers, hidden_size=64)
        first = x = model.embedding(TOKENS)
        positions = jnp.broadcast_to(jnp.arange(12), TOKENS.shape)
        for block in model.blocks:
            x, _ = block(x, positions, None, None)
        added[num_layers] = float(jnp.sqrt(jnp.mean((x - first) ** 2)))
    assert 0.7 < added[16] / added[2] < 1.4, added


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads: must divide num_heads = 4"),
        ({"num_heads": 5, "num_kv_heads": 0}, "num_heads: must divide hidden_size = 32"),
        ({"head_dim": 7}, "head_dim: rotary embeddings need an even size, got 7"),
        ({"activation": "silu"}, "the sparse layer needs relu"),
        ({"remat": "some"}, "remat: must be one of none, full, dots, ffn, got 'some'"),
        ({"dtype": "float16"}, "dtype: must be one of float32, bfloat16"),
        ({"num_layers": 0}, "num_layers: must be at least 1"),
        ({"rope_theta": 0.0}, "rope_theta: must be greater than 0"),
        ({"norm_eps": -1.0}, "norm_eps: must be greater than 0"),
    ],
)
def test_wrong_configuration_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_wrong_arguments_of_the_parts_are_named():
    rngs = nnx.Rngs(0)
    for wrong, message in (
        (lambda: Attention(30, 4, rngs=rngs), "num_heads: must divide hidden_size = 30"),
        (lambda: Attention(32, 4, num_kv_heads=3, rngs=rngs), "num_kv_heads: must divide"),
        (lambda: Attention(32, 4, head_dim=5, rngs=rngs), "head_dim: .* even size, got 5"),
        (
            lambda: Attention(32, 4, implementation="flash", rngs=rngs),
            "implementation: must be one of auto, xla, cudnn, got 'flash'",
        ),
        (lambda: SparseFFN(8, 16, backend="cuda", rngs=rngs), "backend: must be one of auto, mos"),
        (lambda: DenseFFN(8, 16, activation="tanh", rngs=rngs), "activation: must be one of relu"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()


def test_wrong_input_is_named():
    model = make()
    with pytest.raises(ValueError, match=r"tokens: shape must be \[batch, length\]"):
        model(TOKENS[0])
    with pytest.raises(ValueError, match="segment_ids: shape must be that of tokens"):
        model(TOKENS, TOKENS[:, :3])
