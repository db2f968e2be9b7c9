"""Export: from a checkpoint of any N to a folder that transformers loads strictly, streamed, whatever was tied or initialised."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from rayzero3.checkpoint import export as exporting
from rayzero3.checkpoint.export import export
from rayzero3.checkpoint.format import Entry, Manifest, Piece, Position, digest, rank_file
from rayzero3.checkpoint.save import save
from rayzero3.config import parse_job
from rayzero3.errors import CheckpointError, ConfigError
from rayzero3.models.build import layers_of
from rayzero3.models.context import Context
from rayzero3.train.loop import steps
from rayzero3.train.trainee import build
from tests.jobs import VOCABULARY, random_batches, small_job
from tests.models import folders
from tests.ranks import run_ranks

CPU = torch.device("cpu")
LLAMA = {"family": "llama", "layers": 2, "width": 16, "heads": 2, "key_value_heads": 1}
MODELS = {
    "neox": {"layers": 2, "width": 16, "heads": 2, "rotary_fraction": 1.0},
    "neox, tied": {"layers": 2, "width": 16, "heads": 2, "rotary_fraction": 0.5, "tie_embeddings": True, "parallel_residual": False},
    "llama": LLAMA,
    "llama, tied, biases in": LLAMA | {"tie_embeddings": True, "input_bias": True},
    "mistral's window": LLAMA | {"window": 4},
    "qwen3's norms": LLAMA | {"query_key_norm": True, "rotary_scaling": {"rope_type": "linear", "factor": 2.0}},
}


def job_of(storage, model, **changes):
    raw = small_job(storage, train={"steps": 3}).model_dump(mode="json")
    return parse_job(raw | {"model": {"vocab_size": VOCABULARY} | model} | changes)


def train(rank, world_size, job):
    trainee = build(job, VOCABULARY, rank, world_size, CPU)
    for result in steps(job, trainee, random_batches(job, 0, rank, world_size), 0, 0, CPU):
        pass
    save(job.run_folder / "checkpoints", job, trainee.model, trainee.optimizer, Position(result.step, result.samples), 1, trainee.source)
    with torch.no_grad():
        return trainee(torch.arange(VOCABULARY).view(1, -1), Context())


@pytest.mark.parametrize("model", MODELS)
def test_transformers_loads_it_strictly_and_has_the_same_logits(model, tmp_path):
    logits = run_ranks(train, 3, job_of(tmp_path, MODELS[model]))[0]
    files = export(tmp_path / "small", tmp_path / "out")
    assert {file.name for file in files} >= {"config.json", "model.safetensors"}
    torch.testing.assert_close(folders.load(tmp_path / "out")(torch.arange(VOCABULARY).view(1, -1)).logits, logits, rtol=1e-5, atol=1e-5)


def test_what_is_frozen_and_was_initialised_by_the_seed_is_exported_too(tmp_path):
    logits = run_ranks(train, 2, job_of(tmp_path, MODELS["neox"], tune={"parameters": "biases"}))[0]
    (checkpoint,) = (tmp_path / "small" / "checkpoints").iterdir()
    assert all("bias" in name for name in load_file(checkpoint / rank_file(0)))
    export(checkpoint, tmp_path / "out")
    torch.testing.assert_close(folders.load(tmp_path / "out")(torch.arange(VOCABULARY).view(1, -1)).logits, logits, rtol=1e-5, atol=1e-5)


def test_large_models_are_cut_into_files_with_an_index(tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "LARGEST_FILE_BYTES", 5000)
    logits = run_ranks(train, 2, job_of(tmp_path, MODELS["llama"]))[0]
    export(tmp_path / "small", tmp_path / "out", "bf16")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("model-*.safetensors")]
    assert len(sizes) == len(set(index["weight_map"].values())) > 3
    model = folders.load(tmp_path / "out")
    assert {value.dtype for path in (tmp_path / "out").glob("model-*") for value in load_file(path).values()} == {torch.bfloat16}
    torch.testing.assert_close(model(torch.arange(VOCABULARY).view(1, -1)).logits, logits, rtol=2e-2, atol=2e-2)


def test_an_export_never_overwrites_and_a_broken_checkpoint_is_named(tmp_path):
    run_ranks(train, 1, job_of(tmp_path, MODELS["llama"]))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").touch()
    with pytest.raises(ConfigError, match="not empty"):
        export(tmp_path / "small", tmp_path / "out")
    with pytest.raises(CheckpointError, match="is missing; expected a checkpoint"):
        export(tmp_path / "nothing", tmp_path / "new")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["precious"] and not (tmp_path / "new").exists()


def test_a_model_that_no_file_of_the_hub_can_describe_is_refused(tmp_path):
    run_ranks(train, 1, job_of(tmp_path, LLAMA | {"mlp_bias": True, "query_key_norm": True}))
    with pytest.raises(ConfigError, match="can't be exported"):
        export(tmp_path / "small", tmp_path / "out")
    assert not (tmp_path / "out").exists()


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30))
from pathlib import Path
from rayzero3.checkpoint.export import export
export(Path(sys.argv[1]), Path(sys.argv[2]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts anonymous memory on Linux alone")
def test_two_gigabytes_are_exported_by_a_process_that_may_have_one(tmp_path):
    """The matrices are of this size and the checkpoint of two ranks is real; only Adam's moments are left out, which an export never reads."""
    width, vocabulary = 2048, 130_000
    job = job_of(tmp_path, {"family": "llama", "layers": 1, "width": width, "heads": 16, "mlp_width": 256, "vocab_size": vocabulary})
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    entries, parts = {}, ({}, {})
    for prefix, module in layers_of(job.model, 0):
        for name, parameter in module.named_parameters():
            full, numel = f"{prefix}.{name}" if prefix else name, parameter.numel()
            half = numel // 3
            entries[full] = Entry(tuple(parameter.shape), "float32", True, (Piece(rank_file(0), 0, half), Piece(rank_file(1), half, numel)))
            for part, size in zip(parts, (half, numel - half), strict=True):
                part[f"parameter/{full}"] = torch.full((size,), float(len(entries)))
    for rank, part in enumerate(parts):
        save_file(part, folder / rank_file(rank))
    files = {path.name: {"bytes": path.stat().st_size, "blake2b": digest(path)} for path in sorted(folder.iterdir())}
    Manifest(1, 1, 1, 1, entries, files, job.model_dump(mode="json")).write(folder)
    assert sum(path.stat().st_size for path in folder.iterdir()) > 2**31
    done = subprocess.run([sys.executable, "-c", LIMITED, folder, tmp_path / "out"], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    values = load_file(tmp_path / "out" / "model.safetensors")
    assert all((value == index).all() for index, value in enumerate((values[name] for name in entries), 1))
    control = LIMITED.replace("export(Path", "__import__('safetensors.torch').torch.load_file(Path(sys.argv[1]) / 'rank-00001.safetensors', 'cpu')\nb = bytearray(2**30) # export(Path")
    assert subprocess.run([sys.executable, "-c", control, folder, tmp_path / "no"], capture_output=True).returncode != 0, "the limit is one"
