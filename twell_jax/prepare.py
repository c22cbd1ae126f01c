r"""Turns text into a folder of token shards that train.py reads.

  python -m twell_jax.prepare --input='books/*.txt' --output=data/books --vocab_size=16384
  python -m twell_jax.prepare --input=web.jsonl.gz --output=data/web --tokenizer=tokenizer.json

Inputs are text (one document a file, paragraph or line: --text_documents), JSONL or
parquet (--text_field), plain or packed as .gz, .xz or .bz2. Records that cannot be read
are reported with file and line, counted, and named in the manifest.
"""

import collections
import glob
import itertools
import os
import sys

from absl import app, flags

from twell_jax.console import console
from twell_jax.data import documents
from twell_jax.data.preparation import PrepareOptions, prepare

_INPUT = flags.DEFINE_multi_string(
    "input", None, "Files to read, as a glob; may be given several times.", required=True
)
_OUTPUT = flags.DEFINE_string("output", None, "Folder to create.", required=True)
_TOKENIZER = flags.DEFINE_string(
    "tokenizer", "", "Tokenizer file (JSON of the tokenizers library) to use."
)
_VOCAB_SIZE = flags.DEFINE_integer(
    "vocab_size", 0, "Train a byte-level BPE tokenizer of this size on the inputs instead."
)
_SEPARATOR = flags.DEFINE_string(
    "separator_token", "", "Token between documents; by default a well-known one is looked for."
)
_FORMAT = flags.DEFINE_enum(
    "format", "auto", documents.FORMATS, "Format of the inputs; auto goes by the file name."
)
_TEXT_FIELD = flags.DEFINE_string(
    "text_field", "text", "Field (JSONL) or column (parquet) that holds the text."
)
_TEXT_DOCUMENTS = flags.DEFINE_enum(
    "text_documents",
    "file",
    documents.TEXT_DOCUMENTS,
    "What is one document of a text file; paragraphs stand between blank lines.",
)
_MAX_DOCUMENT_TOKENS = flags.DEFINE_integer(
    "max_document_tokens", 0, "Cut longer documents into several of this many tokens; 0: never."
)
_VALIDATION_FRACTION = flags.DEFINE_float(
    "validation_fraction", 0.005, "Share of the documents to hold out for evaluation."
)


def main(argv: list[str]) -> None:
    """Command line of `python -m twell_jax.prepare`."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}; quote a glob that --input is given")
    matches = [sorted(glob.glob(pattern, recursive=True)) for pattern in _INPUT.value]
    for pattern, files in zip(_INPUT.value, matches, strict=True):
        if not files:
            raise app.UsageError(f"--input={pattern} matches no file")
        if not any(os.path.isfile(path) for path in files):
            raise app.UsageError(f"--input={pattern} is a folder; did you mean {pattern}/*?")
    files = [path for path in itertools.chain(*matches) if os.path.isfile(path)]
    repeated = [path for path, count in collections.Counter(files).items() if count > 1]
    if repeated:
        raise app.UsageError(f"--input names these files more than once: {repeated[:5]}")
    try:
        options = PrepareOptions(
            inputs=tuple(files),
            tokenizer=_TOKENIZER.value,
            vocab_size=_VOCAB_SIZE.value,
            separator_token=_SEPARATOR.value,
            file_format=_FORMAT.value,
            text_field=_TEXT_FIELD.value,
            text_documents=_TEXT_DOCUMENTS.value,
            max_document_tokens=_MAX_DOCUMENT_TOKENS.value,
            validation_fraction=_VALIDATION_FRACTION.value,
        )
        manifest = prepare(options, _OUTPUT.value)
    except (ValueError, OSError) as error:
        sys.exit(f"prepare: {error}")
    for split, info in manifest["splits"].items():
        console.print(
            f"{split}: {info['documents']:,} documents, {info['tokens']:,} tokens, "
            f"{len(info['shards'])} shards"
        )
    console.print(
        f"{manifest['broken_records']:,} broken records, {manifest['empty_documents']:,} empty; "
        f"vocabulary of {manifest['vocab_size']:,}; written to {_OUTPUT.value}"
    )


if __name__ == "__main__":
    app.run(main)
