"""Load: at any number of ranks, each reads just the ranges that its chunks need, by mmap."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from rayzero3.checkpoint.format import Entry, Manifest, Position, digest
from rayzero3.config import Job, parse_job
from rayzero3.engine import Zero3Adam, Zero3Sequential
from rayzero3.errors import CheckpointError


def load(folder: Path, manifest: Manifest, job: Job, model: Zero3Sequential, optimizer: Zero3Adam) -> Position:
    """Fill chunks and moments from a checkpoint of any world size. Every rank calls it.

    The files' hashes are checked, each file by one rank.

    Raises:
        CheckpointError: the job changed in what a resumed run may not change; names or shapes that differ; a file that is damaged.
    """
    _check_job(folder, manifest, job)
    _check_names(folder, manifest, model)
    for name in sorted(manifest.files)[model.comm.rank :: model.comm.world_size]:
        if digest(folder / name) != manifest.files[name]["blake2b"]:
            raise CheckpointError(f"{folder / name}", "damaged", "its content is not what was written", "Delete its folder; the run goes on from the one before.")
    with ExitStack() as stack:
        files = {name: stack.enter_context(safe_open(folder / name, "pt")) for name in manifest.files}
        for layer in model.all_layers():
            for flat in layer.flats:
                targets = {"parameter": flat.chunk.data}
                if flat.trainable:
                    targets |= optimizer.empty_state(flat.chunk, manifest.adam_updates)
                for part in flat.layout.overlaps(flat.rank):
                    name = layer.full_name(part.name)
                    for kind, target in targets.items():
                        _read(files, f"{kind}/{name}", manifest.parameters[name], part.start, target[part.at : part.at + part.stop - part.start])
    if optimizer.scaler is not None:
        optimizer.scaler.restore(manifest.scaler)
    return Position(manifest.step, manifest.samples)


def _read(files: dict[str, Any], key: str, entry: Entry, start: int, out: Tensor) -> None:
    """Fill `out` with elements [start, start + len(out)) of the flattened parameter."""
    stop = start + out.numel()
    for piece in entry.pieces:
        low, high = max(start, piece.start), min(stop, piece.stop)
        if low < high:
            out[low - start : high - start].copy_(files[piece.file].get_slice(key)[low - piece.start : high - piece.start])


def _check_job(folder: Path, manifest: Manifest, job: Job) -> None:
    if differences := job.differences(parse_job(manifest.job)):
        raise CheckpointError(
            f"{folder} was written by another job",
            None,
            "a resumed run can't change " + "; ".join(differences),
            "Change it back, or give the job another name.",
        )


def _check_names(folder: Path, manifest: Manifest, model: Zero3Sequential) -> None:
    mine = {layer.full_name(slot.name): slot.shape for layer in model.all_layers() for flat in layer.flats for slot in flat.layout.slots}
    theirs = {name: entry.shape for name, entry in manifest.parameters.items()}
    wrong = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
    if wrong:
        shown = "; ".join(f"{name}: {theirs.get(name, 'absent')} in the checkpoint, {mine.get(name, 'absent')} in the model" for name in wrong[:5])
        raise CheckpointError(f"{folder} does not fit the model", None, shown, "Resume with the model that wrote it.")
