"""From a module to chunks: rank 0's values scattered, or, on the meta device, each parameter initialised from (seed, name) or read in parts.

A parameter that is initialised is never a function of rank or world size, and no rank ever holds more of the model than its chunks and
one full parameter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from rayzero3.engine.blocks import BlockFlat
from rayzero3.engine.comm import Comm
from rayzero3.engine.flat import FlatParameter
from rayzero3.engine.places import ChunkedParameter
from rayzero3.errors import StateError

Initializer = Callable[[str, Tensor, torch.Generator], None]
"""`initialize(name, tensor, generator)` fills one full parameter, (shape) fp32 on the CPU, in place."""


def plain_name(name: str) -> str:
    """A parameter's or module's name as it is without torch.compile, which puts a module between."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


_READ_NUMEL = 2**18


class Weights(Protocol):
    """Values that are read in parts, such as those of a file."""

    def read(self, name: str, shape: tuple[int, ...], start: int, stop: int) -> Tensor:
        """Elements [start, stop) of a flattened parameter, 1-D, any dtype."""


def generator_for(seed: int, name: str) -> torch.Generator:
    """A CPU generator that depends on (seed, name) alone."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def check_buffers(module: nn.Module, label: str, device: torch.device) -> None:
    """Move the module's buffers to `device`, dtypes as they are. Raises StateError for a buffer without values."""
    for owner_name, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is None:
                continue
            if buffer.is_meta:
                raise StateError(
                    f"buffer {'.'.join(filter(None, (label, owner_name, name)))}",
                    "on the meta device",
                    "it has no values, and nothing would ever fill it",
                    "Make it with an explicit device='cpu' in the module's __init__.",
                )
            owner._buffers[name] = buffer.to(device)


def flat_parameters(
    module: nn.Module, comm: Comm, device: torch.device, dtype: torch.dtype, offload: bool, frozen_blocks: bool
) -> list[tuple[FlatParameter, dict[str, nn.Parameter]]]:
    """The flat parameters of a module, the trainable one first, then one for each dtype of frozen ones; and the parameters that go into each.

    Parameters that another layer holds are left out. With `frozen_blocks` frozen matrices go into a BlockFlat.
    """
    groups: dict[tuple[bool, bool, torch.dtype], dict[str, nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, ChunkedParameter):
            frozen = not parameter.requires_grad
            blocks = frozen and frozen_blocks and parameter.dim() > 1 and parameter.is_floating_point()
            chunk_dtype = parameter.dtype if frozen and not blocks else torch.float32
            groups.setdefault((frozen, blocks, chunk_dtype), {})[plain_name(name)] = parameter
    made = []
    for (frozen, blocks, chunk_dtype), values in sorted(groups.items(), key=lambda group: (*group[0][:2], str(group[0][2]))):
        shapes = {name: tuple(value.shape) for name, value in values.items()}
        full_dtype = dtype if chunk_dtype.is_floating_point else chunk_dtype
        if blocks:
            made.append((BlockFlat(shapes, comm, device, full_dtype, offload), values))
        else:
            made.append((FlatParameter(shapes, comm, device, not frozen, chunk_dtype, full_dtype, offload), values))
    return made


def fill_chunk(
    flat: FlatParameter,
    values: dict[str, Tensor],
    label: str,
    full_name: Callable[[str], str],
    initialize: Initializer | Weights | None,
    seed: int,
) -> None:
    """Fill a flat parameter's chunk.

    Args:
        values: Name -> full parameter, of the shapes in flat's layout. On the meta device they are initialised or read, else rank 0's count.
        label: How the ledger calls the layer.
        full_name: From a parameter's name in the layer to its name in the model.

    Cost: while a parameter is initialised, the whole of it in fp32; while it is read, a MiB or two.

    Raises:
        StateError: values on the meta device and no `initialize`, or a parameter that it left not finite.
    """
    on_meta = {name for name, value in values.items() if value.is_meta}
    if not on_meta:
        _fill_from_first(flat, values, label)
        return
    if initialize is None or on_meta != set(values):
        names = ", ".join(full_name(name) for name in sorted(on_meta))
        raise StateError(names, "on the meta device", "it has no values", "Pass initialize=, and put all of the layer on the meta device.")
    own = flat.values()
    for overlap in flat.layout.overlaps(flat.rank):
        name, shape = full_name(overlap.name), tuple(values[overlap.name].shape)
        if not callable(initialize):
            for start in range(overlap.start, overlap.stop, _READ_NUMEL):
                part = initialize.read(name, shape, start, min(start + _READ_NUMEL, overlap.stop))
                at = overlap.at + start - overlap.start
                own[at : at + part.numel()].copy_(part)
            continue
        full = torch.full(shape, torch.nan)
        initialize(name, full, generator_for(seed, name))
        part = full.view(-1)[overlap.start : overlap.stop]
        if not torch.isfinite(part).all():
            raise StateError(name, "not finite after its initialisation", "initialize must fill every element", "Add a rule for this name.")
        own[overlap.at : overlap.at + part.numel()].copy_(part)
        del full, part  # before the next one is made
    flat.store(own)


def _fill_from_first(flat: FlatParameter, values: dict[str, Tensor], label: str) -> None:
    chunks, values_here = None, flat.values()
    if flat.rank == 0:
        chunks = []
        for rank in range(flat.layout.world_size):
            chunks.append(torch.zeros_like(values_here, device=flat.device))
            for part in flat.layout.overlaps(rank):
                source = values[part.name].reshape(-1)[part.start : part.stop]
                chunks[rank][part.at : part.at + source.numel()].copy_(source)
    own = values_here.to(flat.device)
    flat.comm.scatter_from_first(chunks, own, label)
    values_here.copy_(own)
    flat.store(values_here)
