"""Comm: the only calls of torch.distributed in the engine. Launches collectives, counts their bytes, enters them in the ledger.

Letters: N = world size, C = elements of one chunk.

Note: why gloo's own collectives are not used. gloo's reduce_scatter sends the volume of an all-reduce, hides a full-size temporary and
sums in the dtype that travels. Point-to-point messages straight into the flat buffer send (N-1)*C elements per rank, which is the
least possible, and the sum is ours: fp32, in rank order, the same bits whatever arrives first. Where all ranks are on one host, they
exchange the same slices through a board instead, once `watch` has found out: nothing is sent, and the bits stay the same.
"""

from __future__ import annotations

import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rayzero3.engine.board import Board, Post
from rayzero3.engine.ledger import Ledger, new_key
from rayzero3.engine.mesh import Group
from rayzero3.engine.pending import Pending
from rayzero3.engine.streams import Launched, streams_for

_ABORT_TAG = 2**31 - 1
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the new names, from torch 2.13 on
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Comm:
    """The collectives of the ranks that share one copy of the model, in launch order; and between the copies, where there are several.

    Every rank must call the same methods with the same names in the same order. On gloo the message tags carry the place and the name, so
    that ranks which disagree never mix up data: they time out, and the error names what each rank was doing.

    Args:
        group: The process group; None for the default one. A mesh of (replicas, shards) is hybrid sharding: each row of it shares a copy.
        device: Where the tensors lie.

    Attributes:
        rank, world_size: Of this process among those that share its copy: N is the world size.
        total_rank, total_size: Of this process among all.
        given: The group as it was given.
        replicas: The ranks of all copies that hold the same chunks, or None.
        bytes_sent: Bytes that this rank sent, by kind of collective, or would have sent where its peers read them from its memory.
        ledger: What was launched.
        streams: Where it runs.
    """

    def __init__(self, group: Group = None, device: torch.device | str = "cpu") -> None:
        self.replicas = Comm(group.get_group(0), device) if isinstance(group, DeviceMesh) else None
        self.given, self.device = group, torch.device(device)
        self.group = group.get_group(1) if self.replicas else group
        self.rank, self.world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        copies, copy = (self.replicas.world_size, self.replicas.rank) if self.replicas else (1, 0)
        self.total_rank, self.total_size = copy * self.world_size + self.rank, copies * self.world_size
        self.peers = [rank for rank in range(self.world_size) if rank != self.rank]
        self.bytes_sent: Counter[str] = Counter()
        self.ledger, self.streams = Ledger(self.rank, self.world_size), streams_for(self.device)
        self._copying: tuple[Launched, tuple[Tensor | None, ...]] | None = None
        self._point_to_point = dist.get_backend(self.group) == "gloo"
        self._board: Board | None = None

    def watch(self) -> None:
        """From now on, have ranks that launched different collectives fail within seconds, and those of one host read each other's memory.

        Every rank calls it together.
        """
        own = torch.full((1,), new_key() if self.rank == 0 else 0, dtype=torch.int64, device=self.device)
        key, abort, group = int(self.gather_rows(own, "ledger")[0]), _abort_gloo if self._point_to_point else _abort, self.group
        board = self._board = self._meet() if self._point_to_point and self.device.type == "cpu" and self.world_size > 1 else None
        if board is not None:
            weakref.finalize(self, board.close)
        self.ledger.watch(key, lambda: (board and board.abort(), abort(group)), tagged=self._point_to_point)
        if self.replicas:
            self.replicas.watch()

    @property
    def lends(self) -> bool:
        """Whether peers may go on reading what was gathered after the wait for it, until `settle`."""
        return self._board is not None

    def settle(self, tensor: Tensor) -> None:
        """Wait until no peer reads from a tensor's memory any more: before it is freed or changed, after the wait for what it was lent for.

        Raises:
            CollectiveError: as in `Pending.wait`.
        """
        if self._board is None or (post := self._board.lent(tensor)) is None:
            return
        self.ledger.opens(post.entry, None)
        try:
            post.settle()
        except Exception as error:  # as above
            raise self.ledger.explain(post.entry, error) from error
        finally:
            self.ledger.closes()

    def all_gather(self, full: Tensor, name: str, prepare: Callable[[], None] | None = None) -> Pending:
        """Fill every rank's slice of `full` in place.

        Shapes:
            full: (N*C,) any dtype.

        Args:
            prepare: Puts this rank's slice there, on the stream of the gather; None if it is there already.

        Cost: sends (N-1)*C elements per rank.
        """
        chunk = full.numel() // self.world_size
        entry = self._enter("fetch", name, (self.world_size - 1) * chunk * full.element_size())

        def launch() -> Sequence[dist.Work]:
            if prepare is not None:
                prepare()
            if self._point_to_point:
                slices = full.split(chunk)
                return self._exchange([slices[self.rank]] * self.world_size, slices, entry)
            _all_gather(full, full.narrow(0, self.rank * chunk, chunk), group=self.group)
            return ()

        return Pending(self.ledger, self.streams, "fetch", entry, launch if chunk else _nothing, lambda: full)

    def reduce_scatter(self, full: Tensor, name: str) -> Pending:
        """Sum this rank's slice over all ranks, in rank order and in fp32; in every copy first, then between them.

        Shapes:
            full: (N*C,) floating; must not be changed before `wait()`.
            result: (C,) fp32.

        Cost: sends (N-1)*C elements of full's dtype per rank; as much scratch memory, but for fp32 on a GPU.
        """
        chunk = full.numel() // self.world_size
        entry = self._enter("reduce", name, (self.world_size - 1) * chunk * full.element_size())
        if not chunk:
            return Pending(self.ledger, self.streams, "reduce", entry, _nothing, lambda: full.new_zeros(0, dtype=torch.float32))
        if self._point_to_point:
            outgoing = full.split(chunk)
            incoming = [outgoing[rank] if rank == self.rank else full.new_empty(chunk) for rank in range(self.world_size)]

            def finish() -> Tensor:
                total = _sum_in_order(incoming)
                self.settle(full)
                return self._between(total, name)

            return Pending(self.ledger, self.streams, "reduce", entry, lambda: self._exchange(outgoing, incoming, entry), finish)
        total = full.new_empty(chunk, dtype=torch.float32)

        def launch() -> Sequence[dist.Work]:
            if full.dtype is torch.float32:
                _reduce_scatter(total, full, group=self.group)
            else:
                arrived = torch.empty_like(full)
                dist.all_to_all_single(arrived, full, group=self.group)
                total.copy_(_sum_in_order(arrived.split(chunk)))
            if self.replicas:
                dist.all_reduce(total, group=self.replicas.group)
            return ()

        return Pending(self.ledger, self.streams, "reduce", entry, launch, lambda: (full, total)[1])  # holds `full` until the compute stream has waited

    def _between(self, total: Tensor, name: str) -> Tensor:
        """Sum (C,) over the copies, in their order, in place."""
        if self.replicas and total.numel():
            part = self.replicas.reduce_scatter(total, name).wait()
            total.split(part.numel())[self.replicas.rank].copy_(part)
            self.replicas.all_gather(total, name).wait()
            self.replicas.settle(total)
        return total

    def gather_rows(self, row: Tensor, name: str) -> Tensor:
        """Every rank's row, for small things such as counts, norms and verdicts, ready for the compute stream.

        Shapes:
            row: (K,) any dtype, the same K on every rank.
            result: (N, K).
        """
        rows = row.new_empty(self.world_size, row.numel())
        rows[self.rank] = row
        self.all_gather(rows.view(-1), name).wait()
        self.settle(rows)
        return rows

    def sum_rows(self, row: Tensor, name: str, one_copy: bool = False) -> Tensor:
        """Sum of every rank's row, in rank order, in the row's dtype. Shapes as in `gather_rows`, result (K,).

        Args:
            one_copy: Only over the ranks that share this one's copy, where all copies have the same.
        """
        total, *others = self.gather_rows(row, name)
        for other in others:
            total = total + other
        return total if self.replicas is None or one_copy else self.replicas.sum_rows(total, name)

    def scatter_from_first(self, chunks: Sequence[Tensor] | None, out: Tensor, name: str) -> None:
        """Rank 0 hands every rank its chunk, ready for the compute stream.

        Shapes:
            chunks: N tensors of (C,) on rank 0, None elsewhere.
            out: (C,), filled.
        """
        entry = self._enter("scatter", name, 0 if self.rank else (self.world_size - 1) * out.numel() * out.element_size())
        tag = _tag(entry)

        def launch() -> Sequence[dist.Work]:
            if self.rank == 0:
                out.copy_(chunks[0])
            if not out.numel():
                return ()
            if self.rank == 0:
                return [dist.isend(chunks[peer], group=self.group, group_dst=peer, tag=tag) for peer in self.peers]
            return [dist.irecv(out, group=self.group, group_src=0, tag=tag)]

        Pending(self.ledger, self.streams, "fetch", entry, launch, lambda: (chunks, out)[1]).wait()
        if self.replicas:
            self.replicas.scatter_from_first([out] * self.replicas.world_size, out, name)

    def copy_out(self, work: Callable[[], tuple], *sources: Tensor | None) -> Launched:
        """Launch a copy from the device to the host on a stream of its own. `sources` are held until the next one, or `copied_out`, has waited for it."""
        self.copied_out()
        launched = self.streams.run("offload", work)
        self._copying = (launched, sources)
        return launched

    def copied_out(self) -> None:
        """Have the compute stream wait for the last copy to the host."""
        if self._copying is not None:
            self._copying[0].join()
            self._copying = None

    def _exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], entry: str) -> Sequence[dist.Work | Post]:
        if self._board is not None:
            return [self._board.exchange(outgoing, incoming, entry)]
        tag = _tag(entry)
        works = [dist.irecv(incoming[peer], group=self.group, group_src=peer, tag=tag) for peer in self.peers]
        return works + [dist.isend(outgoing[peer], group=self.group, group_dst=peer, tag=tag) for peer in self.peers]

    def _meet(self) -> Board | None:
        def share(numbers: list[int]) -> list[list[int]]:
            return self.gather_rows(torch.tensor(numbers), "board").tolist()

        backend = (self.group or dist.distributed_c10d._get_default_group())._get_backend(self.device)
        return Board.meet(self.rank, self.world_size, backend.options._timeout.total_seconds(), share)

    def _enter(self, kind: str, name: str, sent_bytes: int) -> str:
        self.bytes_sent[kind] += sent_bytes
        return self.ledger.enter(kind, name)


def _tag(entry: str) -> int:
    return zlib.crc32(entry.encode()) % _ABORT_TAG


def _nothing() -> Sequence[dist.Work]:
    return ()


def _abort(group: dist.ProcessGroup | None) -> None:
    (group or dist.distributed_c10d._get_default_group()).abort()


def _abort_gloo(group: dist.ProcessGroup | None) -> None:
    """gloo has no abort, but a receive that times out closes the connections, which ends every wait on them at both ends."""
    for peer in range(dist.get_world_size(group)):
        if peer != dist.get_rank(group):
            try:
                dist.irecv(torch.empty(1), group=group, group_src=peer, tag=_ABORT_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError:
                pass


def _sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    first, *others = parts
    if not others:
        return first.to(torch.float32, copy=True)
    total = torch.add(first.float(), others[0])  # one pass where a copy and a sum in place are two; half dtypes are promoted
    for part in others[1:]:
        total += part
    return total
