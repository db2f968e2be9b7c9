"""The loss in pieces is the loss at once, with its gradients, and holds no more than a piece of logits in fp32."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rayzero3.config import LossSection
from rayzero3.models import loss as losses
from rayzero3.models.loss import MASKED, head_loss, logits_loss

TOKENS, WIDTH, VOCABULARY = 23, 16, 50
OPTIONS = [LossSection(), LossSection(z_loss=1e-2), LossSection(label_smoothing=0.1), LossSection(z_loss=1e-2, label_smoothing=0.2)]


def problem(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    labels[::5] = MASKED
    return hidden, weight, labels


def at_once(hidden, weight, labels, options):
    logits = (hidden @ weight.T).float()
    total = F.cross_entropy(logits, labels, ignore_index=MASKED, reduction="sum", label_smoothing=options.label_smoothing)
    return total + options.z_loss * (logits.logsumexp(dim=1).square() * (labels != MASKED)).sum()


def gradients(total, *tensors):
    return torch.autograd.grad(total * 0.37, tensors)


@pytest.mark.parametrize("piece", [1, 7 * VOCABULARY, 2**24])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_loss_and_gradients_are_those_of_all_logits_at_once(options, piece, monkeypatch):
    monkeypatch.setattr(losses, "_PIECE_NUMEL", piece)
    monkeypatch.setattr(losses, "_BLOCK_NUMEL", 3 * VOCABULARY)  # 23 tokens in pieces of 7 in blocks of 3
    hidden, weight, labels = problem()
    expected = at_once(hidden, weight, labels, options)
    wanted = gradients(expected, hidden, weight)
    for found in (head_loss(hidden, weight, labels, options), head_loss(hidden, weight, labels, options, torch.tensor(0.37))):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
        for mine, theirs in zip(gradients(found, hidden, weight), wanted, strict=True):
            assert (mine - theirs).norm() <= 1e-5 * theirs.norm()
    found = logits_loss(hidden @ weight.T, labels, options)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    for mine, theirs in zip(gradients(found, hidden, weight), wanted, strict=True):
        assert (mine - theirs).norm() <= 1e-5 * theirs.norm()


class Largest(TorchDispatchMode):
    """The most elements of any fp32 tensor that is made inside."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        made = [leaf.numel() for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.dtype is torch.float32]
        self.numel = max([self.numel, *made])
        return output


@pytest.mark.parametrize("of_logits", [False, True])
def test_never_more_than_a_piece_of_logits_is_there_in_fp32(of_logits, monkeypatch):
    monkeypatch.setattr(losses, "_PIECE_NUMEL", 4 * VOCABULARY)
    hidden, weight, labels = problem(torch.bfloat16)
    with Largest() as largest:
        (logits_loss(hidden @ weight.T, labels) if of_logits else head_loss(hidden, weight, labels)).backward()
    assert largest.numel == 4 * VOCABULARY
    monkeypatch.undo()
    with Largest() as largest:
        at_once(hidden, weight, labels, LossSection()).backward()
    assert largest.numel == TOKENS * VOCABULARY, "what the test looks at does tell"


def test_a_small_gradient_survives_fp16_where_its_scale_is_known():
    """A probability of 2e-8 is below the least that fp16 can hold; times the loss scale it is not."""
    weight = torch.tensor([[17.5], [0.0]], dtype=torch.float16, requires_grad=True)
    hidden, labels = torch.ones(1, 1, dtype=torch.float16), torch.tensor([0])
    scale = torch.tensor(2.0**12)
    (with_factor,) = torch.autograd.grad(head_loss(hidden, weight, labels, factor=scale) * scale, weight)
    (without,) = torch.autograd.grad(head_loss(hidden, weight, labels) * scale, weight)
    exact = 2.0**12 / (1 + torch.exp(torch.tensor(17.5)))
    torch.testing.assert_close(with_factor[1, 0].float(), exact, rtol=2e-3, atol=0)
    assert without[1, 0] == 0


def test_what_is_frozen_gets_no_gradient_and_no_token_is_no_loss():
    hidden, weight, labels = problem()
    frozen = weight.detach()
    (found,) = torch.autograd.grad(head_loss(hidden, frozen, labels), hidden)
    (expected,) = torch.autograd.grad(head_loss(hidden, weight, labels), hidden)
    assert torch.equal(found, expected)
    none = head_loss(hidden[:0], weight, labels[:0])
    none.backward()
    assert none == 0 and (weight.grad == 0).all()
