"""The host never waits in a step, and what reduces runs beside what computes.

At N=1 a gather in place moves nothing, so no trace can show it overlapping; that takes two GPUs. A reduction is a copy from the flat
gradient into the chunk's gradient, and its stream can be seen.
"""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from rayzero3.engine import LossScaler, Zero3Adam
from tests.engine.models import language_model, mean_loss, tokens
from tests.gpu.plain import sharded

BLOCKS = 6


def stepper(device, dtype):
    """A function that makes one step, with everything that a step has: a scaler, clipping, decay."""
    model = sharded(language_model(256, 97, BLOCKS), device, dtype)
    scaler = LossScaler(device) if dtype is torch.float16 else None
    optimizer = Zero3Adam(model.get_trainable_chunk(), lr=1e-3, weight_decay=0.1, scaler=scaler)
    batch = tokens(0, 4, 16, 97).to(device)

    def step():
        optimizer.zero_grad()
        loss = mean_loss(model, batch)
        (loss if scaler is None else loss * scaler.scale).backward()
        optimizer.clip(1.0)
        optimizer.step()

    return step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_host_waits_for_nothing_in_a_step(device, dtype):
    step = stepper(device, dtype)
    step()
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def streams(trace):
    """Kernels and copies of a trace: how many of each category on each stream."""
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("cat") in ("kernel", "gpu_memcpy")]
    return Counter((event["cat"], event["args"]["stream"]) for event in events)


def test_each_layers_reduction_runs_on_another_stream_than_its_compute(device, tmp_path):
    step = stepper(device, torch.float32)
    step()
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        step()
        torch.cuda.synchronize(device)
    trace = tmp_path / "trace.json"
    prof.export_chrome_trace(str(trace))
    found = streams(trace)
    assert found, "the profiler saw no kernel"
    compute = max((count, stream) for (category, stream), count in found.items() if category == "kernel")[1]
    beside = sum(count for (_, stream), count in found.items() if stream != compute)
    assert beside >= BLOCKS + 2, f"one reduction a layer beside stream {compute}: {dict(found)}"
