"""On a GPU nothing is read before it is there or freed while it is used: the real schedule, run on a device that knows who waits for whom."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from rayzero3.engine import LossScaler, Zero3Adam, Zero3Layer, Zero3Sequential, adam, comm, ledger
from rayzero3.engine import offload as module
from rayzero3.engine.flat import FlatParameter
from rayzero3.engine.offload import host_empty
from rayzero3.engine.streams import CudaStreams
from tests.engine.fake_device import FakeDevice, Race
from tests.engine.models import language_model, mean_loss, tokens
from tests.ranks import run_ranks

CASES = {
    "plain": {},
    "fp16, tied": {"dtype": torch.float16, "tied": True},
    "bf16, recomputed, frozen": {"dtype": torch.bfloat16, "recompute": True, "frozen": True},
    "two micro-batches": {"micro_batches": 2},
    "two micro-batches, reduced once": {"micro_batches": 2, "hold": True},
    "no prefetch": {"prefetch": 0},
    "offloaded": {"offload": True},
    "offloaded, two micro-batches, fp16": {"offload": True, "micro_batches": 2, "dtype": torch.float16},
}


def two_steps(device, dtype=torch.float32, tied=False, recompute=False, frozen=False, micro_batches=1, hold=False, prefetch=1, offload=False):
    """Two whole steps as rank 0 of a fake group of two, on the fake device."""
    comm.streams_for = lambda _: CudaStreams(torch.device("cpu"), device)
    modules = language_model(blocks=2, tied=tied)
    if frozen:
        modules[2].up.requires_grad_(False)
    layers = [Zero3Layer(module, 0, 2, "cpu", dtype, recompute=recompute and 0 < i < 3, offload=offload) for i, module in enumerate(modules)]
    model = Zero3Sequential(layers, prefetch=prefetch)
    scaler = LossScaler("cpu", initial=8.0) if dtype is torch.float16 else None
    optimizer = Zero3Adam(model.get_trainable_chunk(), weight_decay=0.1, scaler=scaler)
    optimizer._host = device
    adam.host_empty = module.host_empty = lambda *args: device.pinned(host_empty(*args))
    batch, lost = tokens(0, 2), torch.zeros(1)
    watch_resizes(device)
    with device:
        for _ in range(2):
            optimizer.zero_grad()
            for index in range(micro_batches):
                model._order.hold_gradients = hold and index < micro_batches - 1
                loss = mean_loss(model, batch)
                (loss * scaler.scale if scaler else loss).backward()
            norm = optimizer.clip(1.0)
            optimizer.step()
            lost = lost + model.comm.sum_rows(loss.detach().view(1) + norm, "loss")
        optimizer.wait()
        lost = lost + sum(chunk.sum() for chunk in optimizer.chunks)
        del loss, norm
        device.settle_freed()


def watch_resizes(device):
    """Allocating and freeing a full buffer is no operation that torch dispatches: tell the device."""
    for name in ("allocate", "free"):
        real = vars(FlatParameter)[name]

        def watched(flat, real=real, name=name):
            if name == "free":
                device.resized(flat._full)
            result = real(flat)
            if name == "allocate":
                device.resized(flat._full)
            return result

        setattr(FlatParameter, name, watched)


def race_of(options, skipped_wait=None):
    """What the fake device finds, and how many waits there were."""
    device, allocate, free = FakeDevice(skipped_wait), FlatParameter.allocate, FlatParameter.free
    try:
        two_steps(device, **options)
        return None, device
    except Exception as race:
        if not isinstance(race, Race) and not isinstance(race.__cause__, Race):
            raise
        return str(race), device
    finally:
        FlatParameter.allocate, FlatParameter.free = allocate, free


def every_wait(rank, world_size, options):
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    ledger._ANSWER_S = 0.0  # no other rank is there to answer
    race, device = race_of(options)
    assert race is None, race
    assert len(device.used) == (5 if options.get("offload") else 3), "compute, fetches, reductions; copies to the host, and the host itself"
    unnoticed = [wait for wait in range(device.waits) if race_of(options, wait)[0] is None]
    return device.waits, unnoticed


IMPLIED = {"bf16, recomputed, frozen": 2 * 2, "offloaded": 3 + 1, "offloaded, two micro-batches, fp16": 3 + 1}
"""Waits that others imply. A layer of two flat parameters joins twice in each pass, and the second join, of the same stream, implies the
first. At the end the host waits for the updates of four chunks, and the last implies the others; by the time that the second step copies a
gradient out, the host has seen the first step's copies end."""


def test_every_access_waits_for_what_it_needs_and_no_wait_is_superfluous():
    for name, options in CASES.items():
        ((waits, unnoticed),) = run_ranks(every_wait, 1, options)
        assert waits >= 2 * 4 * 4, name
        assert len(unnoticed) == IMPLIED.get(name, 0), f"{name}: of {waits} waits, these can be left out unnoticed: {unnoticed}"
