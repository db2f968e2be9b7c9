"""Workload: a model of plain torch layers, its first weights, and the tokens of every step. The same for every engine.

Letters: B = micro-batch of one rank, T = tokens of a sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from rayzero3.config import GptNeox
from rayzero3.models.build import initialize
from rayzero3.models.gpt_neox import gpt_neox


@dataclass(frozen=True)
class Workload:
    """What every engine trains.

    Attributes:
        layers, width, heads, vocab_size: Of the GPT.
        length: T.
        micro_batch: B.
        dtype: Compute dtype, fp32 or bf16.
        rounds, steps: Timed rounds, and steps in each, of a full run.
    """

    layers: int
    width: int
    heads: int
    vocab_size: int
    length: int
    micro_batch: int
    dtype: str = "fp32"
    rounds: int = 5
    steps: int = 2

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float32 if self.dtype == "fp32" else torch.bfloat16

    @property
    def tokens(self) -> int:
        """Tokens of one step of one rank."""
        return self.micro_batch * self.length

    @property
    def modules(self) -> int:
        """Layers that a layer-wise engine shards: the blocks, the embedding and the readout."""
        return self.layers + 2

    @property
    def parameters(self) -> int:
        """Elements of the model."""
        return sum(prod(parameter.shape) for layer in self.build_meta() for parameter in layer.parameters())

    def build_meta(self) -> list[nn.Module]:
        """The layers on the meta device, for who initialises them by (seed, name)."""
        return self._build("meta")

    def build(self) -> list[nn.Module]:
        """The layers in fp32 on the CPU, with the same values in every process."""
        layers, generator = self._build("cpu"), torch.Generator().manual_seed(0)
        with torch.no_grad():
            for layer in layers:
                for name, parameter in layer.named_parameters():
                    initialize(name, parameter, generator)
        return layers

    def batch(self, step: int, rank: int) -> Tensor:
        """(B, T + 1) int64, a function of step and rank."""
        generator = torch.Generator().manual_seed(1000 * step + rank)
        return torch.randint(self.vocab_size, (self.micro_batch, self.length + 1), generator=generator)

    def formula_bytes(self, world_size: int) -> int:
        """Bytes that N ranks send in a step of ZeRO-3: two gathers and one reduce-scatter of everything."""
        return 3 * self.parameters * self.torch_dtype.itemsize * (world_size - 1)

    def _build(self, device: str) -> list[nn.Module]:
        section = GptNeox(layers=self.layers, width=self.width, heads=self.heads)
        with torch.device(device):
            return [module for _, module in gpt_neox(section, self.vocab_size)]


WORKLOADS = {
    "fp32": Workload(8, 512, 8, 8192, 256, 2),
    "bf16": Workload(8, 512, 8, 8192, 256, 2, dtype="bf16"),
    "comm-heavy": Workload(4, 1024, 16, 2048, 32, 1),
    "thin": Workload(128, 64, 4, 256, 32, 1),
    "wide": Workload(15, 1024, 16, 8192, 128, 1, rounds=3, steps=1),
    "tiny": Workload(2, 32, 2, 64, 8, 1, rounds=1, steps=2),
}
"""`fp32` and `bf16` are the model of the goals; `comm-heavy` has few tokens per parameter, `thin` many small layers, `wide` 206M parameters; `tiny` is for tests."""
