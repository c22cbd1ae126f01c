"""The train step: token weighting, schedules, weight decay, the guard against NaN."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.training.helpers import VOCAB_SIZE, make_config
from twell_jax.data.pipeline import evaluation_batches, training_dataset
from twell_jax.training.config import OptimizerConfig
from twell_jax.training.evaluate import evaluate
from twell_jax.training.losses import linear_cross_entropy
from twell_jax.training.optimizer import decay_mask, learning_rate_schedule, make_optimizer
from twell_jax.training.state import initial_params, initial_state, model_graph
from twell_jax.training.step import make_eval_step, make_train_step


def batch_with(real_tokens, length=16, seed=0):
    """A batch whose example i has `real_tokens[i]` tokens and padding behind them."""
    rng = np.random.default_rng(seed)
    shape = (len(real_tokens), length)
    real = np.arange(length) < np.asarray(real_tokens)[:, None]
    return {
        "inputs": np.where(real, rng.integers(0, VOCAB_SIZE, shape), 0).astype(np.int32),
        "targets": np.where(real, rng.integers(0, VOCAB_SIZE, shape), 0).astype(np.int32),
        "segment_ids": real.astype(np.int32),
        "positions": np.where(real, np.arange(length), 0).astype(np.int32),
        "loss_mask": real,
    }


def step_with(config, batch):
    return jax.jit(make_train_step(config))(initial_state(config), batch)


def assert_same_step(actual, expected, rtol=1e-5):
    (state, metrics), (expected_state, expected_metrics) = actual, expected
    for name, value in expected_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=rtol, err_msg=name)
    # The first moment is the gradient times 0.1: compared instead of the parameters,
    # whose Adam step blows up the rounding of gradients near zero.
    mu, expected_mu = state.opt_state[1].mu, expected_state.opt_state[1].mu
    scale = float(optax.tree.norm(expected_mu))
    difference = jax.tree.map(jnp.subtract, mu, expected_mu)
    assert float(optax.tree.norm(difference)) <= rtol * scale


@pytest.mark.parametrize(
    ("length", "real_tokens"),
    [(128, (1, 127)), (16, (1, 16, 3, 16)), (16, (16, 16, 16, 16)), (16, (0, 0, 5, 16))],
)
def test_accumulation_weighs_tokens(data_path, length, real_tokens):
    config = make_config(data_path)
    config.train.batch_size = len(real_tokens)
    batch = batch_with(real_tokens, length)
    whole = step_with(config, batch)
    assert np.isfinite(whole[1]["loss"])
    for size in (1, 2):
        config.train.micro_batch_size = size
        assert_same_step(step_with(config, batch), whole)


def test_padding_changes_nothing(data_path):
    config = make_config(data_path)
    config.train.batch_size = 2
    batch = batch_with((16, 9))
    config.train.batch_size = 4
    padded = {name: np.pad(array, ((0, 2), (0, 8))) for name, array in batch.items()}
    assert_same_step(step_with(config, padded), step_with(config, batch))


@pytest.mark.parametrize("remat", ["full", "ffn"])
def test_remat_changes_nothing(data_path, remat):
    config = make_config(data_path)
    batch = batch_with((16,) * 8)
    plain = step_with(config, batch)
    config.model.remat = remat
    assert_same_step(step_with(config, batch), plain)


def test_loss_is_cross_entropy_plus_penalties(data_path):
    config = make_config(data_path)
    config.train.z_loss = 0.01
    batch = batch_with((16, 4) * 4)
    _, metrics = step_with(config, batch)
    model = nnx.merge(model_graph(config.model), initial_params(config.model, 0))
    logits, aux = model(batch["inputs"], batch["segment_ids"], batch["positions"])
    mask = batch["loss_mask"]
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    log_z = jax.nn.logsumexp(logits, axis=-1)
    l1 = np.mean(aux.ffn_stats.l1)
    np.testing.assert_allclose(metrics["cross_entropy"], cross_entropy[mask].mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["l1"], l1, rtol=1e-5)
    expected = cross_entropy[mask].mean() + 0.01 * (log_z[mask] ** 2).mean() + 1e-3 * l1
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("chunk_tokens", [0, 1, 12, 20, 1000])
def test_linear_cross_entropy(dtype, z_loss, chunk_tokens):
    """Against optax on whole logits, differentiated by JAX, in f32."""
    keys = jax.random.split(jax.random.key(0), 4)
    # A length that is prime: the last chunk is filled up.
    features = jax.random.normal(keys[0], (3, 11, 16)).astype(dtype)
    head = jax.random.normal(keys[1], (40, 16)).astype(dtype)
    targets = jax.random.randint(keys[2], (3, 11), 0, 40)
    mask = jax.random.bernoulli(keys[3], 0.7, (3, 11))

    def chunked(features, head):
        losses = linear_cross_entropy(
            features, head, targets, mask, z_loss=z_loss, chunk_tokens=chunk_tokens
        )
        return 0.25 * losses.total, losses.cross_entropy

    def whole(features, head):
        logits = features @ head.T
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        penalty = z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2
        return 0.25 * jnp.sum((losses + penalty)[mask]), jnp.sum(losses[mask])

    (total, cross_entropy), gradients = jax.value_and_grad(chunked, (0, 1), has_aux=True)(
        features, head
    )
    wide = (features.astype(jnp.float32), head.astype(jnp.float32))
    (true_total, true_cross_entropy), truths = jax.value_and_grad(whole, (0, 1), has_aux=True)(
        *wide
    )
    np.testing.assert_allclose(total, true_total, rtol=1e-6)
    np.testing.assert_allclose(cross_entropy, true_cross_entropy, rtol=1e-6)
    # Two roundings to the dtype, of the logits' gradient and of the result. In f32 the truth has
    # as many.
    limit = (4 if dtype == "float32" else 2) * float(jnp.finfo(dtype).eps)
    for gradient, truth in zip(gradients, truths, strict=True):
        assert gradient.dtype == dtype
        error = np.linalg.norm(gradient.astype(jnp.float32) - truth) / np.linalg.norm(truth)
        assert error <= limit


def test_masked_targets_count_nothing():
    features = jnp.asarray([[[2.0], [jnp.nan]]])
    head = jnp.asarray([[1.0], [0.0]])
    mask = jnp.asarray([[True, False]])

    def total(features, head):
        return linear_cross_entropy(features, head, jnp.zeros((1, 2), jnp.int32), mask).total

    value, gradient = jax.value_and_grad(total)(features, head)
    np.testing.assert_allclose(value, np.log1p(np.exp(-2.0)), rtol=1e-6)
    assert np.isfinite(gradient[0, 0, 0])
    assert gradient[0, 1, 0] == 0


def test_penalty_makes_layers_sparse(data_path):
    """The same steps with a strong penalty end with far fewer active neurons."""
    active = {}
    for coefficient in (0.0, 3e-2):
        config = make_config(data_path)
        config.l1.coefficient = coefficient
        config.train.num_steps = 60
        step = jax.jit(make_train_step(config))
        state = initial_state(config)
        dataset = training_dataset(str(data_path), sequence_length=16, batch_size=8, seed=0)
        for batch in itertools.islice(iter(dataset), 60):
            state, metrics = step(state, batch)
        active[coefficient] = float(np.mean(metrics["l0"]))
    assert active[3e-2] < 0.5 * active[0.0]


def test_dead_neurons_are_counted(data_path):
    config = make_config(data_path)
    config.train.dead_after_steps = 3
    state = initial_state(config)
    # Neurons 0 to 9 of layer 1 can never fire, and get no gradient.
    gate = state.params["blocks"][1]["ffn"]["w_gate"]
    state.params["blocks"][1]["ffn"]["w_gate"] = gate.at[:10].set(0)
    step = jax.jit(make_train_step(config))
    batch = batch_with((16,) * 8)
    fractions = []
    for _ in range(4):
        state, metrics = step(state, batch)
        fractions.append(float(metrics["dead_fraction"][1]))
    np.testing.assert_allclose(fractions, [0, 0, 10 / 64, 10 / 64], atol=1e-6)
    np.testing.assert_array_equal(state.steps_since_fired[1, :10], 4)


def test_a_non_finite_step_changes_nothing_but_the_count(data_path):
    config = make_config(data_path)
    config.l1.target_l0 = 10.0
    step = jax.jit(make_train_step(config))
    state, _ = step(initial_state(config), batch_with((16,) * 8))
    broken = jax.tree.map(lambda leaf: leaf, state)
    broken.params["embedding"]["embedding"] = (
        broken.params["embedding"]["embedding"].at[0].set(jnp.nan)
    )
    after, metrics = step(broken, batch_with((16,) * 7 + (3,)))
    assert float(metrics["finite"]) == 0
    assert int(after.step) == 2
    assert int(after.num_skipped) == 1
    for name in ("params", "opt_state", "l1", "steps_since_fired"):
        jax.tree.map(np.testing.assert_array_equal, getattr(after, name), getattr(broken, name))


def test_small_updates_are_not_lost(data_path):
    """Steps of a thousandth of bf16's spacing at 1 add up, as the parameters are f32."""
    config = make_config(data_path)
    config.model.dtype = "bfloat16"
    config.optimizer.learning_rate = 1e-3 * float(jnp.finfo(jnp.bfloat16).eps)
    config.optimizer.warmup_steps = 0
    config.optimizer.final_learning_rate_ratio = 1.0
    config.optimizer.weight_decay = 0.0
    config.train.num_steps = 100
    step = jax.jit(make_train_step(config))
    state = initial_state(config)
    scale = state.params["final_norm"]["scale"]
    assert scale.dtype == jnp.float32
    np.testing.assert_array_equal(scale, 1.0)
    for _ in range(20):
        state, _ = step(state, batch_with((16,) * 8))
    # Adam moves a parameter whose gradient keeps its sign by the learning rate a step.
    moved = np.abs(state.params["final_norm"]["scale"] - 1.0)
    assert np.median(moved) == pytest.approx(20 * config.optimizer.learning_rate, rel=0.1)


@pytest.mark.parametrize("warmup_steps", [0, 5])
def test_learning_rate_schedule(warmup_steps):
    config = OptimizerConfig(
        learning_rate=2e-3, warmup_steps=warmup_steps, final_learning_rate_ratio=0.1
    )
    schedule = learning_rate_schedule(config, 50)
    rates = [float(schedule(update)) for update in range(1, 51)]
    if warmup_steps:
        assert rates[warmup_steps - 1] == max(rates) == pytest.approx(2e-3)
        np.testing.assert_allclose(rates[:5], 2e-3 * np.arange(1, 6) / 5, rtol=1e-6)
    assert rates[-1] == pytest.approx(2e-4)
    assert np.all(np.diff(rates[max(warmup_steps, 1) - 1 :]) < 0)


def test_accumulation_does_not_change_the_learning_rate(data_path):
    rates = []
    for micro_batch_size in (0, 2):
        config = make_config(data_path)
        config.train.micro_batch_size = micro_batch_size
        step = jax.jit(make_train_step(config))
        state, seen = initial_state(config), []
        for _ in range(5):
            state, metrics = step(state, batch_with((16,) * 8))
            seen.append(float(metrics["learning_rate"]))
        rates.append(seen)
    assert rates[0] == rates[1]


def test_weight_decay_spares_norms_biases_and_tables(data_path):
    config = make_config(data_path)
    config.model.qkv_bias = True
    config.model.tie_embeddings = False
    params = initial_params(config.model, 0)
    mask = decay_mask(params, decay_embeddings=False)
    assert mask["embedding"]["embedding"] is False
    assert mask["head"] is False
    assert mask["final_norm"]["scale"] is False
    block = mask["blocks"][0]
    assert block["attention"]["query"] == {"kernel": True, "bias": False}
    assert block["ffn"] == {"w_gate": True, "w_up": True, "w_down": True}
    assert block["ffn_norm"] == {"scale": False}
    asked = decay_mask(params, decay_embeddings=True)
    assert asked["embedding"]["embedding"] is asked["head"] is True
    assert asked["final_norm"]["scale"] is False


def test_optimizer_is_adamw_behind_a_clip():
    config = OptimizerConfig(clip_norm=0.5, weight_decay=0.3)
    params = {"kernel": {"w": jnp.ones((3, 2))}}
    gradient = {"kernel": {"w": jnp.arange(6.0).reshape(3, 2)}}
    ours, theirs = (
        make_optimizer(config),
        optax.chain(
            optax.clip_by_global_norm(0.5),
            optax.adamw(1.0, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.3),
        ),
    )
    ours_state, theirs_state = ours.init(params), theirs.init(params)
    for _ in range(3):
        direction, ours_state = ours.update(gradient, ours_state, params)
        expected, theirs_state = theirs.update(gradient, theirs_state, params)
        np.testing.assert_allclose(-direction["kernel"]["w"], expected["kernel"]["w"], rtol=1e-6)


def test_evaluation_does_not_depend_on_the_batch_size(data_path):
    config = make_config(data_path)
    params = initial_params(config.model, 0)
    step = jax.jit(make_eval_step(config))
    results = []
    for size in (1, 3, 8):
        config.train.batch_size = size
        results.append(evaluate(config, str(data_path), step, params))
    batches = evaluation_batches(str(data_path), sequence_length=16, batch_size=1)
    assert results[0].num_targets == sum(batch["loss_mask"].sum() for batch in batches)
    for result in results[1:]:
        assert result.num_targets == results[0].num_targets
        assert result.cross_entropy == pytest.approx(results[0].cross_entropy, rel=1e-6)
        assert result.unigram_entropy == results[0].unigram_entropy
        np.testing.assert_allclose(result.l0, results[0].l0, rtol=1e-6)
        np.testing.assert_array_equal(result.silent_fraction, results[0].silent_fraction)
