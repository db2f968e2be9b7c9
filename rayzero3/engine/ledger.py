"""Ledger: which collectives this rank launched, and how ranks find out that theirs differ.

A rank that waits long for a collective shows its ledger to the others through the group's store. Two ranks that launched different
collectives under the same number will never meet: both are told at once, and their communicator is aborted.

Where different collectives of one size would meet all the same and mix up data, as with NCCL, which has no tags, every rank shows its ledger
once a second and compares it with its neighbour's: if any two ranks differ, two neighbours do.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

import torch.distributed as dist

from rayzero3.errors import CollectiveError

_KEPT, _TOLD = 1024, 4
_LONG_S, _LOOK_S, _ANSWER_S = 1.0, 0.25, 3.0


class Ledger:
    """The collectives of one communicator on this rank, counted from 1.

    Args:
        rank, world_size: Of this process in the group.

    Attributes:
        mismatch: What differs between the ranks, once that is known.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.mismatch: str | None = None
        self._count = 0
        self._entries: deque[tuple[int, str]] = deque(maxlen=_KEPT)
        self._open: deque[tuple[str, float, Callable[[], bool] | None]] = deque()
        self._key, self._watched, self._tagged, self._compared_s = "unwatched", False, True, 0.0

    @property
    def peers(self) -> list[int]:
        """The other ranks."""
        return [rank for rank in range(self.world_size) if rank != self.rank]

    def enter(self, kind: str, name: str) -> str:
        """A new collective's entry, `number kind name`."""
        self._count += 1
        self._entries.append((self._count, f"{kind} {name}"))
        return f"{self._count} {kind} {name}"

    def opens(self, entry: str, done: Callable[[], bool] | None) -> None:
        """From now on this rank waits for a collective: until `closes`, or until `done` says so."""
        if self._watched:
            self._open.append((entry, time.monotonic(), done))

    def closes(self) -> None:
        """The collective that this rank waited for last is over."""
        if self._watched:
            self._open.pop()

    def watch(self, key: int, abort: Callable[[], None], tagged: bool = True) -> None:
        """Look after long waits from now on, in a thread that ends with this ledger.

        Args:
            key: The same on all ranks, and new: names this ledger in the store.
            tagged: Whether different collectives can't meet.
            abort: Ends every wait for this group's collectives, on this rank and its peers.
        """
        self._key, self._tagged = f"{key:x}", tagged
        if self.world_size > 1:
            self._watched = True
            threading.Thread(target=_watch, args=(weakref.ref(self), abort), name="rayzero3-ledger", daemon=True).start()

    def look(self) -> bool:
        """Whether the ranks are known to differ: compares ledgers if this rank has waited for long."""
        while self._open and self._open[0][2] is not None and self._open[0][2]():
            self._open.popleft()
        waiting = next(iter(self._open), None)
        if waiting is not None and time.monotonic() - waiting[1] > _LONG_S:
            self._show(waiting[0])
            self._compare(self._read(self.peers))
        elif not self._tagged and self._entries and time.monotonic() - self._compared_s > _LONG_S:
            self._compared_s = time.monotonic()
            self._show("{} {}".format(*self._entries[-1]))
            self._compare(self._read([(self.rank + 1) % self.world_size]))
        return self.mismatch is not None

    def explain(self, entry: str, error: Exception) -> CollectiveError:
        """An error that names this rank's collective and, where they are stuck too, the other ranks' ones."""
        shown: dict[int, dict] = {}
        try:
            self._show(entry)
            deadline = time.monotonic() + _ANSWER_S
            while len(shown) < self.world_size - 1 and time.monotonic() < deadline:
                time.sleep(0.05)
                shown = self._read(self.peers)
            self._compare(shown)
        except Exception:  # the store may be gone with its rank; what this rank knows is still worth telling
            pass
        places = {self.rank: entry} | {rank: other["at"] for rank, other in shown.items()}
        seen = ", ".join(f"rank {rank} at collective {place}" for rank, place in sorted(places.items()))
        seen += f"; the last on rank {self.rank}: {', '.join(f'{n} {text}' for n, text in list(self._entries)[-_TOLD:])}"
        silent = [str(peer) for peer in self.peers if peer not in places]
        seen += f"; nothing heard of rank {', '.join(silent)}" if silent else ""
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        if self.mismatch:
            return CollectiveError(
                f"the ranks run different layers: {self.mismatch}", None, seen, "Let every rank call the same layers in the same order."
            )
        return CollectiveError(
            f"collective {entry} failed on rank {self.rank}",
            None,
            f"{seen}. Cause: {cause}",
            "If the places differ, the ranks ran different layers; if they agree, look at the ranks that were not heard of.",
        )

    def _show(self, at: str) -> None:
        shown = {"at": at, "entries": list(self._entries)}
        _store().set(f"rayzero3/ledger/{self._key}/{self.rank}", json.dumps(shown))

    def _read(self, peers: list[int]) -> dict[int, dict]:
        store, found = _store(), {}
        for peer in peers:
            key = f"rayzero3/ledger/{self._key}/{peer}"
            if store.check([key]):
                found[peer] = json.loads(store.get(key))
        return found

    def _compare(self, shown: dict[int, dict]) -> None:
        mine = dict(self._entries)
        differing = [
            (number, rank, theirs) for rank, other in shown.items() for number, theirs in other["entries"] if mine.get(number, theirs) != theirs
        ]
        if differing:
            number, rank, theirs = min(differing)
            self.mismatch = f"as collective {number}, rank {self.rank} launched `{mine[number]}` and rank {rank} launched `{theirs}`"


def new_key() -> int:
    """A number that names a ledger, for rank 0 to give to the others. It reaches nothing that is computed."""
    return secrets.randbits(62)


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _watch(ledger: weakref.ref[Ledger], abort: Callable[[], None]) -> None:
    while True:
        time.sleep(_LOOK_S)
        watched = ledger()
        if watched is None:
            return
        try:
            differs = watched.look()
        except Exception:  # the store went with its rank or with the group: the collectives themselves will fail
            return
        if differs:
            abort()
            return
        del watched
