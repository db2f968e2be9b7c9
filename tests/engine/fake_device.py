"""FakeDevice: runs the engine's real schedule of streams and events on CPU tensors, and proves that no access is a race.

Every tensor operation, collectives included, counts as one piece of work on the stream that is current. Streams and events carry vector
clocks: what a stream is sure to come after. Each storage remembers its last write and its last reads; a read must come after the last write,
a write and a free after everything. What the host does by itself, it does on a stream of its own; what it launches later comes after what it
knows to be over. Memory belongs to the stream that it was allocated on, as with the caching allocator of torch, so what a
side stream uses must be over, for that stream, before it is freed. An operation that reads a value on the host counts as a wait of the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Clock = dict[str, int]
HOST_READS = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "item")


class Race(AssertionError):
    """Two accesses that nothing orders, or a wait of the host."""


class Event:
    def __init__(self, device: FakeDevice, clock: Clock) -> None:
        self.device, self.clock = device, dict(clock)

    def synchronize(self) -> None:
        self.device.wait(self.device.host.clock, self.clock)

    def result(self) -> None:
        """As a future of the host's thread: what the host launches from now on comes after it."""
        self.device.wait(self.device.known, self.clock)

    def query(self) -> bool:
        return True


class Stream:
    def __init__(self, device: FakeDevice, name: str) -> None:
        self.device, self.name, self.clock = device, name, {}

    def record_event(self) -> Event:
        return Event(self.device, self.clock)

    def wait_event(self, event: Event) -> None:
        self.device.wait(self.clock, event.clock)


class Storage:
    """What happened to one storage: who owns it, the last write, the last read on each stream."""

    def __init__(self, owner: Stream | None) -> None:
        self.owner, self.write, self.reads = owner, {}, {}


class FakeDevice(TorchDispatchMode):
    """Stands in for `torch.cuda` and watches all operations while it is entered.

    Args:
        skipped_wait: Number of the wait that is left out, to see whether that is noticed.

    Attributes:
        watching: Whether it is entered.
        waits: Waits of a stream for an event while it was watching.
        used: Names of the streams that did some work.
    """

    def __init__(self, skipped_wait: int | None = None) -> None:
        super().__init__()
        self.skipped_wait, self.watching, self.waits, self.used = skipped_wait, False, 0, set()
        self._streams = [Stream(self, "compute")]
        self._current = self._streams[0]
        self.host = Stream(self, "host")
        self.known: Clock = {}
        self._storages: dict[int, tuple[StorageWeakRef, Storage]] = {}

    def __enter__(self) -> FakeDevice:
        self.watching = True
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        self.watching = False
        super().__exit__(*exception)

    def Stream(self, device: Any) -> Stream:
        self._streams.append(Stream(self, f"side {len(self._streams)}"))
        return self._streams[-1]

    def current_stream(self, device: Any) -> Stream:
        return self._current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def wait(self, clock: Clock, other: Clock) -> None:
        """What follows on a stream comes after something; unless this is the wait that is left out."""
        self.settle_freed()
        self.waits += self.watching
        if not self.watching or self.waits - 1 != self.skipped_wait:
            merge(clock, other)

    def submit(self, work: Any, *args: Any) -> Event:
        """Stands in for the executor of the host's thread."""
        with self.stream(self.host):
            work(*args)
        return self.host.record_event()

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Host memory: the allocator of pinned memory itself waits for copies from and to what it is given back."""
        if self.watching:
            self._storages[StorageWeakRef(tensor.untyped_storage()).cdata][1].owner = None
        return tensor

    def resized(self, tensor: torch.Tensor) -> None:
        """A storage was allocated or freed in place. What is allocated may be what the last operation of its stream has just let go."""
        self._tick()
        self._access(tensor, writes=True, what="resize")

    def settle_freed(self) -> None:
        """What nobody holds any more has gone back to the allocator."""
        for key, (reference, storage) in list(self._storages.items()):
            if reference.expired():
                del self._storages[key]
                if storage.owner is not None:
                    self._check(storage.owner, storage, writes=True, what="free")

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.settle_freed()
        name, kwargs = func._schema.name, kwargs or {}
        merge(self._current.clock, self.known)
        if name.split("::")[1] in HOST_READS:
            raise Race(f"the host waits in {name}")
        self._tick()
        if not func.is_view and "empty" not in name:
            for argument, value in [*zip(func._schema.arguments, args, strict=False), *((a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs)]:
                written = name.startswith("c10d::") or (argument.alias_info is not None and argument.alias_info.is_write)
                for tensor in tree_leaves(value):
                    if isinstance(tensor, torch.Tensor):
                        self._access(tensor, written, name)
        result = func(*args, **kwargs)
        if not func.is_view:
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor):
                    self._access(tensor, True, name)
        return result

    def _tick(self) -> None:
        self._current.clock[self._current.name] = self._current.clock.get(self._current.name, 0) + 1
        self.used.add(self._current.name)

    def _access(self, tensor: torch.Tensor, writes: bool, what: str) -> None:
        reference = StorageWeakRef(tensor.untyped_storage())
        _, storage = self._storages.setdefault(reference.cdata, (reference, Storage(self._current)))
        self._check(self._current, storage, writes, what)
        now = {self._current.name: self._current.clock.get(self._current.name, 0)}
        if writes:
            storage.write, storage.reads = now, {}
        else:
            storage.reads |= now

    def _check(self, stream: Stream, storage: Storage, writes: bool, what: str) -> None:
        for kind, others in (("write", storage.write), ("read", storage.reads if writes else {})):
            for other, tick in others.items():
                if other != stream.name and stream.clock.get(other, 0) < tick:
                    raise Race(f"{what} on {stream.name} does not wait for a {kind} on {other}")


def merge(clock: Clock, other: Clock) -> None:
    for name, tick in other.items():
        clock[name] = max(clock.get(name, 0), tick)
