"""The order of the samples: a pure function of (seed, position). Knows neither files nor Ray.

Position k counts the samples consumed since the run's start, over all epochs. Letters: G = samples of a step, N = world size, m = rows of
a micro-batch, A = micro-batches of a rank in a step.

Note: the permutation is computed, not stored. A Feistel network over the least even number of bits that covers the samples is a bijection
of a power of four; a value that falls outside the samples is sent through again until it falls inside (cycle walking), which makes it a
bijection of the samples. The power of four is below four times their number, so a few rounds of that suffice. Nothing but 64-bit integer
arithmetic is used, so the order is the same on any platform and with any version of numpy.
"""

from __future__ import annotations

import hashlib

import numpy as np

_ROUNDS = 6
_MULTIPLIERS = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))
_SHIFT = np.uint64(33)


def sample_ids(seed: int, first: int, count: int, num_samples: int) -> np.ndarray:
    """Ids of the samples at positions first, ..., first + count - 1.

    In each epoch every id of range(num_samples) comes once; the order differs from epoch to epoch and from seed to seed.

    Returns:
        (count,) int64.
    """
    positions = np.arange(first, first + count, dtype=np.int64)
    epochs = positions // num_samples
    ids = np.empty(count, dtype=np.int64)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        ids[chosen] = _permute(positions[chosen] % num_samples, num_samples, f"{seed}/{epoch}")
    return ids


def rank_part(ids: np.ndarray, rank: int, world_size: int, micro_batch: int) -> np.ndarray:
    """This rank's share of a step's ids, padded with -1 to whole micro-batches.

    Every id is on exactly one rank; shares differ by at most one. All ranks get equally many rows, so that all run equally many
    micro-batches: A = ceil(ceil(G / N) / m).

    Shapes:
        ids: (G,) int64.
        result: (A*m,) int64.
    """
    accumulation = -(-(-(-len(ids) // world_size)) // micro_batch)
    share = np.array_split(ids, world_size)[rank]
    padding = np.full(accumulation * micro_batch - len(share), -1, dtype=np.int64)
    return np.concatenate([share.astype(np.int64), padding])


def _permute(indices: np.ndarray, size: int, key: str) -> np.ndarray:
    half = np.uint64(max(1, -(-(size - 1).bit_length() // 2)))
    digest = hashlib.blake2b(key.encode(), digest_size=8 * _ROUNDS).digest()
    keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    values = _feistel(indices.astype(np.uint64), half, keys)
    while (outside := values >= size).any():
        values[outside] = _feistel(values[outside], half, keys)
    return values.astype(np.int64)


def _feistel(values: np.ndarray, half: np.uint64, keys: np.ndarray) -> np.ndarray:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << half) | right


def _mix(values: np.ndarray) -> np.ndarray:
    """Spread every bit over all 64. Source: MurmurHash3's finaliser, by Austin Appleby (public domain)."""
    for multiplier in _MULTIPLIERS:
        values = (values ^ (values >> _SHIFT)) * multiplier
    return values ^ (values >> _SHIFT)
