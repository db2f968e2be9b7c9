"""Peak memory of the loss over a large vocabulary: all logits at once against ours, each in a process of its own.

Letters: n = tokens, D = width, V = vocabulary.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.memory import map_large_blocks, reset_peak, status_bytes
from rayzero3.models.loss import head_loss

TOKENS, WIDTH, VOCABULARY = 512, 512, 131072


def at_once(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Summed cross-entropy of (n, D) hidden states, a (V, D) readout and (n,) labels, over all logits in fp32."""
    return F.cross_entropy((hidden @ weight.T).float(), labels, reduction="sum")


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"at once": at_once, "ours": head_loss}


def peak_bytes(loss: str, dtype: torch.dtype, tokens: int = TOKENS, width: int = WIDTH, vocabulary: int = VOCABULARY) -> tuple[int, float]:
    """Peak RSS of forward and backward over what lay there before, the gradients of both arguments included, and the loss."""
    fork = multiprocessing.get_context("fork")
    mine, other = fork.Pipe()
    process = fork.Process(target=_measure, args=(other, loss, dtype, tokens, width, vocabulary))
    process.start()
    other.close()
    try:
        return mine.recv()
    finally:
        process.join()


def _measure(pipe: Connection, loss: str, dtype: torch.dtype, tokens: int, width: int, vocabulary: int) -> None:
    map_large_blocks()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator).mul_(0.02).to(dtype).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), generator=generator)
    LOSSES[loss](hidden[:2], weight[:8], labels[:2] % 8).backward()  # loads the code; its gradients are dropped
    hidden.grad = weight.grad = None
    start = status_bytes("VmRSS")
    reset_peak()
    total = LOSSES[loss](hidden, weight, labels)
    total.backward()
    pipe.send((status_bytes("VmHWM") - start, total.item()))
