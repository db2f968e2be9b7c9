"""What a checkpoint is: a folder of safetensors files, one per rank, and a manifest that is written last.

    checkpoints/step-00000100.attempt-0002/
        rank-00000.safetensors ...   slices of trainable parameters and of both Adam moments, 1-D, keyed `kind/name`
        manifest.json                names, shapes, which file holds which range, hashes, position, the job

A folder without its manifest is no checkpoint. Nothing in it depends on the number of ranks that reads it. No pickle anywhere.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rayzero3.errors import CheckpointError

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
_FOLDER = re.compile(r"step-(\d+)\.attempt-(\d+)")


@dataclass(frozen=True)
class Position:
    """How far a run has come.

    Attributes:
        step: Steps done.
        samples: Samples consumed.
    """

    step: int
    samples: int


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of a flattened parameter lie in `file`."""

    file: str
    start: int
    stop: int


@dataclass(frozen=True)
class Entry:
    """One parameter: its shape, whether it trains, and then its pieces in ascending order. What is frozen is not saved and has none."""

    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint but the numbers themselves.

    Attributes:
        step: The last step that it contains.
        attempt: The start of the worker group that wrote it.
        adam_updates: Updates that Adam has made.
        samples: Samples consumed since the run's start: the position in the data.
        parameters: Full name -> Entry.
        files: File name -> {"bytes": size, "blake2b": hex digest of the content}.
        job: The job as plain values.
        source: Fingerprint of the files that the run was started from; empty where the seed alone made the model.
        scaler: Numbers of the loss scaler; empty without one.
        versions: Of the software that wrote it.
    """

    step: int
    attempt: int
    adam_updates: int
    samples: int
    parameters: dict[str, Entry]
    files: dict[str, dict[str, Any]]
    job: dict[str, Any]
    source: str = ""
    scaler: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    format: int = FORMAT_VERSION

    def write(self, folder: Path) -> None:
        """Make the folder a checkpoint, in one rename."""
        temporary = folder / (MANIFEST + ".part")
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / MANIFEST)
        sync_folder(folder)
        sync_folder(folder.parent)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a whole checkpoint. Raises CheckpointError if it is none, or a file is missing or cut short."""
        try:
            raw = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            if "tokenizer_sha256" in raw:
                raise CheckpointError(f"{folder}", "a folder of token shards", "expected a checkpoint, or the folder of a run that has one", "Give runs/NAME.")
            if raw["format"] != FORMAT_VERSION:
                raise CheckpointError(f"the format of {folder}", raw["format"], f"this version reads {FORMAT_VERSION}", "Use the version that wrote it.")
            entries = {
                name: Entry(tuple(e["shape"]), e["dtype"], e["trainable"], tuple(Piece(**piece) for piece in e["pieces"]))
                for name, e in raw.pop("parameters").items()
            }
            manifest = cls(parameters=entries, **raw)
        except FileNotFoundError:
            got = "missing" if not folder.is_dir() else "a run without a whole checkpoint" if (folder / "job.yaml").exists() else f"a folder without {MANIFEST}"
            raise CheckpointError(f"{folder}", got, "expected a checkpoint, or the folder of a run that has one", "Give runs/NAME.") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{folder} is not a checkpoint", None, f"its {MANIFEST} can't be read: {error}", "Use another checkpoint.") from None
        for name, facts in manifest.files.items():
            size = (folder / name).stat().st_size if (folder / name).exists() else "missing"
            if size != facts["bytes"]:
                raise CheckpointError(f"{folder / name}", size, f"the manifest says {facts['bytes']} bytes", "Use another checkpoint.")
        return manifest


def folder_name(step: int, attempt: int) -> str:
    """Unique to the attempt: a worker of a dead attempt that wakes up can't touch what a later one writes."""
    return f"step-{step:08d}.attempt-{attempt:04d}"


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def folders(checkpoints: Path) -> list[Path]:
    """All step folders, whole or not, oldest step first, by (step, attempt)."""
    found = [(match, path) for path in checkpoints.glob("step-*") if (match := _FOLDER.fullmatch(path.name))]
    return [path for match, path in sorted(found, key=lambda item: (int(item[0][1]), int(item[0][2])))]


def newest(checkpoints: Path) -> tuple[Path, Manifest] | None:
    """The whole checkpoint of the latest step, or None. What is not whole is passed over."""
    for folder in reversed(folders(checkpoints)):
        try:
            return folder, Manifest.read(folder)
        except CheckpointError:
            continue
    return None


def prune(checkpoints: Path, keep: int, attempt: int) -> None:
    """Delete all but the `keep` newest whole checkpoints, and the unfinished ones of earlier attempts.

    The manifest goes first, so that a deletion that is cut short leaves no half checkpoint that looks whole.
    """
    whole = [folder for folder in folders(checkpoints) if (folder / MANIFEST).exists()]
    dead = [f for f in folders(checkpoints) if not (f / MANIFEST).exists() and int(_FOLDER.fullmatch(f.name)[2]) < attempt]
    for folder in whole[:-keep] + dead:
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def digest(path: Path) -> str:
    """blake2b of a file's content, hex, 32 bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
