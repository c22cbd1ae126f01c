"""Turns text into a folder of token shards; `twell_jax.prepare` is its command line."""

import dataclasses
import fractions
import hashlib
import itertools
import json
import os
import pathlib
import shutil
from collections.abc import Iterator

import numpy as np
from absl import logging

from twell_jax.console import progress_bar
from twell_jax.data import documents, store
from twell_jax.data import tokenizer as tokenizers

# Documents are encoded in batches, which the tokenizer spreads over the cores.
_BATCH_DOCUMENTS = 256
_MAX_LISTED = 100


@dataclasses.dataclass(frozen=True)
class PrepareOptions:
    """What to prepare, and how.

    Attributes:
      inputs: the files, in the order in which they are read.
      tokenizer: a tokenizer file, or "" to train one of `vocab_size` on the inputs.
      vocab_size: of the trained tokenizer; 0 with a given one.
      separator_token: the token between documents; "" looks for a well-known one.
      file_format: one of `documents.FORMATS`.
      text_field: field or column of the text.
      text_documents: one of `documents.TEXT_DOCUMENTS`.
      max_document_tokens: longer documents are cut into several; 0 cuts none.
      validation_fraction: share of the documents that is held out, spread evenly over all.
        A document that is cut is held out whole.
    """

    inputs: tuple[str, ...]
    tokenizer: str = ""
    vocab_size: int = 0
    separator_token: str = ""
    file_format: str = "auto"
    text_field: str = "text"
    text_documents: str = "file"
    max_document_tokens: int = 0
    validation_fraction: float = 0.005

    def __post_init__(self):
        if not self.inputs:
            raise ValueError("input: no file matches")
        if bool(self.tokenizer) == bool(self.vocab_size):
            raise ValueError("give either tokenizer (a file) or vocab_size (to train one)")
        if self.file_format not in documents.FORMATS:
            raise ValueError(f"format: must be one of {', '.join(documents.FORMATS)}")
        if self.text_documents not in documents.TEXT_DOCUMENTS:
            allowed = ", ".join(documents.TEXT_DOCUMENTS)
            raise ValueError(f"text_documents: must be one of {allowed}")
        if not 0 < self.validation_fraction <= 0.5:
            raise ValueError(
                f"validation_fraction: must be in (0, 0.5], got {self.validation_fraction}"
            )
        if self.max_document_tokens < 0:
            raise ValueError(f"max_document_tokens: must be >= 0, got {self.max_document_tokens}")


class _Documents:
    """The documents of all inputs; remembers what could not be read."""

    def __init__(self, options: PrepareOptions):
        self._options = options
        self.broken: list[documents.BrokenRecord] = []
        self.num_empty = 0

    def read(self, description: str) -> Iterator[documents.Document]:
        """Non-empty documents, in order, under a progress bar over the input bytes."""
        self.broken, self.num_empty = [], 0
        options = self._options
        total = sum(os.path.getsize(path) for path in options.inputs)
        with progress_bar(description, total=total, unit="bytes") as advance:
            for path in options.inputs:
                records = documents.read_documents(
                    pathlib.Path(path),
                    file_format=options.file_format,
                    text_field=options.text_field,
                    text_documents=options.text_documents,
                )
                for record in records:
                    if isinstance(record, documents.BrokenRecord):
                        self.broken.append(record)
                    elif record.text:
                        yield record
                    else:
                        self.num_empty += 1
                advance(os.path.getsize(path))


def prepare(options: PrepareOptions, output: str | pathlib.Path) -> dict:
    """Writes the folder `output` and returns its manifest.

    The folder appears only when it is complete.

    Raises:
      ValueError: the options cannot work on these inputs.
      FileExistsError: `output` exists.
    """
    output = pathlib.Path(output)
    if output.exists():
        raise FileExistsError(f"output: {output} exists; choose another folder or remove it")
    source = _Documents(options)
    if options.tokenizer:
        tokenizer = tokenizers.load_tokenizer(pathlib.Path(options.tokenizer))
    else:
        texts = (document.text for document in source.read("training the tokenizer"))
        tokenizer = tokenizers.train_tokenizer(texts, options.vocab_size, show_progress=False)
    separator, separator_id = tokenizers.find_separator(tokenizer, options.separator_token)

    partial = output.with_name(f"{output.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        manifest = _write(options, source, tokenizer, separator_id, partial)
        manifest |= {"separator": separator, "separator_id": separator_id}
        (partial / store.MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def _write(options, source, tokenizer, separator_id, folder) -> dict:
    vocab_size = tokenizer.get_vocab_size()
    dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
    writers = {split: store.SplitWriter(folder, split, dtype) for split in store.SPLITS}
    number = 0
    # As it was written, so that 0.1 is a tenth.
    fraction = fractions.Fraction(str(options.validation_fraction))
    for batch in itertools.batched(source.read("tokenizing"), _BATCH_DOCUMENTS):
        texts = [document.text for document in batch]
        for ids in tokenizers.encode_documents(tokenizer, texts):
            held_out = int((number + 1) * fraction) > int(number * fraction)
            writer = writers["validation" if held_out else "train"]
            number += 1
            for piece in _cut(ids, options.max_document_tokens):
                writer.write(np.asarray([*piece, separator_id]))
    for writer in writers.values():
        writer.close()
    splits = {split: writer.manifest() for split, writer in writers.items()}
    _report_broken(source.broken)
    if not splits["validation"]["documents"]:
        raise ValueError(
            f"validation_fraction: {options.validation_fraction:g} of {number} documents holds "
            "none out; raise it, or make smaller documents with text_documents"
        )
    # The tokenizer spells out special tokens in texts; one loaded from the file must not.
    tokenizer.encode_special_tokens = False
    tokenizer.save(str(folder / store.TOKENIZER))
    return {
        "format_version": store.FORMAT_VERSION,
        "splits": splits,
        "record_tokens": store.RECORD_TOKENS,
        "token_dtype": dtype,
        "vocab_size": vocab_size,
        "tokenizer_sha256": _sha256(folder / store.TOKENIZER),
        "inputs": [
            {
                "name": os.path.basename(path),
                "bytes": os.path.getsize(path),
                "sha256": _sha256(path),
            }
            for path in options.inputs
        ],
        "options": {
            name: value
            for name, value in dataclasses.asdict(options).items()
            if name not in ("inputs", "tokenizer")
        },
        "empty_documents": source.num_empty,
        "broken_records": len(source.broken),
        "broken_records_listed": [dataclasses.asdict(b) for b in source.broken[:_MAX_LISTED]],
    }


def _cut(ids: list[int], size: int) -> Iterator[list[int]]:
    if not size:
        yield ids
        return
    for first in range(0, len(ids), size):
        yield ids[first : first + size]


def _report_broken(broken) -> None:
    for record in broken[:_MAX_LISTED]:
        logging.warning("broken record left out: %s: %s", record.place, record.reason)
    if len(broken) > _MAX_LISTED:
        logging.warning("… and %d more", len(broken) - _MAX_LISTED)


def _sha256(path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
