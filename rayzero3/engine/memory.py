"""Predicted bytes per rank, from the integers of the layouts alone. Activations are the model's and are not counted."""

from __future__ import annotations

from dataclasses import dataclass

from rayzero3.engine.adam import Zero3Adam
from rayzero3.engine.sequential import Zero3Model

_MIB = 2**20


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank holds.

    Attributes:
        parameters: Trainable parameters of the model.
        world_size: Ranks that share them, N.
        per_parameter: Bytes per trainable parameter over N between steps: chunk, two moments, average.
        between_steps: The chunks and the optimizer's state, alignment and frozen chunks included.
        frozen: The frozen chunks among them.
        gradients: The chunks' gradients, which come on top during a step.
        layers: Full parameters at once: those that are whole all the time, 1 + prefetch of the others, and what the last layer or a budget keeps.
        flat_gradients: Full gradients at once: one that fills and one in flight, or those of all layers where they are held; and as
            much as one for what the ranks send each other.
        offloaded: Whether what lies between steps, and the gradients, lie in host memory.
    """

    parameters: int
    world_size: int
    per_parameter: int
    between_steps: int
    frozen: int
    gradients: int
    layers: int
    flat_gradients: int
    offloaded: bool

    @property
    def in_step(self) -> int:
        """Everything together, at most."""
        return self.between_steps + self.gradients + self.layers + self.flat_gradients

    def __str__(self) -> str:
        where = " in host memory" if self.offloaded else ""
        frozen = f" + {self.frozen / _MIB:,.1f} MiB frozen" if self.frozen else ""
        return (
            f"{self.between_steps / _MIB:,.1f} MiB{where} between steps ({self.per_parameter} bytes x {self.parameters:,} / {self.world_size}{frozen} + alignment), "
            f"in a step + {self.gradients / _MIB:,.1f} gradients{where} + {self.layers / _MIB:,.1f} whole layers "
            f"+ {self.flat_gradients / _MIB:,.1f} full gradients + activations"
        )


def predict(model: Zero3Model, optimizer: Zero3Adam, hold_gradients: bool = False, keep_fetched_bytes: int = 0) -> Memory:
    """What a rank holds at most.

    Args:
        hold_gradients: Whether full gradients gather over the micro-batches of a step.
        keep_fetched_bytes: The budget for layers that stay fetched.
    """
    layers = model.all_layers()
    trainable = [layer.trainable for layer in layers if layer.trainable is not None]
    elements = sum(flat.layout.chunk_numel for flat in trainable)
    per_parameter = 4 + 2 * optimizer.moment_dtype.itemsize + (4 if optimizer.average_decay is not None else 0)
    frozen = sum(flat.chunk.nbytes for layer in layers for flat in layer.frozen)
    constant, passing, last = model.whole_bytes()
    largest = sorted(passing, reverse=True)[: 1 + model.prefetch]
    sizes = sorted((4 * flat.layout.padded_numel if hold_gradients else flat.padded_bytes for flat in trainable), reverse=True)
    return Memory(
        parameters=sum(flat.layout.numel for flat in trainable),
        world_size=model.comm.world_size,
        per_parameter=per_parameter,
        between_steps=per_parameter * elements + frozen,
        frozen=frozen,
        gradients=4 * elements,
        layers=constant + sum(largest) + last + min(keep_fetched_bytes, sum(passing)),
        flat_gradients=sum(sizes if hold_gradients else sizes[:2]) + sizes[0],
        offloaded=any(layer.offload for layer in layers),
    )
