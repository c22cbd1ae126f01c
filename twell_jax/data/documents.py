"""Reads documents out of text, JSONL and parquet files."""

import bz2
import dataclasses
import gzip
import json
import lzma
import pathlib
import re
import zlib
from collections.abc import Iterator

from twell_jax.errors import DataError

FORMATS = ("auto", "text", "jsonl", "parquet")
TEXT_DOCUMENTS = ("file", "paragraph", "line")

_OPENERS = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}


# JSON can spell out what no UTF-8 text can hold.
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclasses.dataclass(frozen=True)
class Document:
    """One document: its text and where it begins, as `file:line` (or row, for parquet)."""

    text: str
    place: str


@dataclasses.dataclass(frozen=True)
class BrokenRecord:
    """A record that could not be read: where, and why."""

    place: str
    reason: str


def resolve_format(path: pathlib.Path, name: str = "auto") -> str:
    """The format of a file: `name`, or for "auto" what its suffix says (text by default)."""
    if name != "auto":
        return name
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in _OPENERS]
    last = suffixes[-1] if suffixes else ""
    return {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}.get(last, "text")


def read_documents(
    path: pathlib.Path, *, file_format: str = "auto", text_field: str, text_documents: str
) -> Iterator[Document | BrokenRecord]:
    """All records of a file, in order. Text may be packed as .gz, .xz or .bz2.

    Args:
      path: the file.
      file_format: one of `FORMATS`.
      text_field: the field (JSONL) or column (parquet) that holds the text.
      text_documents: what is one document of a text file, one of `TEXT_DOCUMENTS`: the
        whole file, a paragraph (paragraphs stand between blank lines) or a line.
    """
    resolved = resolve_format(path, file_format)
    if resolved == "parquet":
        return _read_parquet(path, text_field)
    if resolved == "jsonl":
        return _read_jsonl(path, text_field)
    return _read_text(path, text_documents)


def _lines(path: pathlib.Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        with _OPENERS.get(path.suffix.lower(), open)(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                yield number, line
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        # What follows cannot be unpacked, so that nobody knows how much it is.
        raise DataError(f"{path}: damaged after line {number}: {error}") from error


def _read_text(path, text_documents) -> Iterator[Document | BrokenRecord]:
    parts, first_line = [], 1
    for number, raw in _lines(path):
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            # The line is left out; the rest of the document is kept.
            yield BrokenRecord(f"{path}:{number}", f"not UTF-8: {error.reason}")
            continue
        blank = not line.strip()
        if text_documents == "line":
            if not blank:
                yield Document(line.rstrip("\r\n"), f"{path}:{number}")
            continue
        if text_documents == "paragraph" and blank:
            if parts:
                yield Document("".join(parts), f"{path}:{first_line}")
            parts = []
            continue
        if not parts:
            first_line = number
        parts.append(line)
    if parts:
        yield Document("".join(parts), f"{path}:{first_line}")


def _read_jsonl(path, text_field) -> Iterator[Document | BrokenRecord]:
    for number, raw in _lines(path):
        place = f"{path}:{number}"
        if not raw.strip():
            continue
        try:
            record = json.loads(raw)
        except ValueError as error:
            yield BrokenRecord(place, f"not JSON: {error}")
            continue
        if not isinstance(record, dict) or text_field not in record:
            yield BrokenRecord(place, f"no field {text_field!r}")
        elif not isinstance(record[text_field], str):
            kind = type(record[text_field]).__name__
            yield BrokenRecord(place, f"field {text_field!r} is {kind}, not a string")
        elif _SURROGATE.search(record[text_field]):
            yield BrokenRecord(place, f"field {text_field!r} has half of a surrogate pair")
        else:
            yield Document(record[text_field], place)


def _read_parquet(path, text_field) -> Iterator[Document | BrokenRecord]:
    import pyarrow
    import pyarrow.parquet  # slow to import, and only parquet inputs need it

    try:
        yield from _parquet_records(pyarrow.parquet.ParquetFile(path), path, text_field)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a whole parquet file: {error}") from error


def _parquet_records(file, path, text_field) -> Iterator[Document | BrokenRecord]:
    if text_field not in file.schema_arrow.names:
        yield BrokenRecord(
            str(path), f"no column {text_field!r}; it has {', '.join(file.schema_arrow.names)}"
        )
        return
    row = 0
    for batch in file.iter_batches(columns=[text_field], batch_size=1024):
        for text in batch.column(0).to_pylist():
            row += 1
            if isinstance(text, str):
                yield Document(text, f"{path}:{row}")
            else:
                kind = type(text).__name__
                reason = f"column {text_field!r} is {kind}, not a string"
                yield BrokenRecord(f"{path}:{row}", reason)
