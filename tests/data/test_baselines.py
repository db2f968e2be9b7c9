"""The unigram and the bigram are those of the definition, counted by hand."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayzero3.data.baselines import ngram_losses
from rayzero3.data.manifest import Manifest, RowGroup, Shard
from rayzero3.data.reader import WindowReader


def test_a_pair_never_seen_is_not_impossible(shards, tmp_path):
    """Documents of one repeated pair: no pair comes once, and validation has pairs that training has not."""
    kept = Manifest.load(shards)
    splits = {}
    for split, document in (("train", [1, 2, 0]), ("validation", [2, 1, 0])):
        column = pa.array([document] * 20, pa.list_(pa.uint16()))
        pq.write_table(pa.table({"tokens": column, "length": pa.array([3] * 20)}), tmp_path / f"{split}-00000.parquet")
        splits[split] = (Shard(f"{split}-00000.parquet", (RowGroup(20, 60),)),)
    replace(kept, splits=splits).write(tmp_path)
    assert all(math.isfinite(loss) for loss in ngram_losses(tmp_path, 3, 5))


def test_both_losses_equal_a_count_by_hand(shards):
    manifest = Manifest.load(shards)
    training = [t for shard in manifest.splits["train"] for row in pq.read_table(shards / shard.file).column("tokens") for t in row.as_py()]
    singles, pairs, total = Counter(training), Counter(zip(training[:-1], training[1:], strict=True)), Counter(training[:-1])
    followers = Counter(pair[0] for pair in pairs)
    counts = Counter(pairs.values())
    discount = counts[1] / (counts[1] + 2 * counts[2])

    def unigram(token):
        return (singles[token] + 1) / (len(training) + manifest.vocab_size)

    def bigram(before, token):
        if not total[before]:
            return unigram(token)
        return max(pairs[before, token] - discount, 0) / total[before] + discount * followers[before] / total[before] * unigram(token)

    for before in (training[0], training[100]):
        assert math.isclose(sum(bigram(before, token) for token in range(manifest.vocab_size)), 1.0, rel_tol=1e-9)
    windows = WindowReader(shards, "validation", 32).read(np.arange(7)).tolist()
    wanted = [(before, token) for window in windows for before, token in zip(window[:-1], window[1:], strict=True)]
    one, two = ngram_losses(shards, 32, 7)
    assert one == pytest.approx(-sum(math.log(unigram(token)) for _, token in wanted) / len(wanted), rel=1e-9)
    assert two == pytest.approx(-sum(math.log(bigram(*pair)) for pair in wanted) / len(wanted), rel=1e-9)
    assert two < one < math.log(manifest.vocab_size)
