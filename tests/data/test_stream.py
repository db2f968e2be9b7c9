"""What Ray Data streams is the plain reader's rows in the pure order: at any N, from any position, across an epoch's end."""

from __future__ import annotations

import numpy as np
import pytest

from rayzero3.data import stream
from rayzero3.data.order import rank_part, sample_ids
from rayzero3.data.reader import WindowReader
from rayzero3.data.stream import training_batches, validation_batches

pytestmark = pytest.mark.usefixtures("ray_cluster")
LENGTH = 64


@pytest.mark.parametrize(
    ("world_size", "position", "steps", "global_batch"),
    [(1, 0, 40, 7), (2, 0, 40, 17), (1, 300, 25, 17), (3, 35, 50, 5)],
)
def test_the_stream_is_the_reference_order(shards, world_size, position, steps, global_batch):
    reader = WindowReader(shards, "train", LENGTH)
    for rank in range(world_size):
        batches = training_batches(shards, LENGTH, 9, position, steps, global_batch, 4, rank, world_size, 1.0)
        count = 0
        for step, (ids, tokens) in enumerate(batches):
            expected = rank_part(sample_ids(9, position + step * global_batch, global_batch, reader.num_samples), rank, world_size, 4)
            assert np.array_equal(ids, expected) and np.array_equal(tokens, reader.read(expected))
            count += 1
        assert count == steps


def test_a_long_stream_is_a_chain_of_datasets_without_a_seam(shards, monkeypatch):
    monkeypatch.setattr(stream, "_SEGMENT_BLOCKS", 2)
    ids = np.concatenate([ids for ids, _ in stream.training_batches(shards, LENGTH, 9, 11, 70, 3, 3, 0, 1, 1.0)])
    assert np.array_equal(ids, sample_ids(9, 11, 210, WindowReader(shards, "train", LENGTH).num_samples))


def test_the_stream_crosses_an_epochs_end_without_losing_or_repeating(shards):
    samples = WindowReader(shards, "train", 1000).num_samples
    first = samples - 10
    ids = np.concatenate([ids[ids >= 0] for ids, _ in training_batches(shards, 1000, 1, first, 10, 4, 2, 0, 1, 1.0)])
    assert np.array_equal(ids, sample_ids(1, first, 40, samples))
    assert len(set(ids[:10])) == 10 and not set(ids[:10]) & set(sample_ids(1, 0, first, samples))


def test_a_stream_that_is_left_early_frees_its_tasks(shards):
    import ray

    left = training_batches(shards, LENGTH, 9, 0, 5000, 7, 4, 0, 1, 1.0)
    next(left)
    left.close()
    ids, _ = next(training_batches(shards, LENGTH, 9, 0, 5, 7, 4, 0, 1, ray.cluster_resources()["CPU"]))
    assert len(ids) == 8


def test_validation_is_the_same_samples_at_any_size_and_equally_many_batches(shards):
    reader = WindowReader(shards, "validation", LENGTH)
    for world_size in (1, 2, 3):
        ranks = [list(validation_batches(shards, LENGTH, 13, 4, rank, world_size)) for rank in range(world_size)]
        assert len({len(batches) for batches in ranks}) == 1
        ids = np.concatenate([ids for batches in ranks for ids, _ in batches])
        assert sorted(ids[ids >= 0]) == list(range(min(13, reader.num_samples)))
        assert all(np.array_equal(tokens, reader.read(ids)) for batches in ranks for ids, tokens in batches)
