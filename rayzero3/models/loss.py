"""Loss: cross-entropy over a large vocabulary, in pieces, so that the logits are never there all at once.

Letters: n = tokens (B*T), D = width, V = vocabulary.

For one token with logits z and label y: log sum exp(z) - z_y is the cross-entropy, with label smoothing e the label's part is
(1-e) z_y + e mean(z), and the z-loss adds c (log sum exp(z))^2. The gradient is softmax(z) (1 + 2 c log sum exp(z)) - e/V - (1-e) at y.

Sources: de Brebisson and Vincent 2016, The Z-loss, arXiv:1604.08859; Szegedy et al. 2016, arXiv:1512.00567, section 7 (smoothing);
Wijmans et al. 2024, Cut Your Losses, arXiv:2411.09009, section 4 (why pieces).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rayzero3.config import LossSection

MASKED = -100
"""Label of a token that does not count."""

_PIECE_NUMEL = 2**24
"""Logits of a piece, which one product of matrices makes: 64 MiB in fp32."""

_BLOCK_NUMEL = 2**18
"""Logits of a block for each thread of a CPU: 1 MiB in fp32, which stays in its cache from pass to pass. On a GPU a block is a piece."""


def head_loss(hidden: Tensor, weight: Tensor, labels: Tensor, loss: LossSection = LossSection(), factor: Tensor | None = None) -> Tensor:
    """Cross-entropy of the readout, summed over the valid tokens, () fp32, in nats.

    Args:
        loss: z-loss and label smoothing; they count in what is returned.
        factor: () the gradient that the result will get, as far as it is known: the gradients are computed in forward and hold it, which
            keeps them in fp16's range. Any other gradient is right too.

    Shapes:
        hidden: (n, D) compute dtype. weight: (V, D) compute dtype. labels: (n,) int64.

    Cost: 2**24 logits in compute dtype at a time, which become their gradient in place, and a block of them in fp32; and from forward to
    backward the gradients of both arguments, which backward would make anyway. No logit is computed twice.
    """
    return _HeadLoss.apply(hidden, weight, labels, loss, hidden.new_ones((), dtype=torch.float32) if factor is None else factor.float())


def logits_loss(logits: Tensor, labels: Tensor, loss: LossSection = LossSection()) -> Tensor:
    """As `head_loss`, of logits (n, V) that somebody else computed; only their fp32 copies come in blocks."""
    return _LogitsLoss.apply(logits, labels, loss)


def _pieces(tokens: int, vocabulary: int, numel: int) -> Iterator[slice]:
    size = max(1, numel // vocabulary)
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens))


def _loss(logits: Tensor, labels: Tensor, loss: LossSection, grad: Tensor | None = None, factor: Tensor | None = None) -> Tensor:
    """Loss of some tokens, () fp32, block by block.

    Args:
        grad: (n, V), gets the gradient of `logits` (n, V), times `factor`; it may be `logits` itself.
    """
    numel = min(_PIECE_NUMEL, _BLOCK_NUMEL * torch.get_num_threads()) if logits.device.type == "cpu" else _PIECE_NUMEL
    in_place = grad is logits and logits.dtype is torch.float32
    total = torch.zeros((), device=logits.device)
    for rows in _pieces(*logits.shape, numel):
        block = logits[rows].to(torch.float32, copy=not in_place)
        total += _block_loss(block, labels[rows], loss, factor, grad is not None)
        if grad is not None and not in_place:
            grad[rows] = block
    return total


def _block_loss(logits: Tensor, labels: Tensor, loss: LossSection, factor: Tensor | None, with_grad: bool) -> Tensor:
    """Loss of some tokens, () fp32. Their logits, (n, V) fp32, become its gradient times `factor` in place."""
    vocabulary, valid = logits.shape[1], labels != MASKED
    targets = labels.clamp(min=0)[:, None]
    said = logits.gather(1, targets)[:, 0]
    if loss.label_smoothing:
        said = said * (1 - loss.label_smoothing) + logits.mean(dim=1) * loss.label_smoothing
    largest = logits.amax(dim=1)
    sums = logits.sub_(largest[:, None]).exp_().sum(dim=1)
    top = sums.log() + largest
    total = top - said + loss.z_loss * top.square() if loss.z_loss else top - said
    if with_grad:
        weight = valid.float() if factor is None else valid * factor
        logits.mul_((weight * (1 + 2 * loss.z_loss * top) / sums)[:, None])
        logits.scatter_add_(1, targets, (weight * (loss.label_smoothing - 1))[:, None])
        if loss.label_smoothing:
            logits.sub_((weight * (loss.label_smoothing / vocabulary))[:, None])
    return torch.where(valid, total, 0.0).sum()


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, loss: LossSection, factor: Tensor) -> Tensor:
        wanted = ctx.needs_input_grad
        total = torch.zeros((), device=hidden.device)
        hidden_grad = torch.empty_like(hidden) if wanted[0] else None
        weight_grad = (torch.empty_like(weight) if len(hidden) else torch.zeros_like(weight)) if wanted[1] else None
        buffer = hidden.new_empty(min(len(hidden), max(1, _PIECE_NUMEL // len(weight))), len(weight))  # one for all: new pages cost as much as a pass
        for piece in _pieces(len(hidden), len(weight), _PIECE_NUMEL):
            logits = torch.mm(hidden[piece], weight.T, out=buffer[: piece.stop - piece.start])
            grad = logits if wanted[0] or wanted[1] else None
            total += _loss(logits, labels[piece], loss, grad, factor)
            if hidden_grad is not None:
                torch.mm(grad, weight, out=hidden_grad[piece])
            if weight_grad is not None:
                weight_grad.addmm_(grad.T, hidden[piece], beta=float(piece.start > 0))
        ctx.save_for_backward(hidden_grad, weight_grad, factor)
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad, factor = ctx.saved_tensors
        ratio = upstream / factor
        if ratio.device.type == "cpu" and ratio == 1:  # a pass over a gradient as large as the readout; a GPU would have to be waited for
            return hidden_grad, weight_grad, None, None, None
        return *(None if grad is None else grad.mul_(ratio) for grad in (hidden_grad, weight_grad)), None, None, None


class _LogitsLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, loss: LossSection) -> Tensor:
        ctx.save_for_backward(logits, labels)
        ctx.loss = loss
        return _loss(logits, labels, loss)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels = ctx.saved_tensors
        grad = torch.empty_like(logits)
        _loss(logits, labels, ctx.loss, grad, upstream)
        return grad, None, None
