"""Text: prompts to continuations, with a sharded model. Each prompt is continued by one rank; what is drawn depends on no other prompt and not on N."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from tokenizers import Tokenizer

from rayzero3.data.tokenizer import encode
from rayzero3.engine import generator_for
from rayzero3.errors import ConfigError
from rayzero3.models.generate import Sampling, generate
from rayzero3.train.trainee import Trainee


def tokens_of(tokenizer: Tokenizer, prompts: Sequence[str]) -> list[list[int]]:
    """The tokens of each prompt. Raises ConfigError if one has none."""
    ids = [encode(tokenizer, prompt) for prompt in prompts]
    if empty := [index for index, tokens in enumerate(ids) if not tokens]:
        raise ConfigError(f"prompt {empty[0] + 1}", repr(prompts[empty[0]]), "it has no tokens to go on from", "Write at least a word.")
    return ids


def continue_texts(
    trainee: Trainee, tokenizer: Tokenizer, prompts: Sequence[str], sampling: Sampling, seed: int, device: torch.device
) -> list[str]:
    """What follows each prompt, on every rank. Every rank calls it together, and continues every N-th prompt.

    Raises:
        ConfigError: a prompt has no tokens.
    """
    comm = trainee.model.comm
    own = list(range(len(prompts)))[comm.total_rank :: comm.total_size]
    ids = tokens_of(tokenizer, prompts)

    def all_done(done: bool) -> bool:
        return not comm.sum_rows(torch.tensor([not done], dtype=torch.int64, device=device), "texts that go on").item()

    generators = [generator_for(seed, f"prompt {index}") for index in own]
    trainee.model.eval()
    texts = generate(trainee, [ids[index] for index in own], sampling, generators, device, all_done)
    found = torch.zeros((len(prompts), 1 + sampling.max_tokens), dtype=torch.int64, device=device)
    for index, tokens in zip(own, texts, strict=True):
        found[index, 0] = len(tokens)
        found[index, 1 : 1 + len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
    return [tokenizer.decode(row[1 : 1 + row[0]]) for row in comm.sum_rows(found.view(-1), "texts").view_as(found).tolist()]


def with_ends(sampling: Sampling, *ends: int | None) -> Sampling:
    """The same, ending at these tokens too."""
    return replace(sampling, ends=sampling.ends | {end for end in ends if end is not None})
