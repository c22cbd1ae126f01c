"""Windows and batches: every token once, the same order whoever reads it."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twell_jax.data import store
from twell_jax.data.pipeline import evaluation_batches, training_dataset
from twell_jax.data.windows import TokenWindows


class ListStream:
    """A token stream in memory, made of documents."""

    def __init__(self, lengths):
        self.num_tokens = sum(lengths)
        self.tokens = np.arange(1, self.num_tokens + 1, dtype=np.int32)
        self.starts = np.zeros(self.num_tokens, bool)
        self.starts[np.cumsum([0, *lengths[:-1]])] = True

    def read(self, first, last):
        return self.tokens[first:last], self.starts[first:last]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 17))
def test_windows_cover_every_target_once(lengths, length):
    if sum(lengths) < 2:
        lengths = [2]
    stream = ListStream(lengths)
    windows = TokenWindows(stream, length)
    targets = []
    for number in range(len(windows)):
        window = windows[number]
        assert all(array.shape == (length,) for array in window.values())
        real = window["segment_ids"] > 0
        mask = window["loss_mask"]
        assert not mask[~real].any()
        # A target is the next token of the stream, in the same document.
        np.testing.assert_array_equal(window["targets"][mask], window["inputs"][mask] + 1)
        targets.extend(window["targets"][mask])
        index = window["inputs"][real] - 1
        # Segments and positions change exactly at document starts.
        changes = np.diff(window["segment_ids"][real]) == 1
        np.testing.assert_array_equal(changes, stream.starts[index][1:])
        document = np.cumsum(stream.starts)[index]
        for segment in np.unique(window["segment_ids"][real]):
            inside = window["segment_ids"][real] == segment
            assert len(np.unique(document[inside])) == 1
            np.testing.assert_array_equal(
                window["positions"][real][inside], np.arange(inside.sum())
            )
    expected = stream.tokens[~stream.starts]
    np.testing.assert_array_equal(targets, expected)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    write_split_folder(path, {"train": 50_000, "validation": 1_000})
    return path


def write_split_folder(path, sizes, shard_records=2):
    """Documents of random length whose ids count up modulo 60000."""
    import json

    rng = np.random.default_rng(0)
    splits = {}
    for split, size in sizes.items():
        writer = store.SplitWriter(path, split, "uint16", shard_records=shard_records)
        written = 0
        while written < size:
            length = min(int(rng.integers(1, 20_000)), size - written)
            writer.write((np.arange(written, written + length) % 60_000) + 1)
            written += length
        writer.close()
        splits[split] = writer.manifest()
    manifest = {
        "format_version": store.FORMAT_VERSION,
        "splits": splits,
        "record_tokens": store.RECORD_TOKENS,
        "token_dtype": "uint16",
        "vocab_size": 60_001,
    }
    (path / store.MANIFEST).write_text(json.dumps(manifest))


@settings(deadline=None)
@given(st.integers(0, 50_000), st.integers(0, 20_000))
def test_any_part_of_the_stream_can_be_read(folder, first, size):
    stream = store.TokenStream(folder, "train")
    last = min(first + size, stream.num_tokens)
    tokens, _ = stream.read(first, last)
    np.testing.assert_array_equal(tokens, np.arange(first, last) % 60_000 + 1)


def take(dataset, count):
    return list(itertools.islice(iter(dataset), count))


def rows_of(batches):
    return {tuple(row) for batch in batches for row in batch["inputs"]}


OPTIONS = {"sequence_length": 100, "batch_size": 8, "seed": 3}


def test_epochs_are_permutations(folder):
    # 500 windows of 100 tokens; 125 batches of 8 are two epochs.
    batches = take(training_dataset(folder, **OPTIONS), 125)
    firsts = np.concatenate([batch["inputs"][:, 0] for batch in batches])
    first_epoch, second_epoch = firsts[:500], firsts[500:]
    assert len(set(first_epoch)) == len(set(second_epoch)) == 500
    assert (first_epoch != second_epoch).any()
    assert (np.sort(first_epoch) != first_epoch).any()
    other = take(training_dataset(folder, **{**OPTIONS, "seed": 4}), 1)[0]
    assert (other["inputs"] != batches[0]["inputs"]).any()


def test_batches_of_one(folder):
    arguments = {"sequence_length": 100, "seed": 3}
    ones = training_dataset(folder, batch_size=1, **arguments)
    pairs = training_dataset(folder, batch_size=2, **arguments)
    ones = np.concatenate([batch["inputs"] for batch in itertools.islice(ones, 8)])
    pairs = np.concatenate([batch["inputs"] for batch in itertools.islice(pairs, 4)])
    np.testing.assert_array_equal(ones, pairs)


@pytest.mark.parametrize("num_parts", [2, 4])
def test_parts_make_up_each_global_batch(folder, num_parts):
    whole = take(training_dataset(folder, **OPTIONS), 70)
    parts = [
        take(
            training_dataset(folder, **OPTIONS, part=index, num_parts=num_parts),
            70,
        )
        for index in range(num_parts)
    ]
    for step, batch in enumerate(whole):
        shares = [rows_of([part[step]]) for part in parts]
        assert sum(len(share) for share in shares) == 8
        assert set.union(*shares) == rows_of([batch])


@pytest.mark.parametrize("step", [0, 1, 61, 62, 63, 100])
def test_an_iterator_continues_where_it_was(folder, step):
    uninterrupted = take(training_dataset(folder, **OPTIONS), step + 3)[step:]
    iterator = iter(training_dataset(folder, **OPTIONS))
    for _ in range(step):
        next(iterator)
    continued = iter(training_dataset(folder, **OPTIONS))
    continued.set_state(iterator.get_state())
    for batch in uninterrupted:
        for name, array in next(continued).items():
            np.testing.assert_array_equal(array, batch[name])


def test_evaluation_covers_every_target_once(folder):
    stream = store.TokenStream(folder, "validation")
    tokens, starts = stream.read(0, stream.num_tokens)
    for batch_size in (1, 4, 64):
        batches = list(evaluation_batches(folder, sequence_length=64, batch_size=batch_size))
        assert all(batch["inputs"].shape == (batch_size, 64) for batch in batches)
        targets = np.concatenate([batch["targets"][batch["loss_mask"]] for batch in batches])
        np.testing.assert_array_equal(targets, tokens[~starts])


def test_unusable_data_is_named(folder, tmp_path):
    with pytest.raises(ValueError, match="no prepared data here"):
        store.TokenStream(tmp_path, "train")
    with pytest.raises(ValueError, match="no split 'test'"):
        store.TokenStream(folder, "test")
    with pytest.raises(ValueError, match="batch_size: 8 does not divide into 3 parts"):
        training_dataset(folder, **OPTIONS, num_parts=3)
    write_split_folder(tmp_path, {"train": 40_000})
    (tmp_path / "train-00001.array_record").unlink()
    with pytest.raises(ValueError, match="shards named in the manifest are missing"):
        store.TokenStream(tmp_path, "train")
