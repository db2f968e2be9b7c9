"""WindowReader: the tokens of samples, straight from the shards.

Letters: S = sequence length, R = rows asked for.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rayzero3.data.manifest import Manifest
from rayzero3.data.pack import packing_index
from rayzero3.errors import DataError

NO_TOKEN = -1
"""Stands where a row has no token."""

_KEPT_ROW_GROUPS = 512
"""Decoded row groups that are kept: about 2^15 tokens each, so some 32 to 64 MiB."""


class WindowReader:
    """Random access to the samples of a split. Decoded row groups are kept, the least recently used ones dropped.

    Args:
        folder: Token shards.
        split: "train" or "validation".
        sequence_length: S.

    Attributes:
        fingerprint: Of the shards, from their manifest.
    """

    def __init__(self, folder: Path, split: str, sequence_length: int) -> None:
        folder, manifest = Path(folder), Manifest.load(folder)
        self.fingerprint = manifest.fingerprint
        self._index = packing_index(folder, manifest, split, sequence_length)
        self._groups = [(folder / shard.file, number) for shard in manifest.splits[split] for number in range(len(shard.row_groups))]
        counts = [group.documents for shard in manifest.splits[split] for group in shard.row_groups]
        self._first_document = np.concatenate([[0], np.cumsum(counts)])
        self._files: dict[Path, pq.ParquetFile] = {}
        self._decoded: OrderedDict[int, tuple[np.ndarray, np.ndarray]] = OrderedDict()

    @property
    def num_samples(self) -> int:
        """Windows of the split."""
        return len(self._index)

    def sample_ids(self, samples: int | Literal["all"]) -> np.ndarray:
        """The first so many samples; or all, and after them the id of the rest of the split, which is shorter, so that every token counts once."""
        whole = self.num_samples
        return np.arange(whole + (self._index.left_over > 0) if samples == "all" else min(samples, whole))

    def read(self, ids: np.ndarray) -> np.ndarray:
        """The samples of some ids, (R, S+1) int32, NO_TOKEN behind the end of the split and for ids of -1. Raises DataError for a damaged row group."""
        rows = np.full((len(ids), self._index.sequence_length + 1), NO_TOKEN, dtype=np.int32)
        for row, sample in zip(rows, ids, strict=True):
            if sample >= 0:
                filled = 0
                for document, start, stop in self._index.ranges(int(sample)):
                    row[filled : filled + stop - start] = self._document(document)[start:stop]
                    filled += stop - start
        return rows

    def _document(self, document: int) -> np.ndarray:
        group = int(np.searchsorted(self._first_document, document, side="right")) - 1
        tokens, offsets = self._decode(group)
        place = document - int(self._first_document[group])
        return tokens[offsets[place] : offsets[place + 1]]

    def _decode(self, group: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of a row group end to end, and where each document begins."""
        if group in self._decoded:
            self._decoded.move_to_end(group)
            return self._decoded[group]
        path, number = self._groups[group]
        try:
            if path not in self._files:
                self._files[path] = pq.ParquetFile(path, memory_map=True, page_checksum_verification=True)
            column = self._files[path].read_row_group(number, columns=["tokens"]).column("tokens").combine_chunks()
        except (pa.ArrowException, OSError) as error:
            fault = str(error).splitlines()[0]
            raise DataError(f"row group {number} of {path}", "damaged", fault, "Write the folder anew with `rayzero3 tokenize`.") from None
        column = column.chunk(0) if hasattr(column, "chunk") else column
        offsets = column.offsets.to_numpy()
        self._decoded[group] = column.flatten().to_numpy(), offsets - offsets[0]
        if len(self._decoded) > _KEPT_ROW_GROUPS:
            self._decoded.popitem(last=False)
        return self._decoded[group]
