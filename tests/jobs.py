"""Small jobs, and batches for them that need no Ray."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rayzero3.config import Job, parse_job

VOCABULARY = 31


def small_job(storage, **changes) -> Job:
    """A job of a few thousand parameters. `changes` are sections or values that replace those below."""
    raw = {
        "name": "small",
        "model": {"layers": 2, "width": 16, "heads": 2, "rotary_fraction": 1.0, "vocab_size": VOCABULARY},
        "data": {"path": str(storage), "sequence_length": 8},
        "train": {"steps": 10, "global_batch": 7, "micro_batch": 2, "learning_rate": 1e-2, "warmup_steps": 2, "clip_norm": 1.0},
        "storage": str(storage),
    }
    for key, value in changes.items():
        raw[key] = {**raw[key], **value} if isinstance(raw.get(key), dict) else value
    return parse_job(raw)


def random_batches(job: Job, done: int, rank: int, world_size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """This rank's part of each step after `done`: random tokens that depend on the step alone, cut as the real order cuts them."""
    from rayzero3.data.order import rank_part

    train, length = job.train, job.data.sequence_length
    for step in range(done + 1, train.steps + 1):
        tokens = np.random.default_rng(step).integers(0, VOCABULARY, (train.global_batch, length + 1)).astype(np.int32)
        ids = rank_part(np.arange(train.global_batch), rank, world_size, train.micro_batch)
        yield ids, np.where(ids[:, None] < 0, 0, tokens[ids])
