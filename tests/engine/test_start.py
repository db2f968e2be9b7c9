"""A model starts without being whole anywhere: initialised one parameter at a time, or read in slices."""

from __future__ import annotations

import ctypes
import json
import threading
import time

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from rayzero3.engine import Zero3Layer, Zero3Sequential
from rayzero3.engine.comm import Comm
from rayzero3.errors import CheckpointError
from rayzero3.models.weights import INDEX, SafetensorsWeights
from tests.engine.models import Block, full_values
from tests.ranks import run_ranks

MIB = 2**20


class Anonymous:
    """The most anonymous memory of this process over its start, in bytes, sampled while the body of a `with` runs."""

    def __enter__(self):
        self.first = self.most = self.now()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self):
        while not self.over.is_set():
            self.most = max(self.most, self.now())
            time.sleep(0.001)

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()
        self.grown, self.peak = self.now() - self.first, self.most - self.first

    @staticmethod
    def now():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def prepare():
    """Connect the ranks, and have glibc map large blocks one by one, so that what is freed is gone and no gap between blocks counts."""
    ctypes.CDLL(None).mallopt(-3, 2**18)
    Comm().sum_rows(torch.zeros(1), "test")


def read_slices(rank, world_size, path):
    with torch.device("meta"):
        module = nn.Linear(4096, 12288, bias=False)
    prepare()
    with Anonymous() as memory:
        layer = Zero3Layer(module, rank, world_size, "cpu", name="", initialize=SafetensorsWeights(path))
    layer.comm.sum_rows(torch.zeros(1), "all have read")
    first = layer.trainable.layout.rank_range(rank)[0]
    return memory.grown, memory.peak, layer.trainable.chunk.nbytes, first, layer.trainable.chunk[:4].tolist()


def test_each_rank_reads_its_slice_by_mmap_and_its_memory_grows_by_its_chunk(tmp_path):
    weight = (torch.arange(12288 * 4096) % 251).to(torch.bfloat16).view(12288, 4096)
    save_file({"weight": weight}, tmp_path / "model.safetensors")
    for grown, peak, chunk, first, values in run_ranks(read_slices, 4, tmp_path):
        assert chunk == 12288 * 4096 * 4 // 4
        assert 0.9 * chunk < grown < chunk + 4 * MIB
        assert peak < chunk + 8 * MIB
        assert values == weight.view(-1)[first : first + 4].float().tolist()


def initialise(rank, world_size):
    def fill(name, tensor, generator):
        tensor.normal_(generator=generator)

    with torch.device("meta"):
        modules = [nn.Linear(1024, 1024, bias=False) for _ in range(20)]
    prepare()
    with Anonymous() as memory:
        layers = [Zero3Layer(module, rank, world_size, "cpu", name=str(i), initialize=fill) for i, module in enumerate(modules)]
    model = Zero3Sequential(layers)
    return memory.peak, sum(chunk.nbytes for chunk in model.get_trainable_chunk()), 4 * 1024 * 1024


def test_a_model_of_twenty_layers_starts_within_its_chunks_and_one_parameter():
    for peak, chunks, parameter in run_ranks(initialise, 4):
        assert chunks == 20 * parameter // 4
        assert peak < chunks + parameter + 4 * MIB


def small_weights(folder):
    """The weights of three blocks in two files with an index; one more parameter than the model has."""
    torch.manual_seed(3)
    blocks = {f"h.{i}.{name}": value.detach() for i in range(3) for name, value in Block(12).named_parameters()}
    files = {"one.safetensors": {}, "two.safetensors": {"extra": torch.ones(1)}}
    for index, (name, value) in enumerate(blocks.items()):
        files[list(files)[index % 2]][name] = value
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    where = {name: file for file, tensors in files.items() for name in tensors}
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))
    return blocks


def load_blocks(rank, world_size, folder, width, prefix):
    with torch.device("meta"):
        modules = [Block(width) for _ in range(3)]
    weights = SafetensorsWeights(folder)
    model = Zero3Sequential([Zero3Layer(module, rank, world_size, "cpu", name=f"{prefix}.{i}", initialize=weights) for i, module in enumerate(modules)])
    return full_values(model)


@pytest.mark.parametrize("world_size", [1, 3])
def test_values_come_from_any_of_several_files(tmp_path, world_size):
    expected = small_weights(tmp_path)
    for values in run_ranks(load_blocks, world_size, tmp_path, 12, "h"):
        assert values.keys() == expected.keys()
        assert all(torch.equal(values[name], expected[name]) for name in expected)


def told(rank, world_size, folder, width, prefix):
    with pytest.raises(CheckpointError) as error:
        load_blocks(rank, world_size, folder, width, prefix)
    return str(error.value)


def test_a_wrong_name_or_shape_is_told_with_what_is_there(tmp_path):
    small_weights(tmp_path)
    assert "Did you mean h.0.scale?" in run_ranks(told, 1, tmp_path, 12, "g")[0]
    assert "of shape (12,); the model has (16,)" in run_ranks(told, 1, tmp_path, 16, "h")[0]
    (tmp_path / "two.safetensors").write_bytes(b"no weights")
    assert "not readable" in run_ranks(told, 1, tmp_path, 12, "h")[0]
    assert "not readable" in run_ranks(told, 1, tmp_path / "absent", 12, "h")[0]
