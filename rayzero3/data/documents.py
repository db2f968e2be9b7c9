"""Documents: the texts in a user's files, and how they are dealt out in units and shards. Pure Python: no Ray, no tokenizer."""

from __future__ import annotations

import fnmatch
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rayzero3.errors import DataError

UNREADABLE = (UnicodeDecodeError, PermissionError)
"""What reading a file raises if it is to be left out."""

SMALLEST_SHARD_BYTES, LARGEST_SHARD_BYTES, SHARDS_WANTED = 2**20, 2**26, 16
"""Bytes of text of a shard: the total over SHARDS_WANTED, within these bounds."""


@dataclass(frozen=True)
class Unit:
    """A piece of work: a text file, which is one document, or the lines of a JSONL file that begin in bytes [start, stop)."""

    path: str
    name: str
    start: int
    stop: int

    @property
    def is_jsonl(self) -> bool:
        return self.path.endswith((".jsonl", ".ndjson"))


def find_files(inputs: Sequence[Path], pattern: str, exclude: Sequence[str]) -> list[tuple[Path, str]]:
    """Input files and their names relative to the input, in an order that no directory decides.

    Args:
        inputs: Files, taken as they are, and folders, searched at any depth.
        pattern: Glob for the names of files in folders.
        exclude: Globs for relative paths that are left out.

    Raises:
        DataError: an input is missing, or nothing is found.
    """
    found = []
    for given in map(Path, inputs):
        if given.is_file():
            found.append((given, given.name))
        elif given.is_dir():
            names = sorted(path.relative_to(given).as_posix() for path in given.rglob(pattern) if path.is_file())
            found += [(given / name, name) for name in names if not any(fnmatch.fnmatch(name, glob) for glob in exclude)]
        else:
            raise DataError(f"the input {given}", "missing", "expected a file or a folder", "Check the path.")
    if not found:
        raise DataError(f"the files that match {pattern}", "none", f"in {', '.join(map(str, inputs))}", "Change --pattern or the inputs.")
    return found


def shard_units(files: Sequence[tuple[Path, str]]) -> list[list[Unit]]:
    """Deal files, and byte ranges of large JSONL files, out in shards of about equal bytes. A function of names and sizes alone."""
    sizes = [path.stat().st_size for path, _ in files]
    target = min(LARGEST_SHARD_BYTES, max(SMALLEST_SHARD_BYTES, sum(sizes) // SHARDS_WANTED))
    units = []
    for (path, name), size in zip(files, sizes, strict=True):
        whole = Unit(str(path), name, 0, size)
        units += [Unit(str(path), name, at, min(size, at + target)) for at in range(0, size, target)] if whole.is_jsonl else [whole]
    shards: list[list[Unit]] = [[]]
    filled = 0
    for unit in units:
        if filled >= target:
            shards.append([])
            filled = 0
        shards[-1].append(unit)
        filled += unit.stop - unit.start
    return shards


def read_documents(unit: Unit, text_key: str) -> Iterator[str]:
    """The texts of a unit; empty ones are left out.

    Raises:
        UnicodeDecodeError: a text file that is not UTF-8.
        PermissionError: a file that may not be read.
        DataError: a line of a JSONL file that is no object with a text under `text_key`; names file and line.
    """
    if not unit.is_jsonl:
        text = Path(unit.path).read_bytes().decode("utf-8")
        if text:
            yield text
        return
    with open(unit.path, "rb") as file:
        if unit.start:
            file.seek(unit.start - 1)
            file.readline()
        while file.tell() < unit.stop and (line := file.readline()):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[text_key]
                if not isinstance(text, str):
                    raise TypeError(f"its {text_key!r} is no text")
            except (ValueError, KeyError, TypeError) as error:
                number = _line_number(unit.path, file.tell() - len(line))
                wrong = f"it has no key {text_key!r}" if isinstance(error, KeyError) else str(error)
                raise DataError(f"line {number} of {unit.path}", None, wrong, f'Every line is an object such as {{"{text_key}": "..."}}; see --text-key.') from None
            if text:
                yield text


def is_validation(text: str, fraction: float) -> bool:
    """Whether a document belongs to the validation split: a function of its text, so that copies are never split."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") < fraction * 2**64


def _line_number(path: str, offset: int) -> int:
    with open(path, "rb") as file:
        return file.read(offset).count(b"\n") + 1
