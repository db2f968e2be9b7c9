"""A safetensors file in ranges: what the library wrote is read, what we write the library reads, and a broken file is told."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from rayzero3.errors import CheckpointError
from rayzero3.models import tensor_file
from rayzero3.models.tensor_file import Streamed, TensorFile, write_streamed

TENSORS = {
    "a": torch.arange(24, dtype=torch.float32).view(2, 3, 4),
    "b": torch.tensor(3.5, dtype=torch.bfloat16),
    "empty": torch.empty(0, 5),
    "c": torch.arange(7, dtype=torch.int64),
    "half": torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).half(),
}


def test_ranges_of_what_the_library_wrote(tmp_path):
    save_file(TENSORS, tmp_path / "x.safetensors", {"format": "pt"})
    file = TensorFile(tmp_path / "x.safetensors")
    assert file.shapes == {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
    for name, tensor in TENSORS.items():
        for start in range(tensor.numel() + 1):
            for stop in range(start, tensor.numel() + 1):
                assert torch.equal(file.read(name, start, stop), tensor.flatten()[start:stop])
    file.read("a", 0, 3).fill_(9.0)
    assert file.read("a", 0, 3).tolist() == [0, 1, 2], "what is read is a copy"


@pytest.mark.parametrize("part", [1, 5, 2**20])
def test_the_library_reads_what_is_written_in_parts(part, tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "PART_NUMEL", part)
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.float16: "F16"}
    asked = []

    def reader(tensor):
        return lambda start, stop: (asked.append(stop - start), tensor.flatten()[start:stop])[1]

    tensors = {name: Streamed(tuple(tensor.shape), names[tensor.dtype], reader(tensor)) for name, tensor in TENSORS.items()}
    write_streamed(tmp_path / "x.safetensors", tensors, {"format": "pt"})
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == TENSORS.keys() and all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    assert max(asked) <= part


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:5], lambda b: b"\xff" * 8 + b[8:], lambda b: b[:9] + b"x" + b[10:], lambda b: b""])
def test_a_broken_file_is_told(damage, tmp_path):
    save_file(TENSORS, tmp_path / "x.safetensors")
    (tmp_path / "x.safetensors").write_bytes(damage((tmp_path / "x.safetensors").read_bytes()))
    with pytest.raises(CheckpointError, match="not readable"):
        TensorFile(tmp_path / "x.safetensors")
