"""TensorFile: a safetensors file in ranges of elements, read and written, so that no tensor need ever be whole in memory.

The format: 8 bytes little-endian length of a JSON header, the header with each tensor's dtype, shape and byte range, the bytes. The
library for it writes only what is in memory all at once, reads boxes instead of ranges, and maps files so that the system counts them as
this process's data.

Source: the safetensors format, https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayzero3.errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes as the format writes them."""

PART_NUMEL = 2**20
_LARGEST_HEADER_BYTES = 100_000_000


class TensorFile:
    """A safetensors file that is read by mmap, in ranges.

    Attributes:
        path: Of the file.
        shapes: Name -> shape.
        dtypes: Name -> dtype as the format writes it.

    Raises:
        CheckpointError: the file is missing, cut short, or not what its format says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            length = int.from_bytes(self._bytes[:8], "little")
            if length > min(_LARGEST_HEADER_BYTES, len(self._bytes) - 8):
                raise ValueError("its header is longer than the file")
            header: dict[str, Any] = json.loads(self._bytes[8 : 8 + length])
            header.pop("__metadata__", None)
            self._begin = 8 + length
            self.shapes = {name: tuple(facts["shape"]) for name, facts in header.items()}
            self.dtypes = {name: facts["dtype"] for name, facts in header.items()}
            self._starts = {name: facts["data_offsets"][0] for name, facts in header.items()}
            for name, facts in header.items():
                start, stop = facts["data_offsets"]
                size = prod(facts["shape"]) * DTYPES[facts["dtype"]].itemsize
                if not 0 <= start <= stop <= len(self._bytes) - self._begin or stop - start != size:
                    raise ValueError(f"{name} has {stop - start} bytes where {size} are due, in a file of {len(self._bytes)}")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"weights {path}", "not readable", str(error), "Give a safetensors file or a folder of them.") from None

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of a flattened tensor, 1-D, in the file's dtype: a copy."""
        dtype = DTYPES[self.dtypes[name]]
        if start == stop:
            return torch.empty(0, dtype=dtype)
        at, count = self._begin + self._starts[name] + start * dtype.itemsize, (stop - start) * dtype.itemsize
        return torch.from_numpy(np.frombuffer(self._bytes, np.uint8, count, at).copy()).view(dtype)


@dataclass(frozen=True)
class Streamed:
    """One tensor to be written.

    Attributes:
        shape: Of the whole.
        dtype: As the format writes it.
        read: Elements [start, stop) of the flattened tensor, 1-D, of any dtype.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[int, int], Tensor]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPES[self.dtype].itemsize

    def parts(self) -> Iterator[bytes]:
        """Its bytes, a few MiB at a time."""
        for start in range(0, self.numel, PART_NUMEL):
            part = self.read(start, min(start + PART_NUMEL, self.numel)).to(DTYPES[self.dtype]).contiguous()
            yield part.view(torch.uint8).numpy().tobytes()


def write_streamed(path: Path, tensors: dict[str, Streamed], metadata: dict[str, str]) -> None:
    """Write a safetensors file. Cost: a few MiB of memory, whatever the tensors' sizes."""
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            for part in tensor.parts():
                file.write(part)
