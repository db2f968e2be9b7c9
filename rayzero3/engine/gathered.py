"""gathered: a layer's parameters, whole, outside any forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from rayzero3.engine.layer import Zero3Layer


@contextmanager
def gathered(layer: Zero3Layer) -> Iterator[nn.Module]:
    """The layer's module with readable and writable parameters. Every rank enters it together.

    What is written is kept if every rank writes the same. Values are in the compute dtype; those that are not changed keep the chunk's
    precision. Operations inside are not recorded by autograd.

    Cost: as `Zero3Layer.fetch_params`.
    """
    members = (*layer.held, layer)
    for member in members:
        member.fetch_params()
    for flat in [flat for member in members for flat in member.flats]:
        flat.settle()
    try:
        with torch.no_grad():
            yield layer.module
    finally:
        for member in members:
            for flat in member.flats:
                flat.take_changes()
            member.cleanup_params()
