"""Comm: the only calls of torch.distributed in the engine. Counts bytes and keeps the ledger of collectives.

The seam for streams is Pending: a collective that was launched and not yet waited for. `Pending.wait()` orders the compute stream after
the collective. On a CPU the host is the compute stream, so it blocks; with NCCL only the current CUDA stream waits, never the host.

Letters: N = world size, C = elements of one chunk.

Note: why gloo's own collectives are not used. gloo's reduce_scatter sends the volume of an all-reduce, hides a full-size temporary and
sums in the dtype that travels. Point-to-point messages straight into the flat buffer send (N-1)*C elements per rank, which is the
least possible, and the sum is ours: fp32, in rank order, the same bits whatever arrives first.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rayzero3.errors import CollectiveError

_LEDGER_LENGTH = 4
_LEDGER_WAIT_S = 3.0


class Pending:
    """A collective in flight. `wait()` may be called more than once; only the first call does something.

    Attributes:
        result: What the collective produced, valid after `wait()`.
    """

    def __init__(self, launch: Callable[[], Sequence[dist.Work]], fail: Callable[[Exception], CollectiveError], finish: Callable[[], Tensor]) -> None:
        self._fail, self._finish = fail, finish
        self.result: Tensor | None = None
        try:
            self._works = launch()
        except Exception as error:  # what torch raises here depends on the backend
            raise fail(error) from error

    def wait(self) -> Tensor:
        """Order what follows on the compute stream after the collective. Raises CollectiveError when it failed or timed out."""
        if self.result is None:
            try:
                for work in self._works:
                    work.wait()
            except Exception as error:  # as above
                raise self._fail(error) from error
            self.result = self._finish()
            self._works = ()
        return self.result


class Comm:
    """The collectives of one process group, in launch order.

    Every rank must call the same methods with the same names in the same order. On gloo the message tags carry the place and the name, so
    that ranks which disagree never mix up data: they time out, and the error names what each rank was doing.

    Args:
        group: The process group; None for the default one.

    Attributes:
        rank, world_size: Of this process in the group.
        bytes_sent: Bytes that this rank sent, by kind of collective.
        ledger: The last few collectives, as `place kind name`, for errors.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.peers = [rank for rank in range(self.world_size) if rank != self.rank]
        self.bytes_sent: Counter[str] = Counter()
        self.ledger: deque[str] = deque(maxlen=_LEDGER_LENGTH)
        self._count = 0
        self._point_to_point = dist.get_backend(group) == "gloo"

    def all_gather(self, full: Tensor, name: str) -> Pending:
        """Fill every rank's slice of `full` in place; this rank's own slice is there already.

        Shapes:
            full: (N*C,) any dtype.

        Cost: sends (N-1)*C elements per rank.
        """
        chunk = full.numel() // self.world_size
        slices = full.split(chunk) if chunk else []
        tag, fail = self._enter("fetch", name, (self.world_size - 1) * chunk * full.element_size())

        def launch() -> Sequence[dist.Work]:
            if not chunk:
                return ()
            if self._point_to_point:
                return self._exchange([slices[self.rank]] * self.world_size, slices, tag)
            gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
            return [gather(full, slices[self.rank], group=self.group, async_op=True)]

        return Pending(launch, fail, lambda: full)

    def reduce_scatter(self, full: Tensor, name: str) -> Pending:
        """Sum this rank's slice over all ranks, in rank order and in fp32.

        Shapes:
            full: (N*C,) floating; must not be changed before `wait()`.
            result: (C,) fp32.

        Cost: sends (N-1)*C elements of full's dtype per rank; on gloo as much scratch memory.
        """
        chunk = full.numel() // self.world_size
        tag, fail = self._enter("reduce", name, (self.world_size - 1) * chunk * full.element_size())
        if not chunk:
            return Pending(lambda: (), fail, lambda: full.new_zeros(0, dtype=torch.float32))
        if not self._point_to_point:
            total = full.new_empty(chunk, dtype=torch.float32)
            scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
            return Pending(lambda: [scatter(total, full.float(), group=self.group, async_op=True)], fail, lambda: total)
        outgoing = full.split(chunk)
        incoming = [outgoing[rank] if rank == self.rank else full.new_empty(chunk) for rank in range(self.world_size)]
        return Pending(lambda: self._exchange(outgoing, incoming, tag), fail, lambda: _sum_in_order(incoming))

    def gather_rows(self, row: Tensor, name: str) -> Tensor:
        """Every rank's row, for small things such as counts, norms and verdicts. Blocks.

        Shapes:
            row: (K,) any dtype, the same K on every rank.
            result: (N, K).
        """
        rows = row.new_empty(self.world_size, row.numel())
        rows[self.rank] = row
        return self.all_gather(rows.view(-1), name).wait().view(self.world_size, -1)

    def sum_rows(self, row: Tensor, name: str) -> Tensor:
        """Sum of every rank's row, in rank order, in the row's dtype. Shapes as in `gather_rows`, result (K,)."""
        total, *others = self.gather_rows(row, name)
        for other in others:
            total = total + other
        return total

    def scatter_from_first(self, chunks: Sequence[Tensor] | None, out: Tensor, name: str) -> None:
        """Rank 0 hands every rank its chunk. Blocks.

        Shapes:
            chunks: N tensors of (C,) on rank 0, None elsewhere.
            out: (C,), filled.
        """
        tag, fail = self._enter("scatter", name, 0 if self.rank else (self.world_size - 1) * out.numel() * out.element_size())

        def launch() -> Sequence[dist.Work]:
            if self.rank == 0:
                out.copy_(chunks[0])
            if not out.numel():
                return ()
            if self.rank == 0:
                return [dist.isend(chunks[peer], group=self.group, group_dst=peer, tag=tag) for peer in self.peers]
            return [dist.irecv(out, group=self.group, group_src=0, tag=tag)]

        Pending(launch, fail, lambda: out).wait()

    def _exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], tag: int) -> list[dist.Work]:
        works = [dist.irecv(incoming[peer], group=self.group, group_src=peer, tag=tag) for peer in self.peers]
        return works + [dist.isend(outgoing[peer], group=self.group, group_dst=peer, tag=tag) for peer in self.peers]

    def _enter(self, kind: str, name: str, sent_bytes: int) -> tuple[int, Callable[[Exception], CollectiveError]]:
        self._count += 1
        self.bytes_sent[kind] += sent_bytes
        entry = f"{self._count} {kind} {name}"
        self.ledger.append(entry)
        tag = zlib.crc32(entry.encode()) % 2**31
        return tag, lambda error: self._explain(entry, error)

    def _explain(self, entry: str, error: Exception) -> CollectiveError:
        """An error that names this rank's collective and, where they failed too, the other ranks' ones."""
        places = {self.rank: entry}
        try:
            store = dist.distributed_c10d._get_default_store()
            store.set(f"rayzero3/failed/{self.rank}", entry)
            deadline = time.monotonic() + _LEDGER_WAIT_S
            while len(places) < self.world_size and time.monotonic() < deadline:
                for peer in self.peers:
                    if peer not in places and store.check([f"rayzero3/failed/{peer}"]):
                        places[peer] = store.get(f"rayzero3/failed/{peer}").decode()
                time.sleep(0.05)
        except Exception:  # the store may be gone with its rank; what this rank knows is still worth telling
            pass
        seen = ", ".join(f"rank {rank} at collective {place}" for rank, place in sorted(places.items()))
        silent = [str(peer) for peer in self.peers if peer not in places]
        seen += f"; the last on rank {self.rank}: {', '.join(self.ledger)}"
        seen += f"; nothing heard of rank {', '.join(silent)}" if silent else ""
        return CollectiveError(
            f"collective {entry} failed on rank {self.rank}",
            None,
            f"{seen}. Cause: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            "If the places differ, the ranks ran different layers; if they agree, look at the ranks that were not heard of.",
        )


def _sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    return total
