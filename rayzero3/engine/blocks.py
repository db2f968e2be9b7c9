"""BlockFlat: frozen parameters kept in 8-bit blocks, which travel as such and are widened after the fetch.

A block is BLOCK neighbouring elements and one fp32 scale, the largest magnitude among them over 127. An element is off by at most half a
scale, plus the rounding to the compute dtype. A chunk holds whole blocks: its values as int8, then its scales, in one buffer of bytes, so
that one gather moves both: 1 + 4 / BLOCK bytes an element, half of what bf16 takes.

Letters: N = world size, C = elements of one chunk, P = bytes of one chunk, C + 4 C / BLOCK.

Source: Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861, section 2.1 (blocks; the linear code is ours).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rayzero3.engine.comm import Comm
from rayzero3.engine.flat import FlatParameter
from rayzero3.engine.layout import FlatLayout

BLOCK = 256
"""Elements of a block."""

_SCALE_BYTES = 4


class BlockFlat(FlatParameter):
    """A frozen flat parameter in 8-bit blocks. Its chunk is (P,) uint8."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], comm: Comm, device: torch.device, full_dtype: torch.dtype, offload: bool = False) -> None:
        self._packed = torch.empty(0, dtype=torch.uint8, device=device)
        super().__init__(shapes, comm, device, False, torch.uint8, full_dtype, offload)

    def _lay_out(self, shapes: dict[str, tuple[int, ...]], comm: Comm) -> FlatLayout:
        return FlatLayout.of(shapes, comm.world_size, slot_alignment=BLOCK, chunk_alignment=BLOCK)

    @property
    def chunk_elements(self) -> int:
        """P."""
        return self.layout.chunk_numel // BLOCK * (BLOCK + _SCALE_BYTES)

    @property
    def padded_bytes(self) -> int:
        """Bytes of the full buffer and of the packed one while they are allocated."""
        return super().padded_bytes + self.layout.world_size * self.chunk_elements

    @property
    def allocated_bytes(self) -> int:
        """Bytes of both that are allocated now."""
        return super().allocated_bytes + self._packed.nbytes

    def allocate(self) -> Tensor:
        """Allocate the full buffer and the packed one, (N*P,), and return that."""
        super().allocate()
        self._packed = torch.empty(self.layout.world_size * self.chunk_elements, dtype=torch.uint8, device=self.device)
        return self._packed

    @torch.no_grad()
    def put_chunk(self) -> None:
        """Put this rank's chunk into its slice of the packed buffer."""
        self._packed.view(-1, self.chunk_elements)[self.rank].copy_(self.chunk, non_blocking=True)

    @torch.no_grad()
    def fetched(self) -> None:
        """Widen what was gathered into the full buffer."""
        _widen(self._packed, self.layout.world_size, self._full)
        if not self.comm.lends:
            self._packed = self._packed.new_empty(0)

    def free(self) -> None:
        """Give both buffers' memory back."""
        super().free()
        self._packed = self._packed.new_empty(0)

    def settle(self) -> None:
        """Wait until no peer reads this rank's slice of the packed buffer."""
        if self._packed.numel():
            self.comm.settle(self._packed)

    def values(self) -> Tensor:
        """A buffer for this rank's values, (C,) fp32, to be filled and given to `store`."""
        return torch.zeros(self.layout.chunk_numel, device=self.device)

    @torch.no_grad()
    def store(self, values: Tensor) -> None:
        """Pack this rank's values, (C,), into the chunk."""
        blocks = values.float().view(-1, BLOCK)
        scales = blocks.abs().amax(dim=1, keepdim=True) / 127
        packed = torch.cat(
            (
                (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)).round().to(torch.int8).view(torch.uint8).flatten(),
                scales.view(torch.uint8).flatten(),
            )
        )
        self.chunk.data.copy_(packed)

    def take_changes(self) -> None:
        """Pack what was changed in this rank's slice of the full parameter."""
        own = self.values()
        _widen(self.chunk.data.to(self.device), 1, own)
        changed = self._own.float()
        self.store(torch.where(changed == own.to(self._own.dtype), own, changed))

    def gather_values(self, label: str) -> dict[str, Tensor]:
        """Every parameter as its blocks say, (shape) fp32, on every rank."""
        packed = torch.empty(self.layout.world_size * self.chunk_elements, dtype=torch.uint8, device=self.device)
        packed.view(-1, self.chunk_elements)[self.rank].copy_(self.chunk)
        self.comm.all_gather(packed, label).wait()
        self.comm.settle(packed)
        full = torch.empty(self.layout.padded_numel, device=self.device)
        _widen(packed, self.layout.world_size, full)
        return self._named(full)


def _widen(packed: Tensor, chunks: int, out: Tensor) -> None:
    """Write the elements of packed chunks, (chunks * P,) uint8, to `out`, (chunks * C,) of any floating dtype, each rounded once."""
    rows = packed.view(chunks, -1)
    elements = out.numel() // chunks
    values = rows[:, :elements].view(torch.int8).view(chunks, -1, BLOCK) if elements else rows.new_empty((chunks, 0, BLOCK))
    scales = rows[:, elements:].view(torch.float32)
    torch.mul(values, scales[..., None], out=out.view(chunks, -1, BLOCK))
