"""Weights: the parameters of a model in safetensors files, read in parts by mmap, so that each rank takes its slice and no more."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rayzero3.errors import CheckpointError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class SafetensorsWeights:
    """What a Zero3Layer on the meta device may be filled from: `Zero3Layer(..., initialize=SafetensorsWeights(path))`.

    Args:
        path: A safetensors file, or a folder with `model.safetensors` or with several files and their `model.safetensors.index.json`.

    Attributes:
        path: As given.

    Raises:
        CheckpointError: there are no such files, or one is not what its format says.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        folder = self.path if self.path.is_dir() else self.path.parent
        if (folder / INDEX).exists() and self.path.is_dir():
            names = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        else:
            names = [SINGLE if self.path.is_dir() else self.path.name]
        self._files: dict[str, Any] = {}
        self._paths: dict[str, Path] = {}
        for name in names:
            try:
                file = safe_open(folder / name, "pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"weights {folder / name}", "not readable", str(error), "Give a safetensors file or a folder of them.") from None
            self._files |= dict.fromkeys(file.keys(), file)
            self._paths |= dict.fromkeys(file.keys(), folder / name)

    def __contains__(self, name: str | None) -> bool:
        return name in self._files

    def names(self) -> list[str]:
        """All parameters, sorted."""
        return sorted(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """A parameter's shape."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """A parameter's dtype as the format writes it: F32, BF16, ..."""
        return self._files[name].get_slice(name).get_dtype()

    def fingerprint(self) -> str:
        """Hex digest of every file's name, size and first MiB: tells other weights apart without reading all of these."""
        digest = hashlib.blake2b(digest_size=16)
        for path in sorted({self._paths[name] for name in self._files}):
            with open(path, "rb") as file:
                digest.update(f"{path.name}/{path.stat().st_size}/".encode() + file.read(2**20))
        return digest.hexdigest()

    def read(self, name: str, shape: tuple[int, ...], start: int, stop: int) -> Tensor:
        """Elements [start, stop) of a flattened parameter, 1-D, in the file's dtype. Copies just those.

        Raises:
            CheckpointError: no parameter has this name, or it has another shape.
        """
        if name not in self._files:
            close = difflib.get_close_matches(name, self._files, n=1)
            hint = f"Did you mean {close[0]}?" if close else f"There are {', '.join(self.names()[:5])}, ..."
            raise CheckpointError(f"{name} is not among the weights in {self.path}", None, None, hint)
        part = self._files[name].get_slice(name)
        if tuple(part.get_shape()) != shape:
            raise CheckpointError(
                f"{name} in {self.path}", f"of shape {tuple(part.get_shape())}", f"the model has {shape}", "Build the model that they belong to."
            )
        if not shape:
            return self._files[name].get_tensor(name).view(1)
        return torch.cat([part[box].reshape(-1) for box in _boxes(shape, start, stop)])


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int | slice, ...]]:
    """Indices of boxes that together are elements [start, stop) of a row-major array, in order: part of a row, whole rows, part of a row."""
    if len(shape) == 1:
        yield (slice(start, stop),)
        return
    row = prod(shape[1:])
    while start < stop:
        index, within = divmod(start, row)
        if within or stop - start < row:
            end = min(stop, (index + 1) * row)
            yield from ((index, *box) for box in _boxes(shape[1:], within, end - index * row))
        else:
            end = stop - stop % row
            yield (slice(index, end // row),)
        start = end
