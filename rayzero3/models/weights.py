"""Weights: the parameters of a model in safetensors files, read in parts by mmap, so that each rank takes its slice and no more."""

from __future__ import annotations

import difflib
import hashlib
import json
from pathlib import Path

from torch import Tensor

from rayzero3.errors import CheckpointError
from rayzero3.models.tensor_file import TensorFile

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
        self._files: dict[str, TensorFile] = {}
        for name in names:
            file = TensorFile(folder / name)
            self._files |= dict.fromkeys(file.shapes, file)

    def __contains__(self, name: str | None) -> bool:
        return name in self._files

    def names(self) -> list[str]:
        """All parameters, sorted."""
        return sorted(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """A parameter's shape."""
        return self._files[name].shapes[name]

    def dtype(self, name: str) -> str:
        """A parameter's dtype as the format writes it: F32, BF16, ..."""
        return self._files[name].dtypes[name]

    def fingerprint(self) -> str:
        """Hex digest of every file's name, size and first MiB: tells other weights apart without reading all of these."""
        digest = hashlib.blake2b(digest_size=16)
        for path in sorted({file.path for file in self._files.values()}):
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
        if self.shape(name) != shape:
            raise CheckpointError(f"{name} in {self.path}", f"of shape {self.shape(name)}", f"the model has {shape}", "Build the model that they belong to.")
        return self._files[name].read(name, start, stop)
