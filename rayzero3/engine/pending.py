"""Pending: a collective that was launched and not yet waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from rayzero3.engine.board import Post
from rayzero3.engine.ledger import Ledger
from rayzero3.engine.streams import CudaStreams, HostStreams


class Pending:
    """A collective in flight. `wait()` may be called more than once; only the first call does something.

    Args:
        side: Name of the stream to launch it on.
        entry: Its entry in the ledger.
        launch: Launches it and returns the works in flight.
        finish: Makes the result, on the compute stream, after the works. It holds what the collective reads and writes.

    Raises:
        CollectiveError: it can't be launched.
    """

    def __init__(
        self,
        ledger: Ledger,
        streams: HostStreams | CudaStreams,
        side: str,
        entry: str,
        launch: Callable[[], Sequence[dist.Work | Post]],
        finish: Callable[[], Tensor],
    ) -> None:
        self._ledger, self._entry, self._finish = ledger, entry, finish
        self._result: Tensor | None = None
        try:
            self._launched = streams.run(side, launch)
        except Exception as error:  # what torch raises here depends on the backend
            raise self._ledger.explain(entry, error) from error
        if self._launched.done is not None:
            self._ledger.opens(entry, self._launched.done)

    def wait(self) -> Tensor:
        """Order what follows on the compute stream after the collective. Returns what it produced.

        On a CPU the host is the compute stream, so it blocks; on a GPU the host never waits.

        Raises:
            CollectiveError: it failed or timed out, or the ranks are at different collectives.
        """
        if self._finish is not None:
            try:
                self._join()
                self._result = self._finish()
            except Exception as error:  # as above
                raise self._ledger.explain(self._entry, error) from error
            self._finish = None
        return self._result

    def _join(self) -> None:
        if self._launched.done is not None:
            self._launched.join()
            return
        self._ledger.opens(self._entry, None)
        try:
            self._launched.join()
        finally:
            self._ledger.closes()
