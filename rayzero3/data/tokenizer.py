"""Tokenizer files: read, and applied to whole texts as the model that they belong to knows them."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from rayzero3.errors import DataError


def read_tokenizer(path: Path) -> Tokenizer:
    """A tokenizer.json, without the truncation and the padding that it may have been saved with. Raises DataError if it is none."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"the tokenizer {path}", "not readable", str(error), "Give the tokenizer.json that belongs to the model.") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text behind those that the tokenizer's template puts before it, as Llama's beginning of text. What it puts after one is left out.

    A text without a token of its own, as the empty one, has none.
    """
    encoding = tokenizer.encode(text)
    added = encoding.special_tokens_mask
    return encoding.ids[: len(added) - added[::-1].index(0)] if 0 in added else []
