"""Check: all that can be known to be wrong with a job before a worker starts. No Ray, no torch: the command line checks with it too."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rayzero3.config import Job
from rayzero3.config.sections import WorkersSection
from rayzero3.data.manifest import TOKENIZER, Manifest, check_shards
from rayzero3.errors import ClusterError, ConfigError


def check_data(job: Job) -> Manifest:
    """Compare the token shards with their manifest and with the model; the manifest.

    Raises:
        DataError: the shards are missing, or not what their manifest says.
        ConfigError: the model's vocabulary is smaller than the tokenizer's, its folder has no safetensors, or the shards are not of its tokenizer.
    """
    if job.model.init_from is not None:
        _check_weights(job.model.init_from)
    manifest = Manifest.load(job.data.path)
    check_shards(job.data.path, manifest)
    if job.model.init_from is not None:
        _check_tokenizer(job.model.init_from / TOKENIZER, job.data.path / TOKENIZER)
    if job.model.vocab_size is not None and job.model.vocab_size < manifest.vocab_size:
        do = "Raise it, or leave it out." if job.model.init_from is None else "Tokenize again with the tokenizer that belongs to the model."
        raise ConfigError("model.vocab_size", job.model.vocab_size, f"the tokenizer has {manifest.vocab_size} tokens", do)
    return manifest


def _check_weights(folder: Path) -> None:
    """The folder must hold safetensors; what is in them is compared once a process has torch."""
    if not any((folder / name).exists() for name in ("model.safetensors", "model.safetensors.index.json")):
        others = sorted(path.name for path in folder.glob("pytorch_model*"))
        got = f"it has {others[0]}, which is pickled code" if others else "expected model.safetensors, or several files and their index"
        do = "Load the model with transformers and save it with model.save_pretrained(FOLDER)." if others else "Check the path, or download the files."
        raise ConfigError(f"{folder} has no safetensors", None, got, do)


def _check_tokenizer(model: Path, data: Path) -> None:
    """Both must turn the same text into the same tokens: a model that is fine-tuned on other numbers learns nothing but noise."""
    if model.exists() and data.exists():
        mine, theirs = _vocabulary(model), _vocabulary(data)
        if mine != theirs:
            raise ConfigError(f"the tokenizer in {data.parent}", None, f"it is not that of {model.parent}", f"Tokenize again with --tokenizer {model}.")


def _vocabulary(path: Path) -> tuple:
    """What decides a text's tokens. Raises ConfigError where the file is no tokenizer.json."""
    try:
        model = json.loads(path.read_text(encoding="utf-8"))["model"]
        return model.get("vocab"), model.get("merges")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"the tokenizer {path}", "broken", "expected a tokenizer.json of the `tokenizers` library", "Put the model's own there.") from None


@dataclass(frozen=True)
class Resources:
    """What each worker takes from the cluster.

    Attributes:
        gpu: Whether a worker has a GPU.
        worker_cpus: Logical CPUs reserved for a worker, at most 1: less where the workers would leave none for the data.
        data_cpus: Logical CPUs that a worker's data tasks may take.
    """

    gpu: bool
    worker_cpus: float
    data_cpus: float

    @classmethod
    def of(cls, workers: WorkersSection, total: dict[str, float]) -> Resources:
        """Share a cluster that has `total` logical CPUs ("CPU") and GPUs ("GPU"), in use or not.

        Raises:
            ClusterError: it can't hold the workers, even with nothing else on it.
        """
        count, cpus, gpus = workers.count, total.get("CPU", 0.0), total.get("GPU", 0.0)
        gpu = workers.device == "gpu" or (workers.device == "auto" and gpus >= 1)
        kind, has = ("GPU", gpus) if gpu else ("CPU", cpus)
        if count > has:
            fewer = f"Set it to at most {has:g}, or add nodes." if has >= 1 else "Set the workers' device to cpu, or use a cluster with GPUs."
            raise ClusterError("the number of workers", count, f"each worker takes one {kind}, and the cluster has {gpus:g} GPUs and {cpus:g} CPUs", fewer)
        worker_cpus = min(1.0, cpus / (count + 1))
        return cls(gpu, worker_cpus, (cpus - count * worker_cpus) / count)
