"""The folder of prepared data: ArrayRecord shards of token ids, tokenizer and manifest.

Each split is one stream of tokens, in which every document is followed by the separator.
The stream is cut into records of `RECORD_TOKENS` tokens (only the last may be shorter),
and the records into shards; so the record that holds a position of the stream is found by
division, and a window anywhere costs a read or two. Where documents begin is kept beside
the tokens: the separator's id alone does not tell, since a text may spell it out.
"""

import functools
import hashlib
import json
import pathlib

import grain
import msgpack
import numpy as np
from array_record.python import array_record_module

from twell_jax.errors import DataError

# Records kept in memory by a stream, at most 256 MiB of 16-bit tokens: a record holds
# several windows, which a shuffled epoch asks for at different times.
_CACHED_RECORDS = 16384

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
SPLITS = ("train", "validation")
RECORD_TOKENS = 8192


class SplitWriter:
    """Writes one split; `manifest()` describes it once it is closed."""

    def __init__(self, folder: pathlib.Path, split: str, dtype: str, shard_records: int = 4096):
        """Token ids are stored as `dtype`, "uint16" or "uint32"."""
        self._folder, self._split, self._dtype = folder, split, np.dtype(dtype)
        self._shard_records = shard_records
        self._pending: list[np.ndarray] = []
        self._pending_starts: list[int] = []
        self._pending_tokens = 0
        self._shards: list[str] = []
        self._writer = None
        self._records = self._tokens = self._documents = 0

    def write(self, document: np.ndarray) -> None:
        """Appends one document, its separator included."""
        self._pending_starts.append(self._pending_tokens)
        self._pending.append(document.astype(self._dtype))
        self._pending_tokens += len(document)
        self._tokens += len(document)
        self._documents += 1
        if self._pending_tokens >= RECORD_TOKENS:
            self._flush(whole_only=True)

    def close(self) -> None:
        """Writes what is left."""
        self._flush(whole_only=False)
        if self._writer is not None:
            self._writer.close()

    def manifest(self) -> dict:
        """Counts and file names of this split."""
        return {
            "tokens": self._tokens,
            "documents": self._documents,
            "records": self._records,
            "shards": self._shards,
        }

    def _flush(self, whole_only: bool) -> None:
        tokens = np.concatenate(self._pending) if self._pending else np.zeros(0, self._dtype)
        starts = np.asarray(self._pending_starts, np.uint32)
        first = 0
        while first + RECORD_TOKENS <= len(tokens) or (not whole_only and first < len(tokens)):
            last = first + RECORD_TOKENS
            here = starts[(starts >= first) & (starts < last)] - first
            self._write_record(tokens[first:last], here)
            first = last
        rest = tokens[first:]
        self._pending, self._pending_tokens = [rest], len(rest)
        self._pending_starts = [int(start) - first for start in starts if start >= first]

    def _write_record(self, tokens, starts) -> None:
        if self._records % self._shard_records == 0:
            if self._writer is not None:
                self._writer.close()
            name = f"{self._split}-{len(self._shards):05d}.array_record"
            self._shards.append(name)
            # One record a group: each can be read without its neighbours.
            self._writer = array_record_module.ArrayRecordWriter(
                str(self._folder / name), "group_size:1"
            )
        self._writer.write(
            msgpack.packb({"tokens": tokens.tobytes(), "starts": starts.astype("<u4").tobytes()})
        )
        self._records += 1


class TokenStream:
    """Random access to the token stream of one split of a prepared folder."""

    def __init__(self, folder: str | pathlib.Path, split: str):
        """Raises DataError if the folder, its manifest or its shards are not as they must be."""
        self._folder = pathlib.Path(folder)
        manifest = read_manifest(self._folder)
        if split not in manifest["splits"]:
            raise DataError(f"{folder}: no split {split!r}; it has {list(manifest['splits'])}")
        info = manifest["splits"][split]
        self.num_tokens = info["tokens"]
        self._dtype = np.dtype(manifest["token_dtype"]).newbyteorder("<")
        self._record_tokens = manifest["record_tokens"]
        paths = [str(self._folder / name) for name in info["shards"]]
        missing = [path for path in paths if not pathlib.Path(path).is_file()]
        if missing:
            raise DataError(f"{folder}: shards named in the manifest are missing: {missing}")
        self._records = grain.sources.ArrayRecordDataSource(paths) if paths else ()
        if len(self._records) != info["records"]:
            raise DataError(
                f"{folder}: split {split!r} has {len(self._records)} records, its manifest says "
                f"{info['records']}; prepare the data again"
            )
        self._record = functools.lru_cache(maxsize=_CACHED_RECORDS)(self._read_record)

    def _read_record(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of a record, and the offsets in it where documents start."""
        record = msgpack.unpackb(self._records[number])
        starts = np.frombuffer(record["starts"], "<u4").astype(np.int64)
        return np.frombuffer(record["tokens"], self._dtype), starts

    def read(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens `[first, last)` as int32, and a bool array that marks document starts."""
        numbers = range(first // self._record_tokens, -(-last // self._record_tokens))
        tokens = np.empty(last - first, np.int32)
        starts = np.zeros(last - first, bool)
        for number in numbers:
            here, begins = self._record(number)
            offset = number * self._record_tokens - first  # of the record in the result
            low, high = max(0, -offset), min(len(here), last - first - offset)
            tokens[offset + low : offset + high] = here[low:high]
            begins = begins + offset
            starts[begins[(begins >= 0) & (begins < last - first)]] = True
        return tokens, starts


def fingerprint(folder: str | pathlib.Path) -> str:
    """Identifies the content of a prepared folder, wherever it lies: a hash of its manifest,
    which has those of the inputs and of the tokenizer."""
    manifest = json.dumps(read_manifest(folder), sort_keys=True)
    return hashlib.sha256(manifest.encode()).hexdigest()


def read_manifest(folder: str | pathlib.Path) -> dict:
    """The manifest of a prepared folder; DataError if there is none that can be read."""
    path = pathlib.Path(folder) / MANIFEST
    if not path.is_file():
        raise DataError(
            f"{folder}: no prepared data here ({MANIFEST} is missing); make some with "
            "python -m twell_jax.prepare --input=GLOB --output=DIR"
        )
    manifest = json.loads(path.read_text())
    if manifest.get("format_version") != FORMAT_VERSION:
        raise DataError(
            f"{path}: format version {manifest.get('format_version')}, this code reads "
            f"{FORMAT_VERSION}; prepare the data again"
        )
    return manifest
