"""Board: how the ranks of one host exchange tensors. Each reads the others' memory: no socket, and no copy but the one that is wanted.

A rank posts where a tensor lies; its peers copy what they want of it and mark the post as read. What is posted stays as it is until every
peer has marked it: `settle` waits for that. Posts and marks stand in memory that all ranks map; it has no name in any file system, so it
goes with the last of them. Post number n stands in slot n % SLOTS of its rank, once number n - SLOTS is marked there by all.

Note: order. A post counts when its check is right, which depends on each of its words; a mark when it equals the number looked for. So
neither the order in which words are seen matters nor whether half a word is. What does matter is that a tensor is seen whole by whoever
sees its post. On the writer's side `_fence` stands between the two, on the reader's side the kernel, which releases one lock and takes
another before it copies: that orders memory on every processor.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from rayzero3.engine import neighbour
from rayzero3.engine.neighbour import Gone, Introduction, Neighbour

SLOTS = 64
_POST_WORDS, _WORD = 4, 2**64 - 1
_YIELD_S, _LONGEST_NAP_S, _LOOK_S, _FAREWELL_S = 1e-4, 1e-3, 0.2, 5.0
_never_read: list[Sequence[Tensor]] = []


class Post:
    """What this rank lends under a number, and what it reads under that number. Stands where torch has a Work."""

    def __init__(self, board: Board, number: int, entry: str, lent: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        self.number, self.entry, self.tag, self.lent, self.into = number, entry, zlib.crc32(entry.encode()), lent, into
        self.offset = lent[board.rank].data_ptr() - lent[0].data_ptr()
        self._board, self._sources, self._readers = board, list(board.peers), list(board.peers)

    def wait(self) -> None:
        """Read from every peer as soon as it has posted; what was posted earlier first, so that no peer waits for that in vain.

        Raises:
            RuntimeError: a peer is gone, at another collective, or silent; or this rank was told to abort.
        """
        for post in self._board.unread_until(self.number):
            while post._sources:
                self._board.copy(post._sources[-1], post)
                post._sources.pop()

    def settle(self) -> None:
        """Wait until every peer has read, or is gone. After `wait` only: where all ranks read first, none waits for one that waits for it."""
        while self._readers:
            self._board.wait_for_mark(self._readers[-1], self.number)
            self._readers.pop()
        self._board.forget(self)


class Board:
    """Posts and marks of all ranks.

    Args:
        timeout_s: How long a wait for a peer may take.

    Attributes:
        peers: The other ranks.
    """

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        self.rank, self.timeout_s = rank, timeout_s
        self.peers = [(rank + distance) % world_size for distance in range(1, world_size)]
        self._width = SLOTS * (_POST_WORDS + world_size)
        self._size_bytes = 8 * self._width * world_size
        self._words: memoryview | None = None
        self._pid, self._introduction = os.getpid(), Introduction()
        self._neighbours: list[Neighbour] = []
        self._count = 0
        self._slots: list[Post | None] = [None] * SLOTS
        self._unread: deque[Post] = deque()
        self._lent: dict[int, Post] = {}
        self._aborted = False
        self._lock = threading.Lock()
        self._lock.acquire()

    @classmethod
    def meet(cls, rank: int, world_size: int, timeout_s: float, share: Callable[[list[int]], list[list[int]]]) -> Board | None:
        """A board of all ranks; or None on every one of them, where they are not all on one host or may not read each other.

        Args:
            share: Gathers numbers of every rank, in rank order. Every rank calls `meet` together.
        """
        board = cls(rank, world_size, timeout_s)
        file = board._make() if rank == 0 else -1
        try:
            places, *introductions, files = zip(*share([board._introduction.place, *board._introduction.numbers, file]), strict=True)
            if len(set(places)) > 1 or files[0] < 0:
                return None
            board._neighbours = [Neighbour(f"rank {peer}", *numbers) for peer, numbers in enumerate(zip(*introductions, strict=True))]
            if all(ok for (ok,) in share([board._reach(files[0])])):
                return board
            neighbour.admit(board._neighbours[board.peers[0]].pid if world_size == 2 else neighbour.ANYBODY)
            share([0])
            if all(ok for (ok,) in share([board._reach(files[0])])):
                return board
            neighbour.admit(neighbour.NOBODY)
            return None
        finally:
            if file >= 0:
                os.close(file)

    def exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], entry: str) -> Post:
        """Lend outgoing[r] to every rank r. The work's `wait` fills incoming[r] with what rank r lends to this one.

        Args:
            outgoing: One tensor a rank, all of one size, evenly spaced in one storage, or the same one for all.
            incoming: One tensor a rank, contiguous, of that size; this rank's own is left alone.
            entry: The same text on all ranks for one exchange, another one for another.
        """
        slot = self._count % SLOTS
        if (oldest := self._slots[slot]) is not None:
            oldest.wait()
            oldest.settle()
        self._count += 1
        post = self._lent[_storage(outgoing[0])] = Post(self, self._count, entry, outgoing, incoming)
        self._slots[slot] = post
        self._unread.append(post)
        address, size, at = outgoing[0].data_ptr(), outgoing[0].nbytes, self._post_at(self.rank, post.number)
        self._fence()
        self._words[at], self._words[at + 1], self._words[at + 2] = address, size, post.tag
        self._words[at + 3] = self._check(self.rank, post.number, address, size, post.tag)
        self._read_ahead()
        return post

    def lent(self, tensor: Tensor) -> Post | None:
        """The post that lends `tensor`, or a part of it, and is not settled."""
        return self._lent.get(_storage(tensor))

    def unread_until(self, number: int) -> Iterator[Post]:
        """This rank's posts up to a number under which it has not read yet, in order."""
        while self._unread and self._unread[0].number <= number:
            yield self._unread[0]
            self._unread.popleft()

    def abort(self) -> None:
        """End every wait of this rank, from another thread."""
        self._aborted = True

    def close(self) -> None:
        """Let the peers read what they have not read yet, for some seconds. What they never read stays until this process ends."""
        self.timeout_s = min(self.timeout_s, _FAREWELL_S)
        for post in [post for post in self._slots if post is not None and os.getpid() == self._pid]:
            try:
                post.wait()
                post.settle()
            except (OSError, RuntimeError):
                self._aborted = True
                _never_read.append(post.lent)

    def copy(self, peer: int, post: Post) -> None:
        """Read what a peer lends to this rank under the number of `post`."""
        at, mine = self._post_at(peer, post.number), post.into[peer]
        self._until(lambda: self._has_posted(peer, post), peer)
        address, size, tag, _ = self._words[at : at + _POST_WORDS]
        if (size, tag) != (mine.nbytes, post.tag):
            raise RuntimeError(f"rank {peer} is at another collective, of {size} bytes where rank {self.rank} has {mine.nbytes}")
        self._neighbours[peer].read(address + post.offset, mine.data_ptr(), size)
        self._words[self._mark_at(self.rank, peer, post.number)] = post.number

    def _has_posted(self, peer: int, post: Post) -> bool:
        at = self._post_at(peer, post.number)
        address, size, tag, check = self._words[at : at + _POST_WORDS]
        return check == self._check(peer, post.number, address, size, tag)

    def _read_ahead(self) -> None:
        """Read what all peers have posted by now. They wait for this rank when they free it, which they may do long before it waits for them."""
        try:
            while self._unread and all(self._has_posted(peer, self._unread[0]) for peer in self.peers):
                self._unread[0].wait()
        except (OSError, RuntimeError):
            pass  # its own wait will tell

    def wait_for_mark(self, peer: int, number: int) -> None:
        """Wait until a peer has read this rank's post of that number, or is gone."""
        at = self._mark_at(peer, self.rank, number)
        try:
            self._until(lambda: self._words[at] == number, peer)
        except Gone:
            pass

    def forget(self, post: Post) -> None:
        """Lend no more what everybody has read."""
        self._slots[(post.number - 1) % SLOTS] = None
        self._lent.pop(_storage(post.lent[0]), None)

    def _until(self, condition: Callable[[], bool], peer: int) -> None:
        """Wait for a peer: give the core away at first, then sleep, a sixteenth of the time waited; see now and then whether it lives."""
        if condition():
            return
        start = looked = time.monotonic()
        while not condition():
            now = time.monotonic()
            if self._aborted:
                raise RuntimeError(f"stopped waiting for rank {peer}")
            if now - start > self.timeout_s:
                raise RuntimeError(f"rank {peer} did not answer in {self.timeout_s:g} s")
            if now - looked > _LOOK_S:
                self._neighbours[peer].look()
                looked = now
            if now - start < _YIELD_S:
                os.sched_yield()
            else:
                time.sleep(min((now - start) / 16, _LONGEST_NAP_S))

    def _make(self) -> int:
        """The memory of the board, as a file without a name; -1 where the system has none."""
        try:
            file = os.memfd_create("rayzero3")
            os.truncate(file, self._size_bytes)
            return file
        except (OSError, AttributeError):
            return -1

    def _reach(self, file: int) -> bool:
        """Map the board, which rank 0 has open under that number, and see whether every peer can be read."""
        try:
            if self._words is None:
                with open(f"/proc/{self._neighbours[0].pid}/fd/{file}", "r+b") as shared:
                    self._words = memoryview(mmap.mmap(shared.fileno(), self._size_bytes)).cast("Q")
            for peer in self.peers:
                self._neighbours[peer].look()
        except (OSError, Gone):
            return False
        return True

    def _check(self, rank: int, *words: int) -> int:
        return hash((self._neighbours[rank].word, *words)) & _WORD

    def _post_at(self, rank: int, number: int) -> int:
        return rank * self._width + (number - 1) % SLOTS * _POST_WORDS

    def _mark_at(self, reader: int, rank: int, number: int) -> int:
        return reader * self._width + SLOTS * (_POST_WORDS + rank) + (number - 1) % SLOTS

    def _fence(self) -> None:
        """What was written before is seen before what is written after: a release, then an acquire, of one lock."""
        self._lock.release()
        self._lock.acquire()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
