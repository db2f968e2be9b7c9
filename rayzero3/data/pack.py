"""The packing index: which parts of which documents make up each sample.

Letters: S = sequence length, D = documents of a split, W = windows (samples).

A sample is one window of S+1 tokens: it reads the first S and predicts the last S. Windows follow each other in the split's stream of
documents, one token shared between neighbours, so that every token but the first is predicted once:

    documents   aaaaa|bbb|cccccccc      S = 4
    windows     aaaaa                   window 0: document 0, tokens 0 to 5
                    abbbc               window 1: the last a, all of b, the first c
                        ccccc
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import pyarrow.parquet as pq

from rayzero3.data.manifest import Manifest
from rayzero3.errors import DataError


@dataclass(frozen=True)
class PackingIndex:
    """Where each window begins.

    Attributes:
        sequence_length: S.
        lengths: (D,) int64 tokens of each document.
        first_document: (W,) int64 document in which a window begins.
        first_offset: (W,) int64 token of it.
    """

    sequence_length: int
    lengths: np.ndarray
    first_document: np.ndarray
    first_offset: np.ndarray

    @classmethod
    def of(cls, lengths: np.ndarray, sequence_length: int) -> PackingIndex:
        """Pack documents; W = (tokens - 1) // S, so up to S tokens at the end are left over."""
        lengths = np.asarray(lengths, dtype=np.int64)
        ends = np.cumsum(lengths)
        windows = max(0, (int(ends[-1]) - 1) // sequence_length) if len(ends) else 0
        begins = np.arange(windows, dtype=np.int64) * sequence_length
        document = np.searchsorted(ends, begins, side="right").astype(np.int64)
        return cls(sequence_length, lengths, document, begins - (ends - lengths)[document] if windows else begins)

    def __len__(self) -> int:
        return len(self.first_document)

    @property
    def left_over(self) -> int:
        """Tokens at the end that no window predicts; less than S."""
        return max(0, int(self.lengths.sum()) - 1 - len(self) * self.sequence_length)

    def ranges(self, window: int) -> list[tuple[int, int, int]]:
        """The window's parts as (document, start, stop), in order; together S+1 tokens. Window W is the rest: one token more than is left over."""
        missing, found = self.sequence_length + 1, []
        if window == len(self):
            missing, ends, begin = self.left_over + 1, np.cumsum(self.lengths), len(self) * self.sequence_length
            document = int(np.searchsorted(ends, begin, side="right"))
            offset = begin - int((ends - self.lengths)[document])
        else:
            document, offset = int(self.first_document[window]), int(self.first_offset[window])
        while missing:
            taken = min(missing, int(self.lengths[document]) - offset)
            if taken:
                found.append((document, offset, offset + taken))
            document, offset, missing = document + 1, 0, missing - taken
        return found


def packing_index(folder: Path, manifest: Manifest, split: str, sequence_length: int) -> PackingIndex:
    """The index of a split, from the folder where it was built before, else built and kept there.

    Reads the lengths of the documents only. A folder that can't be written is no obstacle.

    Raises:
        DataError: the split is too small for one window, or its lengths don't add up to the manifest's tokens.
    """
    if manifest.tokens(split) <= sequence_length:
        raise DataError(
            f"data.sequence_length of the {split} split",
            sequence_length,
            f"it has {manifest.tokens(split)} tokens, and one sample takes {sequence_length + 1}",
            "Lower data.sequence_length, or tokenize more text.",
        )
    path = Path(folder) / f"packing-{split}-{sequence_length}.npz"
    key = hashlib.sha256(json.dumps([manifest.fingerprint, [shard.file for shard in manifest.splits[split]]]).encode()).hexdigest()
    try:
        with np.load(path, allow_pickle=False) as kept:
            if str(kept["key"]) == key:
                return PackingIndex(sequence_length, kept["lengths"], kept["first_document"], kept["first_offset"])
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        pass  # absent, damaged or of other shards: build it
    lengths = [pq.read_table(Path(folder) / shard.file, columns=["length"]).column("length").to_numpy() for shard in manifest.splits[split]]
    index = PackingIndex.of(np.concatenate(lengths), sequence_length)
    if int(index.lengths.sum()) != manifest.tokens(split):
        raise DataError(
            f"the document lengths of the {split} split",
            f"{int(index.lengths.sum())} tokens in all",
            f"the manifest says {manifest.tokens(split)}",
            "Write the folder anew with `rayzero3 tokenize`.",
        )
    temporary = path.with_suffix(f".{os.getpid()}.part")
    try:
        with open(temporary, "wb") as file:
            np.savez(file, key=key, lengths=index.lengths, first_document=index.first_document, first_offset=index.first_offset)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):  # a read-only file system refuses to remove what is not there, too
            temporary.unlink(missing_ok=True)
    return index
