"""Streams: in what order the device does what the host has asked for.

The compute stream is the device's current one; every kind of collective has a side stream of its own. Two kinds of waits are all there is:

| wait | orders | so that |
|---|---|---|
| fork: the side stream waits for an event recorded on the compute stream | the collective after all that was computed | a gather finds its own slice written and its buffer's last reader gone, the first gather of a step comes after the optimizer, a reduction finds the last gradient copied |
| join: the compute stream waits for an event recorded on the side stream | what is computed next after the collective | a layer reads what was gathered, the optimizer what was reduced, and a buffer is freed when nothing uses it |

Memory is allocated and freed on the compute stream, so that the allocator needs no `record_stream` and hands out the same memory in every
step. What a side stream allocates while it works, it frees itself. The host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Launched:
    """Work on a side stream.

    Attributes:
        join: Has the compute stream wait for it.
        done: Whether it is over, asked without waiting; None where only a wait can tell.
        synchronize: Has the host wait for it.
    """

    join: Callable[[], None]
    done: Callable[[], bool] | None
    synchronize: Callable[[], None]


class HostStreams:
    """A CPU, where the host is the compute stream: a join waits for the works that were launched."""

    def run(self, side: str, work: Callable[[], Sequence[dist.Work]]) -> Launched:
        """Launch `work` on a side stream, after all that the compute stream has been asked for.

        Args:
            side: Name of the side stream.
            work: Launches; returns what is still in flight, nothing where it all went to the current stream.
        """
        works = work()

        def join() -> None:
            for part in works:
                part.wait()

        return Launched(join, None, join)


class CudaStreams:
    """A GPU.

    Args:
        device: Which.
        cuda: Where streams come from, so that a test can record them.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._sides: dict[str, torch.cuda.Stream] = {}

    def run(self, side: str, work: Callable[[], Sequence[dist.Work]]) -> Launched:
        """As in HostStreams."""
        if side not in self._sides:
            self._sides[side] = self._cuda.Stream(self._device)
        stream = self._sides[side]
        stream.wait_event(self._cuda.current_stream(self._device).record_event())
        with self._cuda.stream(stream):
            works = work()
            for part in works:
                part.wait()  # has this stream wait, not the host
        done = stream.record_event()
        return Launched(lambda: self._cuda.current_stream(self._device).wait_event(done), done.query, done.synchronize)


def streams_for(device: torch.device) -> HostStreams | CudaStreams:
    """The streams of a device."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()
