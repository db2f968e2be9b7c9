"""Load: at any number of ranks, each reads just the ranges that its chunks need, by mmap."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from rayzero3.checkpoint.format import Entry, Manifest, Position, digest
from rayzero3.config import Job, parse_job
from rayzero3.engine import Zero3Adam, Zero3Model
from rayzero3.engine.flat import FlatParameter
from rayzero3.errors import CheckpointError
from rayzero3.models.tensor_file import TensorFile


def load(folder: Path, manifest: Manifest, job: Job, model: Zero3Model, optimizer: Zero3Adam, source: str = "") -> Position:
    """Fill trainable chunks and moments from a checkpoint of any world size. Every rank calls it. Frozen parameters stay what they are.

    Args:
        source: As in `save`; it must be that of the checkpoint where there are frozen parameters.

    The files' hashes are checked, each file by one rank.

    Raises:
        CheckpointError: the job changed in what a resumed run may not change; names or shapes that differ; a file that is damaged.
    """
    _check_job(folder, manifest, job)
    _fill(folder, manifest, model, source, lambda flat: {"parameter": flat.chunk.data} | optimizer.empty_state(flat.chunk, manifest.adam_updates))
    if optimizer.scaler is not None:
        optimizer.scaler.restore(manifest.scaler)
    return Position(manifest.step, manifest.samples)


def load_parameters(folder: Path, manifest: Manifest, model: Zero3Model, source: str = "") -> None:
    """Fill trainable chunks alone, for who does not train. As `load` otherwise."""
    _fill(folder, manifest, model, source, lambda flat: {"parameter": flat.chunk.data})


def _fill(folder: Path, manifest: Manifest, model: Zero3Model, source: str, targets: Callable[[FlatParameter], dict[str, Tensor]]) -> None:
    _check_names(folder, manifest, model)
    if manifest.source != source and not all(entry.trainable for entry in manifest.parameters.values()):
        moved = "the folder in model.init_from holds other files than at the start"
        raise CheckpointError(f"{folder} goes with frozen weights that are not there", None, moved, "Give the folder that the run was started from.")
    for name in sorted(manifest.files)[model.comm.rank :: model.comm.world_size]:
        if digest(folder / name) != manifest.files[name]["blake2b"]:
            raise CheckpointError(f"{folder / name}", "damaged", "its content is not what was written", "Delete its folder; the run goes on from the one before.")
    files = {name: TensorFile(folder / name) for name in manifest.files}
    for layer in [layer for layer in model.all_layers() if layer.trainable is not None]:
        flat = layer.trainable
        for kind, target in targets(flat).items():
            for part in flat.layout.overlaps(flat.rank):
                name = layer.full_name(part.name)
                read_range(files, f"{kind}/{name}", manifest.parameters[name], part.start, target[part.at : part.at + part.stop - part.start])


def read_range(files: dict[str, TensorFile], key: str, entry: Entry, start: int, out: Tensor) -> None:
    """Fill `out` with elements [start, start + len(out)) of the flattened parameter."""
    stop = start + out.numel()
    for piece in entry.pieces:
        low, high = max(start, piece.start), min(stop, piece.stop)
        if low < high:
            out[low - start : high - start].copy_(files[piece.file].read(key, low - piece.start, high - piece.start))


def _check_job(folder: Path, manifest: Manifest, job: Job) -> None:
    if differences := job.differences(parse_job(manifest.job)):
        raise CheckpointError(
            f"{folder} was written by another job",
            None,
            "a resumed run can't change " + "; ".join(differences),
            "Change it back, or give the job another name.",
        )


def _check_names(folder: Path, manifest: Manifest, model: Zero3Model) -> None:
    mine = {layer.full_name(slot.name): slot.shape for layer in model.all_layers() for flat in layer.flats for slot in flat.layout.slots}
    theirs = {name: entry.shape for name, entry in manifest.parameters.items()}
    wrong = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
    if wrong:
        shown = "; ".join(f"{name}: {theirs.get(name, 'absent')} in the checkpoint, {mine.get(name, 'absent')} in the model" for name in wrong[:5])
        raise CheckpointError(f"{folder} does not fit the model", None, shown, "Resume with the model that wrote it.")
