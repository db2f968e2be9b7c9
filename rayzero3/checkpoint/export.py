"""Export: a checkpoint of any number of ranks to a Hugging Face folder, tensor by tensor. No GPU, no process group, no Ray."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rayzero3.checkpoint.format import Entry, Manifest, newest
from rayzero3.checkpoint.load import read_range
from rayzero3.config import Job, parse_job
from rayzero3.config.architectures import Transformers
from rayzero3.config.huggingface import CONFIG, config_of
from rayzero3.engine import generator_for
from rayzero3.errors import CheckpointError, ConfigError
from rayzero3.models.build import initialize
from rayzero3.models.lora import ADAPTER, adapter_config, adapter_name
from rayzero3.models.start import file_name
from rayzero3.models.tensor_file import Streamed, TensorFile, write_streamed
from rayzero3.models.weights import INDEX, SINGLE, SafetensorsWeights

LARGEST_FILE_BYTES = 4 * 2**30
_NAMES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
_LONG_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja", "tokenizer.model")
ADAPTER_CONFIG, _ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path means: itself, or the newest whole one of a run. Raises CheckpointError if there is none."""
    for folder in (path, path / "checkpoints"):
        if folder.name == "checkpoints" and (found := newest(folder)) is not None:
            return found[0]
    Manifest.read(path)
    return path


def export(checkpoint: Path, out: Path, dtype: str | None = None) -> list[Path]:
    """Write a folder that transformers loads, or, of a run with LoRA, one that peft loads; its files.

    Args:
        checkpoint: A checkpoint, or the folder of a run, whose newest one it is.
        out: Made; must not hold anything yet. It appears when it is whole.
        dtype: fp32, bf16 or fp16; None: that of the folder that the run was started from, or fp32.

    Cost: a few MiB of memory, and the model's size read and written.

    Raises:
        CheckpointError: the checkpoint is not whole, or goes with frozen weights that are not there.
        ConfigError: `out` holds something; the model can't be written as a model of the hub.
    """
    folder = find_checkpoint(checkpoint)
    manifest = Manifest.read(folder)
    job = parse_job(manifest.job)
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out}", "not empty", "an export never overwrites", "Give a new folder.")
    temporary = out.with_name(out.name + ".part")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        files = {name: TensorFile(folder / name) for name in manifest.files}
        tensors = _tensors(manifest, job, files, _NAMES.get(dtype or ""))
        if job.tune.lora is not None:
            tensors = {adapter_name(name): tensor for name, tensor in tensors.items() if ADAPTER.fullmatch(name)}
            _write_adapter(temporary, tensors, job)
        else:
            _write_model(temporary, tensors, job)
        _copy_tokenizer(temporary, job)
        if out.exists():
            out.rmdir()
        os.replace(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return sorted(out.iterdir())


def _tensors(manifest: Manifest, job: Job, files: dict[str, TensorFile], dtype: str | None) -> dict[str, Streamed]:
    """Every parameter under the name that its file gives it."""
    frozen = any(not entry.trainable for entry in manifest.parameters.values())
    base = None
    if job.model.init_from is not None and (frozen or job.model.init_from.exists()) and job.tune.lora is None:
        base = SafetensorsWeights(job.model.init_from)
        if frozen and base.fingerprint() != manifest.source:
            raise CheckpointError(f"{base.path} holds other weights than the run was started from", None, None, "Put the old files back.")
    found = {}
    for name, entry in manifest.parameters.items():
        called = name if base is None else file_name(name, base)
        kept = base.dtype(called) if base is not None and called in base else "F32"
        if entry.trainable:
            read = partial(_read_trained, files, f"parameter/{name}", entry)
        elif base is not None:
            read = partial(base.read, called, entry.shape)
        else:
            read = partial(_read_initial, name, entry.shape, job.seed)
        found[called] = Streamed(entry.shape, dtype or kept, read)
    return dict(sorted(found.items()))


def _read_trained(files: dict[str, TensorFile], key: str, entry: Entry, start: int, stop: int) -> Tensor:
    part = torch.empty(stop - start)
    read_range(files, key, entry, start, part)
    return part


def _read_initial(name: str, shape: tuple[int, ...], seed: int, start: int, stop: int) -> Tensor:
    full = torch.empty(shape)
    initialize(name, full, generator_for(seed, name))
    return full.view(-1)[start:stop]


def _write_model(folder: Path, tensors: dict[str, Streamed], job: Job) -> None:
    groups: list[dict[str, Streamed]] = [{}]
    for name, tensor in tensors.items():
        if groups[-1] and sum(other.nbytes for other in groups[-1].values()) + tensor.nbytes > LARGEST_FILE_BYTES:
            groups.append({})
        groups[-1][name] = tensor
    names = [SINGLE] if len(groups) == 1 else [f"model-{index:05d}-of-{len(groups):05d}.safetensors" for index in range(1, len(groups) + 1)]
    for name, group in zip(names, groups, strict=True):
        write_streamed(folder / name, group, {"format": "pt"})
    if len(groups) > 1:
        weights = {tensor: name for name, group in zip(names, groups, strict=True) for tensor in group}
        _write_json(folder / INDEX, {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())}, "weight_map": weights})
    source = job.model.init_from
    if source is not None and (source / CONFIG).exists():
        config = json.loads((source / CONFIG).read_text(encoding="utf-8"))
    elif isinstance(job.model, Transformers):
        raise CheckpointError(f"{source / CONFIG} is gone", None, "only it says what the model is", "Put the folder back.")
    else:
        embedding = next(tensor for name, tensor in tensors.items() if name.rpartition(".")[0].endswith(("embed_in", "embed_tokens")))
        config = config_of(job.model, embedding.shape[0]) | _end_of_text(job)
    kinds = {tensor.dtype for tensor in tensors.values()}
    config["dtype"] = config["torch_dtype"] = _LONG_NAMES[kinds.pop() if len(kinds) == 1 else "F32"]
    _write_json(folder / CONFIG, config)


def _write_adapter(folder: Path, tensors: dict[str, Streamed], job: Job) -> None:
    write_streamed(folder / _ADAPTER_FILE, tensors, {"format": "pt"})
    targets = sorted({name.split(".")[-3] for name in tensors})
    _write_json(folder / ADAPTER_CONFIG, adapter_config(job.tune.lora, targets, str(job.model.init_from or "")))


def _end_of_text(job: Job) -> dict[str, int]:
    """The token that ends a document, where the data are still there to ask."""
    path = job.data.path / "manifest.json"
    return {"eos_token_id": json.loads(path.read_text(encoding="utf-8"))["eod_id"]} if path.exists() else {}


def _copy_tokenizer(folder: Path, job: Job) -> None:
    source = job.model.init_from
    for name in _TOKENIZER_FILES if source is not None else ():
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)
    own = job.data.path / "tokenizer.json"
    if not (folder / "tokenizer.json").exists() and own.exists():
        shutil.copyfile(own, folder / "tokenizer.json")
        number = _end_of_text(job).get("eos_token_id")
        vocabulary = {entry["id"]: entry["content"] for entry in json.loads(own.read_text(encoding="utf-8")).get("added_tokens", ())}
        _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": vocabulary.get(number)})


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
