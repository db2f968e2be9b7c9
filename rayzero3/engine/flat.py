"""FlatParameter: the parameters of one layer that travel together, laid end to end.

Letters: N = world size, C = elements of one chunk.

Note: zero copy. `full` is one buffer of (N*C,) in the compute dtype. The module's parameters are views into it, made once. Freeing
resizes its storage to 0 and the next fetch fills the same storage again, so whatever autograd saved in between (often a transposed
view) is valid again by the time that backward reads it. The views are taken from `full.data`: it has a version counter of its own,
so that filling `full` is no in-place change in the eyes of autograd.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rayzero3.engine.comm import Comm
from rayzero3.engine.layout import FlatLayout
from rayzero3.engine.offload import Offload, host_empty


class FlatParameter:
    """A chunk, the full buffer that it is gathered into, and the flat gradient that is reduced from.

    Args:
        shapes: Name -> shape, in order.
        trainable: Whether the chunk gets gradients. A trainable chunk is the fp32 master; a frozen one keeps the dtype given.
        chunk_dtype: Dtype of the chunk.
        full_dtype: Dtype of the full parameters.
        offload: Whether the chunk lies in host memory.

    Attributes:
        layout: The integers.
        device: Where the full parameters are.
        parameters: Name -> nn.Parameter, a view into the full buffer; readable only between `allocate` and `free`.
    """

    def __init__(
        self,
        shapes: dict[str, tuple[int, ...]],
        comm: Comm,
        device: torch.device,
        trainable: bool,
        chunk_dtype: torch.dtype,
        full_dtype: torch.dtype,
        offload: bool = False,
    ) -> None:
        self.layout, self.rank, self.trainable = self._lay_out(shapes, comm), comm.rank, trainable
        slots = {slot.name: slot for slot in self.layout.slots}
        self.device, numel = device, self.chunk_elements
        values = host_empty(numel, chunk_dtype, device).zero_() if offload else torch.zeros(numel, dtype=chunk_dtype, device=device)
        self._chunk = nn.Parameter(values, requires_grad=trainable)
        self._chunk.offload = Offload(self._chunk) if offload else None
        self._full = torch.empty(self.layout.padded_numel, dtype=full_dtype, device=device)
        self.parameters = {
            slot.name: nn.Parameter(self._full.data[slot.offset : slot.end].view(slot.shape), requires_grad=trainable) for slot in self.layout.slots
        }
        self._slots = {name: (slot.offset, slot.end, slot.shape) for name, slot in slots.items()}
        self._own, self._gaps = self._full.data[slice(*self.layout.rank_range(self.rank))], self.layout.gaps()
        self._grad: Tensor | None = None
        self._written: set[str] = set()
        self._chunk.parts = [(slots[part.name].shape, part.at, part.at + part.stop - part.start) for part in self.layout.overlaps(self.rank)]
        self.join(comm)
        self.free()

    def _lay_out(self, shapes: dict[str, tuple[int, ...]], comm: Comm) -> FlatLayout:
        return FlatLayout.of(shapes, comm.world_size, comm.total_size // comm.world_size)

    @property
    def chunk_elements(self) -> int:
        """Elements of the stored chunk: C."""
        return self.layout.chunk_numel

    def join(self, comm: Comm) -> None:
        """Use another communicator of the same ranks; the chunk carries it, for the optimizer's global norm."""
        self.comm = self._chunk.comm = comm

    @property
    def chunk(self) -> nn.Parameter:
        """(C,) this rank's slice, zeros until filled, with the values of the last update. Its `parts` are (shape, start, stop) of the parameters in it."""
        self.wait_updated()
        return self._chunk

    def wait_updated(self) -> None:
        """Have the host wait for an update of an offloaded chunk that is under way; raises what that raised."""
        if self._chunk.offload is not None:
            self._chunk.offload.wait_updated()

    @property
    def padded_bytes(self) -> int:
        """Bytes of the full buffer while it is allocated."""
        return self.layout.padded_numel * self._full.element_size()

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the full buffer that are allocated now."""
        return self._full.untyped_storage().nbytes()

    def allocate(self) -> Tensor:
        """Allocate the full buffer, (N*C,), and return it."""
        self._full.untyped_storage().resize_(self.padded_bytes)
        return self._full

    @torch.no_grad()
    def put_chunk(self) -> None:
        """Put this rank's chunk into its slice of the full buffer, for an in-place gather."""
        self._own.copy_(self.chunk.to(self.device, non_blocking=True))

    def fetched(self) -> None:
        """The gather is over: make the full parameters of what came, where that is something else."""

    def values(self) -> Tensor:
        """A buffer for this rank's values, (C,), to be filled and given to `store`: here the chunk itself."""
        return self.chunk.data

    def store(self, values: Tensor) -> None:
        """Keep this rank's values."""

    def free(self) -> None:
        """Give the full buffer's memory back, once no peer reads from it. The views stay, unreadable until the next fetch."""
        self.settle()
        self._full.untyped_storage().resize_(0)

    def settle(self) -> None:
        """Wait until the full buffer may be written to: until then peers may still read this rank's slice of it."""
        self.comm.settle(self._full)

    def take_changes(self) -> None:
        """Write back to the chunk what was changed in this rank's slice of the full parameter."""
        own, kept = self._own.to(self.chunk.device), self.chunk.data
        kept.copy_(torch.where(own == kept.to(own.dtype), kept, own.to(kept.dtype)))

    def gather_values(self, label: str) -> dict[str, Tensor]:
        """Every parameter at the chunk's precision, (shape) chunk dtype, on every rank. Costs the whole flat parameter in memory."""
        full = torch.empty(self.layout.padded_numel, dtype=self.chunk.dtype, device=self.device)
        start, stop = self.layout.rank_range(self.rank)
        full[start:stop] = self.chunk.data
        self.comm.all_gather(full, label).wait()
        self.comm.settle(full)
        return self._named(full)

    def _named(self, full: Tensor) -> dict[str, Tensor]:
        """Copies of the parameters in a full flat parameter."""
        return {slot.name: full[slot.offset : slot.end].view(slot.shape).clone() for slot in self.layout.slots}

    def write_grad(self, name: str, dtype: torch.dtype) -> None:
        """Move a parameter's gradient into the flat gradient, which is made in `dtype`; what came earlier is added to."""
        parameter = self.parameters[name]
        grad, parameter.grad = parameter.grad, None
        if grad is None:
            return
        if self._grad is None:
            self._grad = torch.empty_like(self._full, dtype=dtype)
        start, end, shape = self._slots[name]
        place = self._grad[start:end].view(shape)
        if name in self._written:
            place.add_(grad)
        else:
            place.copy_(grad)
            self._written.add(name)

    def take_grad(self) -> tuple[Tensor, list[str]]:
        """The flat gradient, (N*C,), ready to reduce, and the names that got none.

        Zeros stand in the gaps, in the padding, and for parameters without a gradient: whatever lay in that memory never counts.
        """
        missing = [slot for slot in self.layout.slots if slot.name not in self._written and slot.numel]
        grad, self._grad = self._grad, None
        if grad is None:
            grad = torch.zeros_like(self._full)
        else:
            for start, stop in self._gaps + [(slot.offset, slot.end) for slot in missing]:
                grad[start:stop].zero_()
        self._written = set()
        return grad, [slot.name for slot in missing]

    def drop_grad(self) -> None:
        """Forget a gradient that was not reduced, after an exception."""
        self._grad, self._written = None, set()
        for parameter in self.parameters.values():
            parameter.grad = None

    def accumulate(self, reduced: Tensor, divisor: int) -> None:
        """Add a reduced gradient, (C,) fp32, divided by `divisor`, to the chunk's gradient."""
        reduced = reduced.div_(divisor) if divisor != 1 else reduced
        if self.chunk.offload is not None:
            self.chunk.offload.land(reduced, self.comm)
        else:
            self.chunk.grad = reduced if self.chunk.grad is None else self.chunk.grad.add_(reduced)
