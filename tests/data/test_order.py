"""The order is a pure function: every sample once an epoch, the same from any position, on exactly one rank."""

from __future__ import annotations

import numpy as np
import pytest

from rayzero3.data.order import rank_part, sample_ids


@pytest.mark.parametrize("samples", [1, 2, 3, 4, 5, 64, 1000, 65537])
def test_every_epoch_is_a_permutation(samples):
    for epoch in range(3):
        assert sorted(sample_ids(7, epoch * samples, samples, samples)) == list(range(samples))


def test_epochs_and_seeds_differ_and_the_order_looks_random():
    first, second, other = sample_ids(0, 0, 1000, 1000), sample_ids(0, 1000, 1000, 1000), sample_ids(1, 0, 1000, 1000)
    for a, b in ((first, second), (first, other), (second, other)):
        assert (a == b).mean() < 0.02
    assert abs(np.corrcoef(np.arange(1000), first)[0, 1]) < 0.1
    assert 0.4 < (np.diff(first) > 0).mean() < 0.6


def test_the_order_never_changes_between_versions():
    """A run that resumes with a newer version must see the samples that the older one would have given it."""
    assert sample_ids(0, 0, 8, 1000).tolist() == EXPECTED[0]
    assert sample_ids(123, 10**12, 8, 10**7).tolist() == EXPECTED[1]


EXPECTED = ([881, 210, 474, 343, 38, 980, 781, 627], [2304955, 1139366, 7129256, 5218442, 4444962, 4568020, 1442113, 3263704])


@pytest.mark.parametrize("stop", [1, 20, 63, 64, 65, 200])
def test_resuming_at_any_position_continues_the_undisturbed_order(stop):
    whole = sample_ids(3, 0, 300, 64)
    assert np.array_equal(np.concatenate([sample_ids(3, 0, stop, 64), sample_ids(3, stop, 300 - stop, 64)]), whole)


@pytest.mark.parametrize("global_batch", [1, 2, 7, 17, 64])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("micro_batch", [1, 2, 5])
def test_ranks_share_a_step_exactly_and_run_equally_many_micro_batches(global_batch, world_size, micro_batch):
    ids = sample_ids(0, 0, global_batch, 1000)
    parts = [rank_part(ids, rank, world_size, micro_batch) for rank in range(world_size)]
    assert np.array_equal(np.concatenate([part[part >= 0] for part in parts]), ids)
    assert len({len(part) for part in parts}) == 1 and len(parts[0]) % micro_batch == 0
    real = [int((part >= 0).sum()) for part in parts]
    assert max(real) - min(real) <= 1
    assert len(parts[0]) == micro_batch * -(-max(real) // micro_batch), "no micro-batch of padding alone on every rank"


def test_four_workers_stop_and_two_resume_with_none_lost_and_none_twice():
    seen, position = [], 0
    for world_size, steps in ((4, 3), (2, 4), (3, 2)):
        for _ in range(steps):
            ids = sample_ids(5, position, 7, 64)
            for rank in range(world_size):
                part = rank_part(ids, rank, world_size, 2)
                seen += part[part >= 0].tolist()
            position += 7
    assert seen == sample_ids(5, 0, 63, 64).tolist() and len(set(seen)) == 63
