"""The integers: every element of every parameter lies in exactly one chunk, aligned, and the rest is gaps."""

from __future__ import annotations

import pytest

from rayzero3.engine.layout import CHUNK_ALIGNMENT, SLOT_ALIGNMENT, FlatLayout

SHAPES = [
    {},
    {"one": ()},
    {"none": (0,), "three": (3,)},
    {"weight": (3, 20), "bias": (20,)},
    {"a": (33,), "empty": (4, 0), "b": (1,), "c": (7, 11, 2)},
]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 64])
@pytest.mark.parametrize("shapes", SHAPES)
def test_chunks_and_gaps_partition_the_flat_parameter(shapes, world_size):
    layout = FlatLayout.of(shapes, world_size)
    owners = [0] * layout.padded_numel
    for slot in layout.slots:
        assert slot.offset % SLOT_ALIGNMENT == 0
        held = []
        for rank in range(world_size):
            first, _ = layout.rank_range(rank)
            for part in layout.overlaps(rank):
                if part.name == slot.name:
                    held += range(part.start, part.stop)
                    for index in range(part.stop - part.start):
                        assert first + part.at + index == slot.offset + part.start + index
                        owners[first + part.at + index] += 1
        assert held == list(range(slot.numel))
    for start, stop in layout.gaps():
        for index in range(start, stop):
            owners[index] += 1
    assert owners == [1] * layout.padded_numel
    assert layout.chunk_numel % CHUNK_ALIGNMENT == 0


def test_padding_is_bounded():
    layout = FlatLayout.of({"weight": (1000, 1000), "bias": (1000,)}, 8)
    assert layout.numel == 1_001_000
    assert layout.padded_numel - layout.numel < SLOT_ALIGNMENT * 2 + CHUNK_ALIGNMENT * 8


def test_the_worked_example_of_the_module_holds():
    layout = FlatLayout.of({"weight": (3, 20), "bias": (20,)}, 2)
    assert [(part.name, part.start, part.stop, part.at) for part in layout.overlaps(1)] == [("weight", 48, 60, 0), ("bias", 0, 20, 16)]
    assert layout.gaps() == [(60, 64), (84, 96)]
