"""Generate: continue prompts, token by token, on every rank its own ones, all ranks in step.

Letters: B = prompts of this rank, P = tokens of the longest prompt, T = tokens of one forward, V = vocabulary.

A sharded model computes only where all ranks call it together. So every rank makes as many forwards as the one that needs the most, and a
rank without prompts continues one that nobody asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rayzero3.models.context import Cache, Context


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        max_tokens: Added to a prompt at most.
        temperature: 0: the likeliest token; else logits are divided by it.
        top_p: Only the likeliest tokens whose probabilities sum to it are drawn from.
        ends: Tokens after which a text is over.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    ends: frozenset[int] = frozenset()


@torch.no_grad()
def generate(
    forward: Callable[[Tensor, Context], Tensor],
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    generators: Sequence[torch.Generator],
    device: torch.device,
    all_done: Callable[[bool], bool] = lambda done: done,
) -> list[list[int]]:
    """Continue prompts; the tokens added to each, without the end. Every rank calls it together.

    Args:
        forward: (ids (B, T), context) -> logits (B, 1, V) of the last column.
        prompts: This rank's, any number, none of them empty.
        generators: One a prompt, on the CPU, so that what is drawn for it depends on nothing else.
        all_done: Whether all ranks say so.

    Cost: the cache, 2 x blocks x B x (P + max_tokens) x key/value channels elements of the compute dtype.
    """
    rows = [list(prompt) for prompt in prompts] or [[0]]
    longest, added = max(map(len, rows)), [[] for _ in rows]
    pads = torch.tensor([longest - len(row) for row in rows], device=device)
    cache = Cache(pads, longest + sampling.max_tokens)
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=device)
    over = [not prompts] * len(rows)
    for _ in range(sampling.max_tokens):
        logits = forward(ids, Context(cache=cache))
        cache.filled += ids.shape[1]
        chosen = _choose(logits[:, -1].float(), sampling, generators if prompts else [torch.Generator()])
        for index, token in enumerate(chosen.tolist()):
            over[index] |= token in sampling.ends
            if not over[index]:
                added[index].append(token)
        if all_done(all(over)):
            break
        ids = chosen[:, None].to(device)
    return added[: len(prompts)]


def _choose(logits: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> Tensor:
    """The next token of each row of logits (B, V): (B,) int64."""
    if sampling.temperature == 0.0:
        return logits.argmax(dim=-1)
    probabilities, order = (logits / sampling.temperature).softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    before = probabilities.cumsum(dim=-1) - probabilities
    probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)  # the likeliest one always stays
    totals = probabilities.double().cumsum(dim=-1)
    drawn = torch.stack([torch.rand((), generator=generator, dtype=torch.float64) for generator in generators]).to(logits.device)
    places = torch.searchsorted(totals, drawn[:, None] * totals[:, -1:], right=True)
    return order.gather(1, places.clamp(max=(probabilities > 0).sum(dim=-1, keepdim=True) - 1))[:, 0]
