"""What Ray Data streams is the plain reader's rows in the pure order: at any N, from any position, across an epoch's end."""

from __future__ import annotations

import gc
import json
import re
import shutil
import threading
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import torch

from rayzero3.data import stream
from rayzero3.data.manifest import MANIFEST, Manifest
from rayzero3.data.order import rank_part, sample_ids
from rayzero3.data.reader import WindowReader
from rayzero3.data.stream import training_batches, validation_batches
from rayzero3.errors import DataError
from rayzero3.models.loss import MASKED
from rayzero3.train.step import inputs_and_labels

pytestmark = pytest.mark.usefixtures("ray_cluster")
LENGTH = 64


@pytest.mark.parametrize(
    ("world_size", "position", "steps", "global_batch"),
    [(1, 0, 40, 7), (2, 0, 40, 17), (1, 300, 25, 17), (3, 35, 50, 5)],
)
def test_the_stream_is_the_reference_order(shards, world_size, position, steps, global_batch):
    reader = WindowReader(shards, "train", LENGTH)
    for rank in range(world_size):
        batches = training_batches(shards, LENGTH, 9, position, steps, global_batch, 4, rank, world_size, 1.0)
        count = 0
        for step, (ids, tokens) in enumerate(batches):
            expected = rank_part(sample_ids(9, position + step * global_batch, global_batch, reader.num_samples), rank, world_size, 4)
            assert np.array_equal(ids, expected) and np.array_equal(tokens, reader.read(expected))
            count += 1
        assert count == steps


def test_a_long_stream_is_a_chain_of_datasets_without_a_seam(shards, monkeypatch):
    monkeypatch.setattr(stream, "_SEGMENT_BLOCKS", 2)
    ids = np.concatenate([ids for ids, _ in stream.training_batches(shards, LENGTH, 9, 11, 70, 3, 3, 0, 1, 1.0)])
    assert np.array_equal(ids, sample_ids(9, 11, 210, WindowReader(shards, "train", LENGTH).num_samples))


def test_the_stream_crosses_an_epochs_end_without_losing_or_repeating(shards):
    samples = WindowReader(shards, "train", 1000).num_samples
    first = samples - 10
    ids = np.concatenate([ids[ids >= 0] for ids, _ in training_batches(shards, 1000, 1, first, 10, 4, 2, 0, 1, 1.0)])
    assert np.array_equal(ids, sample_ids(1, first, 40, samples))
    assert len(set(ids[:10])) == 10 and not set(ids[:10]) & set(sample_ids(1, 0, first, samples))


def executors():
    """Names of the threads that run datasets in this process."""
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("StreamingExecutor")}


def stored_mib():
    """MiB in the cluster's object stores."""
    from ray._private.internal_api import memory_summary

    gc.collect()
    text = memory_summary(address=ray.get_runtime_context().gcs_address, stats_only=True)
    return int(re.search(r"Plasma memory usage (\d+) MiB", text)[1])


def settled(measure):
    """The value that stays the same for a second."""
    before, now = None, measure()
    while now != before:
        time.sleep(1)
        before, now = now, measure()
    return now


def test_a_stream_that_is_left_early_stops_its_executor(shards, monkeypatch):
    """120 MiB within a bound of 16: an executor that nobody stops waits for its reader for ever."""
    monkeypatch.setattr(stream, "_AHEAD_BYTES", 2**24)
    others = executors()
    left = training_batches(shards, 1023, 9, 0, 60, 512, 512, 0, 1, 1.0)
    next(left)
    assert executors() - others, "nothing runs, so nothing could be stopped"
    left.close()
    for _ in range(60):
        if not (running := executors() - others):
            break
        time.sleep(0.5)
    assert not running


def test_a_stream_reads_ahead_within_its_bound(shards, monkeypatch):
    """Steps of 2 MiB, 120 MiB in all: unbounded, they would all wait in the object store."""
    monkeypatch.setattr(stream, "_AHEAD_BYTES", 2**24)
    before = settled(stored_mib)
    batches = training_batches(shards, 1023, 9, 0, 60, 512, 512, 0, 1, 1.0)
    next(batches)
    assert settled(stored_mib) - before < 40
    assert sum(1 for _ in batches) == 59


def replace_shards(folder):
    """Other documents of the same lengths, as if tokenized from other inputs."""
    for shard in Manifest.load(folder).splits["train"]:
        with pq.ParquetFile(folder / shard.file) as file:
            groups, schema = [file.read_row_group(index) for index in range(file.num_row_groups)], file.schema_arrow
        (folder / shard.file).unlink()
        with pq.ParquetWriter(folder / shard.file, schema) as writer:
            for group in groups:
                reverse = pa.array([row.as_py()[::-1] for row in group.column("tokens")], schema.field("tokens").type)
                writer.write_table(group.set_column(0, schema.field("tokens"), reverse))
    raw = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(raw | {"fingerprint": "another"}))


def test_shards_written_anew_in_the_same_folder_are_read_anew(shards, tmp_path):
    folder = shutil.copytree(shards, tmp_path / "shards")
    (_, old), *_ = training_batches(folder, LENGTH, 9, 0, 3, 7, 7, 0, 1, 1.0)
    replace_shards(folder)
    (ids, new), *_ = training_batches(folder, LENGTH, 9, 0, 3, 7, 7, 0, 1, 1.0)
    assert np.array_equal(new, WindowReader(folder, "train", LENGTH).read(ids)) and not np.array_equal(new, old)
    with pytest.raises(DataError, match="shards were replaced"):
        stream._reader(str(folder), "train", LENGTH, "the one before")


def test_a_damaged_shard_ends_the_stream_with_the_readers_own_error(shards, tmp_path):
    folder = shutil.copytree(shards, tmp_path / "shards")
    file = folder / Manifest.load(folder).splits["train"][0].file
    content = bytearray(file.read_bytes())
    content[200] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError, match="row group 0 of .* is damaged.*rayzero3 tokenize"):
        list(training_batches(folder, LENGTH, 9, 0, 30, 7, 4, 0, 1, 1.0))


def test_validation_is_the_same_samples_at_any_size_and_equally_many_batches(shards):
    reader = WindowReader(shards, "validation", LENGTH)
    for world_size in (1, 2, 3):
        ranks = [list(validation_batches(shards, LENGTH, 13, 4, rank, world_size)) for rank in range(world_size)]
        assert len({len(batches) for batches in ranks}) == 1
        ids = np.concatenate([ids for batches in ranks for ids, _ in batches])
        assert sorted(ids[ids >= 0]) == list(range(min(13, reader.num_samples)))
        assert all(np.array_equal(tokens, reader.read(ids)) for batches in ranks for ids, tokens in batches)


@pytest.mark.parametrize("length", [64, 1000])
def test_validation_of_all_counts_every_token_once_at_any_size(shards, length):
    tokens, last = Manifest.load(shards).tokens("validation"), WindowReader(shards, "validation", length)
    assert last.sample_ids("all")[-1] == last.num_samples, "the split does not end with a whole window"
    for world_size in (1, 2, 3):
        batches = [batch for rank in range(world_size) for batch in validation_batches(shards, length, "all", 4, rank, world_size)]
        labels = [inputs_and_labels(ids, rows, torch.device("cpu"))[1] for ids, rows in batches]
        assert sum(int((part != MASKED).sum()) for part in labels) == tokens - 1
        assert sorted(i for ids, _ in batches for i in ids if i >= 0) == list(range(last.num_samples + 1))
