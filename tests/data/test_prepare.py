"""From text files to a prepared folder: nothing lost, nothing silently dropped."""

import gzip
import json
import lzma
import re

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.preloaded import run_module
from twell_jax.data import store
from twell_jax.data.documents import BrokenRecord, read_documents
from twell_jax.data.preparation import PrepareOptions, prepare
from twell_jax.data.tokenizer import load_tokenizer, split_text
from twell_jax.data.windows import TokenWindows
from twell_jax.errors import DataError

# Of the document in its first words.
NUMBER = re.compile(r"Chapter (\d+)\n")

TEXTS = [f"Chapter {i}\n\nA line of chapter {i}.\nAnd <|endoftext|> ünïcode." for i in range(40)]


def read(path, **options):
    defaults = {"text_field": "text", "text_documents": "file"}
    return list(read_documents(path, **{**defaults, **options}))


def texts_of(records):
    return [record.text for record in records]


def test_text_documents(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n\n\nthree\n")
    assert texts_of(read(path)) == ["one\ntwo\n\n\nthree\n"]
    paragraphs = read(path, text_documents="paragraph")
    assert texts_of(paragraphs) == ["one\ntwo\n", "three\n"]
    assert paragraphs[1].place == f"{path}:5"
    assert texts_of(read(path, text_documents="line")) == ["one", "two", "three"]


@pytest.mark.parametrize(("suffix", "opener"), [(".gz", gzip.open), (".xz", lzma.open)])
def test_packed_text(tmp_path, suffix, opener):
    path = tmp_path / f"a.txt{suffix}"
    with opener(path, "wt") as file:
        file.write("packed\n")
    assert texts_of(read(path)) == ["packed\n"]


def test_a_damaged_archive_is_an_error(tmp_path):
    path = tmp_path / "a.txt.gz"
    text = "".join(f"line {n * n}\n" for n in range(10_000))
    path.write_bytes(gzip.compress(text.encode())[:5000])
    with pytest.raises(DataError, match=r"a\.txt\.gz: damaged after line \d+: "):
        read(path)


def test_broken_records_name_file_and_line(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = ['{"text": "good"}', "{bad", '{"other": 1}', '{"text": 5}', "[1]", '{"text": "end"}']
    lines.append('{"text": "half \\ud800"}')
    path.write_text("\n".join(lines) + "\n")
    records = read(path)
    assert texts_of(r for r in records if not isinstance(r, BrokenRecord)) == ["good", "end"]
    broken = [r for r in records if isinstance(r, BrokenRecord)]
    assert [b.place for b in broken] == [f"{path}:{n}" for n in (2, 3, 4, 5, 7)]
    assert "half of a surrogate pair" in broken[4].reason
    assert "not JSON" in broken[0].reason
    assert "no field 'text'" in broken[1].reason
    assert "is int, not a string" in broken[2].reason

    path = tmp_path / "b.txt"
    path.write_bytes(b"fine\n\xff\xfe\nalso fine\n")
    first, document = read(path)
    assert first == BrokenRecord(f"{path}:2", "not UTF-8: invalid start byte")
    assert document.text == "fine\nalso fine\n"


def test_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x", None, "z"]}), path)
    records = read(path, text_field="body")
    assert [type(r).__name__ for r in records] == ["Document", "BrokenRecord", "Document"]
    assert records[1].place == f"{path}:2"
    (missing,) = read(path)
    assert missing.reason == "no column 'text'; it has body"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"a\.parquet: not a whole parquet file"):
        read(path, text_field="body")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    source = folder / "in.jsonl"
    lines = [json.dumps({"text": text}) for text in TEXTS]
    lines.insert(3, "{broken")
    lines.insert(9, json.dumps({"text": ""}))
    source.write_text("\n".join(lines))
    options = PrepareOptions(inputs=(str(source),), vocab_size=300, validation_fraction=0.1)
    manifest = prepare(options, folder / "out")
    return folder, options, manifest


def documents_of(folder, split):
    tokenizer = load_tokenizer(folder / store.TOKENIZER)
    stream = store.TokenStream(folder, split)
    tokens, starts = stream.read(0, stream.num_tokens)
    documents = np.split(tokens, np.flatnonzero(starts)[1:])
    assert all(document[-1] == 0 for document in documents)
    return [tokenizer.decode(d[:-1].tolist(), skip_special_tokens=False) for d in documents]


def test_every_document_comes_back(prepared):
    folder, _, manifest = prepared
    train, validation = (documents_of(folder / "out", split) for split in store.SPLITS)
    assert validation == TEXTS[9::10]
    assert train == [text for i, text in enumerate(TEXTS) if i % 10 != 9]
    assert manifest["broken_records"] == 1
    assert manifest["broken_records_listed"][0]["place"].endswith("in.jsonl:4")
    assert manifest["empty_documents"] == 1
    assert manifest == store.read_manifest(folder / "out")


def test_preparing_again_gives_the_same(prepared, tmp_path):
    folder, options, manifest = prepared
    assert prepare(options, tmp_path / "again") == manifest
    with_tokenizer = PrepareOptions(
        inputs=options.inputs,
        tokenizer=str(folder / "out" / store.TOKENIZER),
        validation_fraction=0.1,
    )
    reused = prepare(with_tokenizer, tmp_path / "reused")
    assert reused["splits"] == manifest["splits"]
    assert reused["tokenizer_sha256"] == manifest["tokenizer_sha256"]


def test_nothing_is_overwritten_or_left_behind(prepared, tmp_path):
    folder, options, _ = prepared
    with pytest.raises(FileExistsError, match="exists; choose another folder"):
        prepare(options, folder / "out")
    none_held_out = PrepareOptions(inputs=options.inputs, vocab_size=300)
    with pytest.raises(ValueError, match=r"validation_fraction: 0\.005 of 40 documents"):
        prepare(none_held_out, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_that_truncates_and_pads_does_not(prepared, tmp_path):
    """As published tokenizers of encoders do."""
    folder, options, manifest = prepared
    tokenizer = load_tokenizer(folder / "out" / store.TOKENIZER)
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    cutting = PrepareOptions(
        inputs=options.inputs,
        tokenizer=str(tmp_path / "tokenizer.json"),
        validation_fraction=0.1,
    )
    assert prepare(cutting, tmp_path / "out")["splits"] == manifest["splits"]


@pytest.mark.parametrize(("fraction", "held_out"), [(0.1, 4), (0.3, 12), (0.5, 20), (0.025, 1)])
def test_the_share_that_is_held_out(prepared, tmp_path, fraction, held_out):
    _, options, _ = prepared
    # Documents are cut, too: none is in both splits.
    cut = PrepareOptions(
        inputs=options.inputs,
        vocab_size=300,
        validation_fraction=fraction,
        max_document_tokens=16,
    )
    prepare(cut, tmp_path / "out")
    train, validation = (
        {int(n) for text in documents_of(tmp_path / "out", split) for n in NUMBER.findall(text)}
        for split in store.SPLITS
    )
    assert len(validation) == held_out
    assert train | validation == set(range(40))
    assert not train & validation


def test_long_documents_are_cut(prepared, tmp_path):
    _, options, _ = prepared
    cut = PrepareOptions(
        inputs=options.inputs, vocab_size=300, validation_fraction=0.1, max_document_tokens=16
    )
    manifest = prepare(cut, tmp_path / "out")
    pieces = documents_of(tmp_path / "out", "train")
    assert len(pieces) == manifest["splits"]["train"]["documents"] > 40
    windows = TokenWindows(store.TokenStream(tmp_path / "out", "train"), 200)
    assert windows[0]["positions"].max() <= 16


def test_text_is_split_without_loss():
    text = "\n".join("x" * (n % 700) for n in range(2000))
    pieces = list(split_text(text))
    assert "".join(pieces) == text
    assert len(pieces) > 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inputs": ()}, "input: no file"),
        ({"vocab_size": 0}, "either tokenizer .* or vocab_size"),
        ({"vocab_size": 100}, "vocab_size: must be at least 257"),
        ({"text_documents": "page"}, "text_documents: must be one of file, paragraph, line"),
        ({"validation_fraction": 0.0}, "validation_fraction: must be in"),
        ({"separator_token": "<x>"}, "none of '<x>'"),
    ],
)
def test_wrong_options_are_named(prepared, tmp_path, options, message):
    _, base, _ = prepared
    with pytest.raises(ValueError, match=message):
        prepare(
            PrepareOptions(**{"inputs": base.inputs, "vocab_size": 300, **options}), tmp_path / "o"
        )


def test_command_line(prepared, tmp_path):
    _, options, _ = prepared

    def run(*arguments):
        return run_module("twell_jax.prepare", *arguments)

    arguments = [f"--input={options.inputs[0]}", f"--output={tmp_path / 'out'}"]
    done = run(*arguments, "--vocab_size=300", "--validation_fraction=0.1")
    assert done.returncode == 0
    assert "broken record left out" in done.stderr
    assert "in.jsonl:4" in done.stderr
    assert "1 broken records, 1 empty" in done.stderr
    refused = run(*arguments, "--vocab_size=300")
    assert refused.returncode == 1
    assert "exists" in refused.stderr
    assert "Traceback" not in refused.stderr
    nothing = run("--input=/nowhere/*", f"--output={tmp_path / 'b'}", "--vocab_size=300")
    assert nothing.returncode != 0
    assert "--input=/nowhere/* matches no file" in nothing.stderr + nothing.stdout
