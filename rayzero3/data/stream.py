"""Stream: a worker's samples, step after step, through Ray Data.

Letters: S = sequence length, R = rows of one rank's part of a step.

Note: where the order comes from. Ray Data promises no order across splits and keeps no position. So each worker builds a dataset of its
own remaining steps, one row for some steps, and a task turns them into this rank's rows by the pure functions of rayzero3.data.order.
With preserve_order the batches come back as the steps went in, wherever the tasks ran and whenever they ended. Nothing is read but in
these tasks, so what they reserve is all that is reserved: less than one CPU each where the workers leave no more.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import ray.data

from rayzero3.data.manifest import Manifest
from rayzero3.data.order import rank_part, sample_ids
from rayzero3.data.reader import WindowReader
from rayzero3.errors import DataError

_BLOCK_BYTES, _BLOCK_STEPS = 2**23, 16
"""A task makes at most so many bytes, or steps."""

_AHEAD_BYTES = 2**28
"""Samples that wait in the object store for one rank, about. Without a bound each rank's stream would fill half of the store."""

_SEGMENT_BLOCKS = 256
"""Tasks of one dataset. Ray Data plans all of a dataset's tasks before the first runs, so a long run is a chain of datasets."""


def training_batches(
    folder: Path,
    sequence_length: int,
    seed: int,
    position: int,
    steps: int,
    global_batch: int,
    micro_batch: int,
    rank: int,
    world_size: int,
    cpus: float,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """This rank's part of each of the next `steps` steps.

    Args:
        position: Samples that the run has consumed.
        cpus: Logical CPUs that the tasks may take together.

    Yields:
        ids: (R,) int64, -1 for rows of padding.
        tokens: (R, S+1) int32.

    Raises:
        DataError: at the step that a task could not read: the shards are damaged, or were replaced.
    """
    fingerprint = Manifest.load(folder).fingerprint
    num_samples = _reader(str(folder), "train", sequence_length, fingerprint).num_samples
    rows = len(rank_part(np.arange(global_batch), rank, world_size, micro_batch))
    block_steps = max(1, min(_BLOCK_STEPS, _BLOCK_BYTES // (rows * (sequence_length + 1) * 4)))
    context = _context(cpus)

    for start in range(0, steps, _SEGMENT_BLOCKS * block_steps):
        count = min(steps - start, _SEGMENT_BLOCKS * block_steps)
        origin = position + start * global_batch

        def load(block: dict[str, np.ndarray], origin: int = origin) -> pa.Table:
            (begin,), (end,) = block["begin"], block["end"]
            firsts = [origin + step * global_batch for step in range(int(begin), int(end))]
            ids = np.concatenate([rank_part(sample_ids(seed, first, global_batch, num_samples), rank, world_size, micro_batch) for first in firsts])
            try:
                samples, fault = _reader(str(folder), "train", sequence_length, fingerprint).read(ids), None
            except DataError as error:  # travels as a value: of what a task raises, Ray Data keeps only the text
                samples, fault = np.zeros((len(ids), sequence_length + 1), dtype=np.int32), json.dumps(error.args, default=str)
            tokens = pa.FixedSizeListArray.from_arrays(pa.array(samples.reshape(-1)), sequence_length + 1)
            return pa.table({"ids": ids, "tokens": tokens, "fault": pa.array([fault] * len(ids), pa.string())})

        with ray.data.DataContext.current(context):
            blocks = [{"begin": begin, "end": min(count, begin + block_steps)} for begin in range(0, count, block_steps)]
            dataset = ray.data.from_items(blocks, override_num_blocks=len(blocks)).map_batches(load, batch_size=None, num_cpus=min(1.0, cpus))
        for batch in dataset.iterator().iter_batches(batch_size=rows, batch_format="pyarrow", prefetch_batches=2):
            if fault := batch.column("fault")[0].as_py():
                raise DataError(*json.loads(fault))
            tokens = batch.column("tokens").combine_chunks()
            tokens = tokens.flatten() if isinstance(tokens, pa.Array) else tokens.chunk(0).flatten()
            yield batch.column("ids").to_numpy(), tokens.to_numpy().reshape(rows, sequence_length + 1)


def validation_batches(
    folder: Path, sequence_length: int, samples: int | Literal["all"], micro_batch: int, rank: int, world_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """This rank's micro-batches of the first `samples` validation samples, or of every token: the same at any N, equally many batches on every rank."""
    reader = _reader(str(folder), "validation", sequence_length, Manifest.load(folder).fingerprint)
    ids = rank_part(reader.sample_ids(samples), rank, world_size, micro_batch)
    for start in range(0, len(ids), micro_batch):
        part = ids[start : start + micro_batch]
        yield part, reader.read(part)


def _context(cpus: float) -> ray.data.DataContext:
    """Settings of our datasets: in order, within `cpus` and _AHEAD_BYTES, quiet."""
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    context.execution_options.resource_limits = context.execution_options.resource_limits.copy(cpu=cpus, object_store_memory=_AHEAD_BYTES)
    return context


@lru_cache(maxsize=4)
def _reader(folder: str, split: str, sequence_length: int, fingerprint: str) -> WindowReader:
    """One reader a process, so that decoded row groups serve many tasks; shards written anew in the same folder are read anew."""
    reader = WindowReader(Path(folder), split, sequence_length)
    if reader.fingerprint != fingerprint:
        replaced = "its shards were replaced while they were being read"
        raise DataError(f"the data folder {folder}", "another one", replaced, "Start the run again.")
    return reader
