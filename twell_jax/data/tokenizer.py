"""Byte-level BPE tokenizers, trained or loaded with the `tokenizers` library."""

import pathlib
from collections.abc import Iterable, Iterator

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SEPARATOR = "<|endoftext|>"

# Names that common tokenizers give to the token between documents.
_KNOWN_SEPARATORS = (SEPARATOR, "</s>", "<|end_of_text|>", "<eos>", "<|eot_id|>")

# Long documents are encoded in pieces of about this many characters, cut at line ends:
# one long string would keep one core busy and take many times its size in memory.
_PIECE_CHARACTERS = 1 << 16


def train_tokenizer(texts: Iterable[str], vocab_size: int, *, show_progress: bool) -> Tokenizer:
    """Trains a byte-level BPE vocabulary whose token 0 is `SEPARATOR`.

    Args:
      texts: the documents to learn from.
      vocab_size: number of tokens, at least 257: the separator and every byte.
      show_progress: whether the library draws its progress bars.

    Raises:
      ValueError: `vocab_size` is too small.
    """
    if vocab_size < 257:
        raise ValueError(
            f"vocab_size: must be at least 257 (256 bytes and the separator), got {vocab_size}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=show_progress,
    )
    pieces = (piece for text in texts for piece in split_text(text))
    tokenizer.train_from_iterator(pieces, trainer)
    return tokenizer


def load_tokenizer(path: pathlib.Path) -> Tokenizer:
    """Loads a tokenizer file in the JSON format of the `tokenizers` library.

    Truncation and padding, which such a file may ask for, are turned off: text would be lost.
    """
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(
            f"{path}: not a tokenizer file of the tokenizers library: {error}"
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def find_separator(tokenizer: Tokenizer, name: str = "") -> tuple[str, int]:
    """(token, id) of the document separator: `name`, or the first well-known one.

    Raises:
      ValueError: the tokenizer has no such token.
    """
    candidates = (name,) if name else _KNOWN_SEPARATORS
    for candidate in candidates:
        if (token_id := tokenizer.token_to_id(candidate)) is not None:
            return candidate, token_id
    raise ValueError(
        f"separator_token: the tokenizer has none of {', '.join(map(repr, candidates))}; "
        "name the token that it uses between documents"
    )


def encode_documents(tokenizer: Tokenizer, texts: list[str]) -> Iterator[list[int]]:
    """Token ids of each text; the name of a special token inside a text is just text."""
    tokenizer.encode_special_tokens = True
    pieces, owners = [], []
    for number, text in enumerate(texts):
        for piece in split_text(text):
            pieces.append(piece)
            owners.append(number)
    ids = [[] for _ in texts]
    for owner, encoding in zip(
        owners, tokenizer.encode_batch(pieces, add_special_tokens=False), strict=True
    ):
        ids[owner].extend(encoding.ids)
    yield from ids


def split_text(text: str) -> Iterator[str]:
    """Cuts a text at line ends into pieces of about `_PIECE_CHARACTERS`."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + _PIECE_CHARACTERS)
        end = len(text) if end < 0 else end + 1
        yield text[start:end]
        start = end
