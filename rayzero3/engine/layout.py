"""FlatLayout: where each parameter of a layer lies in its flat parameter, and which part of it each rank holds. Pure integers.

Example, two ranks, parameters `weight` (3, 20) and `bias` (20,):

    offset   0 ........ 60 .. 64 ....... 84 .. 96
             weight     gap   bias       padding
    rank 0   [0, 48): weight[0:48]
    rank 1   [48, 96): weight[48:60], then a gap of 4 zeros, bias[0:20], then 12 zeros of padding

Letters: N = world size, C = elements of one chunk, N*C = elements of the flat parameter, padding included.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

SLOT_ALIGNMENT = 32
"""Elements. Every parameter starts at a multiple of it: 64 bytes at two bytes an element."""

CHUNK_ALIGNMENT = 8
"""Elements. Every chunk's length is a multiple of it: 16 bytes at two bytes an element."""


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Slot:
    """One parameter's place in a flat parameter."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class Overlap:
    """The part of one parameter that one rank holds: parameter[start:stop], flattened, lies at chunk[at : at + stop - start]."""

    name: str
    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class FlatLayout:
    """The integers of one flat parameter.

    Attributes:
        slots: The parameters in the order in which they were given.
        world_size: N.
        chunk_numel: C, the same on every rank; N*C covers all slots.
    """

    slots: tuple[Slot, ...]
    world_size: int
    chunk_numel: int

    @classmethod
    def of(
        cls,
        shapes: dict[str, tuple[int, ...]],
        world_size: int,
        pieces: int = 1,
        slot_alignment: int = SLOT_ALIGNMENT,
        chunk_alignment: int = CHUNK_ALIGNMENT,
    ) -> FlatLayout:
        """Lay out parameters end to end, each at an aligned offset, padded so that N equal chunks of `pieces` equal aligned parts cover them."""
        slots, end = [], 0
        for name, shape in shapes.items():
            slots.append(Slot(name, tuple(shape), round_up(end, slot_alignment)))
            end = slots[-1].end
        return cls(tuple(slots), world_size, round_up(-(-end // world_size), chunk_alignment * pieces))

    @property
    def padded_numel(self) -> int:
        """N*C."""
        return self.world_size * self.chunk_numel

    @property
    def numel(self) -> int:
        """Elements of the parameters themselves, without gaps and padding."""
        return sum(slot.numel for slot in self.slots)

    def rank_range(self, rank: int) -> tuple[int, int]:
        """[start, stop) of a rank's chunk within the flat parameter."""
        return rank * self.chunk_numel, (rank + 1) * self.chunk_numel

    def overlaps(self, rank: int) -> list[Overlap]:
        """The parts of parameters that a rank's chunk holds, in the order of the slots; empty parameters have none."""
        first, last = self.rank_range(rank)
        found = []
        for slot in self.slots:
            low, high = max(first, slot.offset), min(last, slot.end)
            if low < high:
                found.append(Overlap(slot.name, low - slot.offset, high - slot.offset, low - first))
        return found

    def gaps(self) -> list[tuple[int, int]]:
        """[start, stop) of what belongs to no parameter: alignment gaps and the padding at the end. These elements are zero always."""
        found, end = [], 0
        for slot in self.slots:
            if slot.numel:
                if slot.offset > end:
                    found.append((end, slot.offset))
                end = slot.end
        if end < self.padded_numel:
            found.append((end, self.padded_numel))
        return found
