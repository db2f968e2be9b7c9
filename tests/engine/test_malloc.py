"""A step on a CPU reuses the memory of the step before instead of taking fresh pages from the system."""

from __future__ import annotations

import os
import platform
import resource
import statistics

import pytest
import torch

from rayzero3.engine import Zero3Adam, Zero3Layer, Zero3Sequential
from rayzero3.engine.malloc import keep_freed_memory
from tests.ranks import run_ranks


def faults_per_step(rank, world_size, setting):
    """Page faults of a step on layers of 16 MB, the median of some after the first ones."""
    if setting:
        os.environ["MALLOC_TOP_PAD_"] = "131072"
    model = Zero3Sequential([Zero3Layer(torch.nn.Linear(2048, 2048), rank, world_size, "cpu") for _ in range(4)])
    optimizer = Zero3Adam(model.get_trainable_chunk())
    counts = []
    for _ in range(12):
        optimizer.zero_grad()
        model(torch.ones(2, 2048)).sum().backward()
        optimizer.step()
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    return statistics.median(after - before for before, after in zip(counts[4:-1], counts[5:], strict=True))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_a_step_takes_almost_no_fresh_memory_unless_the_user_set_malloc():
    kept, given_back = (max(run_ranks(faults_per_step, 2, setting)) for setting in (False, True))
    assert kept * 20 < given_back


def test_the_users_own_settings_win(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000000")
    assert keep_freed_memory() is False
