"""Save: every rank writes its chunks, rank 0 commits with the manifest once it has heard from all."""

from __future__ import annotations

import os
from pathlib import Path

import safetensors
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rayzero3.checkpoint.format import Entry, Manifest, Piece, Position, digest, folder_name, rank_file, sync_folder
from rayzero3.config import Job
from rayzero3.engine import Zero3Adam, Zero3Model
from rayzero3.errors import CheckpointError

_DIGEST_BYTES = 32


def save(checkpoints: Path, job: Job, model: Zero3Model, optimizer: Zero3Adam, position: Position, attempt: int, source: str = "") -> Path:
    """Write a checkpoint and return its folder. Every rank calls it; when it returns on any, the checkpoint is whole.

    Under hybrid sharding one copy of the model is written. Frozen parameters are not: they are what they were at the start, and are made
    anew from there.

    Args:
        source: Fingerprint of the files that the model was started from; empty where the seed alone made it.

    Cost: 12 bytes per trainable parameter over N written by each rank; nothing else is copied.

    Raises:
        CheckpointError: on every rank, if any rank could not write.
        CollectiveError: a rank did not come within the group's timeout; the error names it.
    """
    folder = checkpoints / folder_name(position.step, attempt)
    rank, comm = model.comm.rank, model.comm
    report = torch.zeros(1 + 8 + _DIGEST_BYTES, dtype=torch.uint8)
    failure: Exception | None = None
    writes = comm.total_rank == comm.rank
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if writes:
            report[1:] = torch.frombuffer(bytearray(_write(folder / rank_file(rank), _slices(model, optimizer))), dtype=torch.uint8)
    except (OSError, SafetensorError) as error:
        failure, report[0] = error, 1
    device = comm.device
    reports = comm.gather_rows(report.to(device), "checkpoint written").cpu()
    failed = reports[:, 0].int()
    if comm.replicas:
        failed = comm.replicas.sum_rows(failed.to(device), "checkpoint written").cpu()
    if failed.any():
        ranks = ", ".join(str(index) for index in failed.nonzero().flatten().tolist())
        raise CheckpointError(f"{folder} was not written by rank {ranks}", None, str(failure) if failure else None, "Free space, then submit again.") from failure
    if comm.total_rank == 0:
        _manifest(job, model, optimizer, position, attempt, source, reports).write(folder)
    comm.sum_rows(report[:1].to(device), "checkpoint committed")
    return folder


def _slices(model: Zero3Model, optimizer: Zero3Adam) -> dict[str, Tensor]:
    """`kind/name` -> this rank's part, 1-D, a view into the chunk."""
    found = {}
    for layer in model.all_layers():
        for flat in [layer.trainable] if layer.trainable is not None else []:
            sources = {"parameter": flat.chunk.data} | optimizer.tensors(flat.chunk)
            for part in flat.layout.overlaps(flat.rank):
                for kind, source in sources.items():
                    found[f"{kind}/{layer.full_name(part.name)}"] = source[part.at : part.at + part.stop - part.start]
    return found


def _write(path: Path, tensors: dict[str, Tensor]) -> bytes:
    """Write and sync a file; its size as 8 bytes and its digest."""
    save_file(tensors, path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    sync_folder(path.parent)
    return path.stat().st_size.to_bytes(8, "little") + bytes.fromhex(digest(path))


def _manifest(
    job: Job, model: Zero3Model, optimizer: Zero3Adam, position: Position, attempt: int, source: str, reports: Tensor
) -> Manifest:
    files = {}
    for rank, row in enumerate(reports):
        raw = bytes(row[1:].tolist())
        files[rank_file(rank)] = {"bytes": int.from_bytes(raw[:8], "little"), "blake2b": raw[8:].hex()}
    entries = {}
    for layer in model.all_layers():
        for flat in layer.flats:
            pieces: dict[str, list[Piece]] = {slot.name: [] for slot in flat.layout.slots}
            for rank in range(model.comm.world_size if flat.trainable else 0):
                for part in flat.layout.overlaps(rank):
                    pieces[part.name].append(Piece(rank_file(rank), part.start, part.stop))
            for slot in flat.layout.slots:
                dtype = str(flat.chunk.dtype).removeprefix("torch.")
                entries[layer.full_name(slot.name)] = Entry(slot.shape, dtype, flat.trainable, tuple(pieces[slot.name]))
    return Manifest(
        step=position.step,
        attempt=attempt,
        adam_updates=optimizer.updates,
        samples=position.samples,
        parameters=entries,
        files=files,
        job=job.model_dump(mode="json"),
        source=source,
        scaler={} if optimizer.scaler is None else optimizer.scaler.numbers(),
        versions={"torch": torch.__version__, "safetensors": safetensors.__version__},
    )
