"""StreamWriter: a safetensors file written tensor by tensor, part by part, so that no tensor need ever be whole in memory.

The format: 8 bytes little-endian length of a JSON header, the header with each tensor's dtype, shape and byte range, the bytes. The
library that reads it writes only what is in memory all at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8}
"""Dtypes as the format writes them."""

PART_NUMEL = 2**20


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
