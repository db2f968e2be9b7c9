"""Baselines: how well counting predicts the validation tokens. A model that does not beat the bigram has learnt little.

Letters: V = vocabulary, c(v, w) = times that w followed v in training, c(v) = times that v was followed, t(v) = different followers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow.parquet as pq

from rayzero3.data.manifest import Manifest
from rayzero3.data.reader import NO_TOKEN, WindowReader

COUNTED_TOKENS = 50_000_000
"""Training tokens that are counted, at most, from the beginning of the split."""


def ngram_losses(folder: Path, sequence_length: int, samples: int | Literal["all"]) -> tuple[float, float]:
    """Mean loss in nats of a unigram and of a bigram model on what the first `samples` validation samples predict.

    The unigram adds one to every count. The bigram discounts every pair seen by d and gives what that frees to the unigram:
    p(w | v) = max(c(v, w) - d, 0) / c(v) + d * t(v) / c(v) * p(w), with d = n1 / (n1 + 2 * n2), where n1 and n2 pairs came once and twice,
    or 0.5 where none came once: nothing is impossible.

    Cost: about 20 bytes for each different pair, beside the counted tokens.

    Source: Ney, Essen & Kneser 1994, On structuring probabilistic dependences in stochastic language modelling, section 4.
    """
    manifest = Manifest.load(folder)
    training, vocabulary = _training_tokens(Path(folder), manifest), manifest.vocab_size
    reader = WindowReader(folder, "validation", sequence_length)
    windows = reader.read(reader.sample_ids(samples)).astype(np.int64)
    context, target = windows[:, :-1].ravel(), windows[:, 1:].ravel()
    context, target = context[target != NO_TOKEN], target[target != NO_TOKEN]
    unigram = (np.bincount(training, minlength=vocabulary) + 1) / (len(training) + vocabulary)

    pairs, counts = np.unique(training[:-1] * vocabulary + training[1:], return_counts=True)
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    discount = once / (once + 2 * twice) if once else 0.5
    total = np.bincount(pairs // vocabulary, weights=counts, minlength=vocabulary)
    followers = np.bincount(pairs // vocabulary, minlength=vocabulary)
    wanted = context * vocabulary + target
    place = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    seen = np.where(pairs[place] == wanted, counts[place], 0)
    divisor = np.maximum(total[context], 1)
    freed = np.where(total[context] > 0, discount * followers[context] / divisor, 1.0)
    bigram = np.maximum(seen - discount, 0) / divisor + freed * unigram[target]
    return float(-np.log(unigram[target]).mean()), float(-np.log(bigram).mean())


def _training_tokens(folder: Path, manifest: Manifest) -> np.ndarray:
    """The first tokens of the training stream, int64."""
    parts, left = [], COUNTED_TOKENS
    for shard in manifest.splits["train"]:
        if left <= 0:
            break
        tokens = pq.read_table(folder / shard.file, columns=["tokens"]).column("tokens").combine_chunks().flatten()
        parts.append(tokens.to_numpy(zero_copy_only=False)[:left].astype(np.int64))
        left -= len(parts[-1])
    return np.concatenate(parts)
