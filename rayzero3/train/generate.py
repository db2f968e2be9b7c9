"""Generate: what `rayzero3 generate` runs, in one process of its own or on the workers of a cluster.

`python -m rayzero3.train.generate request.yaml` is the entrypoint of a job on the cluster.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import yaml
from pydantic import Field

from rayzero3.checkpoint.export import ADAPTER_CONFIG, find_checkpoint
from rayzero3.checkpoint.format import MANIFEST, Manifest
from rayzero3.checkpoint.load import load_parameters
from rayzero3.config import Job, parse_job
from rayzero3.config.huggingface import CONFIG, read_config, section_of
from rayzero3.config.sections import WorkersSection
from rayzero3.config.values import Count, CountOrZero, Section
from rayzero3.data.tokenizer import read_tokenizer
from rayzero3.errors import CheckpointError, ClusterError, CollectiveError, ConfigError, RayZero3Error, TrainingError
from rayzero3.models.generate import Sampling
from rayzero3.models.weights import SafetensorsWeights
from rayzero3.train.text import continue_texts, tokens_of, with_ends
from rayzero3.train.trainee import build


class Request(Section):
    """What to generate, and where."""

    model: Path = Field(description="a checkpoint, the folder of a run, or a Hugging Face folder")
    prompts: tuple[str, ...] = Field(min_length=1)
    max_tokens: Count = 64
    temperature: float = Field(0.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: CountOrZero = 0
    workers: Count = 1
    device: Literal["auto", "cpu", "gpu"] = "auto"
    compute_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    storage: Path = Field(description="folder that every node can write to; used while several workers run")


def texts(request: Request, rank: int, world_size: int, device: torch.device) -> dict[int, str]:
    """All continuations, on every rank. Every rank calls it together, in a process group.

    Raises:
        CheckpointError: the path holds neither a checkpoint nor a model.
        ConfigError: there is no tokenizer, or a prompt has no tokens.
    """
    job, manifest, folder, tokenizer = _source(request)
    trainee = build(job, 0 if manifest is None else _vocabulary(manifest), rank, world_size, device)
    if manifest is not None:
        load_parameters(folder, manifest, trainee.model, trainee.source)
    sampling = Sampling(request.max_tokens, request.temperature, request.top_p)
    sampling = with_ends(sampling, *_ends(folder, job))
    return dict(enumerate(continue_texts(trainee, read_tokenizer(tokenizer), request.prompts, sampling, request.seed, device)))


def in_this_process(request: Request) -> dict[int, str]:
    """All continuations, by a process group of this process alone."""
    if request.device == "gpu" and not torch.cuda.is_available():
        raise ClusterError("--device", "gpu", "torch finds no GPU on this machine", "Leave it out, or give the --address of a cluster that has one.")
    gpu = request.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    dist.init_process_group("nccl" if gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(minutes=10))
    try:
        return texts(request, 0, 1, device)
    finally:
        dist.destroy_process_group()


def check(request: Request) -> None:
    """What can be known to be wrong before a worker starts. Raises as `texts` does."""
    job, _, _, tokenizer = _source(request)
    tokens_of(read_tokenizer(tokenizer), request.prompts)
    if job.model.init_from is not None:
        SafetensorsWeights(job.model.init_from)


def _source(request: Request) -> tuple[Job, Manifest | None, Path, Path]:
    """The job that builds the model, its checkpoint's manifest, its folder, and its tokenizer."""
    path = request.model
    if (path / CONFIG).exists():
        model = {"init_from" if _is_ours(path) else "transformers": str(path)}
        raw = {"name": "generate", "model": model, "data": {"path": str(path)}, "tune": {"parameters": ".*"}, "seed": request.seed}
        return parse_job(raw | {"train": {"compute_dtype": request.compute_dtype or "fp32"}}), None, path, path / "tokenizer.json"
    if (path / ADAPTER_CONFIG).exists():
        do = "Give the folder of the run, or merge it into its base with peft's merge_and_unload and save_pretrained."
        raise CheckpointError(f"{path}", "an adapter", "its base is not in it", do)
    if not (path / MANIFEST).exists() and not (path / "checkpoints").exists():
        got = f"it holds neither {CONFIG} nor a checkpoint" if path.is_dir() else "there is no such folder"
        raise CheckpointError(f"{path}", None, got, "Give a checkpoint, a run's folder, or an exported folder.")
    folder = find_checkpoint(path)
    manifest = Manifest.read(folder)
    job = parse_job(manifest.job)
    if request.compute_dtype is not None:
        job = job.model_copy(update={"train": job.train.model_copy(update={"compute_dtype": request.compute_dtype})})
    beside = job.model.init_from / "tokenizer.json" if job.model.init_from else job.data.path / "tokenizer.json"
    return job, manifest, folder, beside if beside.exists() else job.data.path / "tokenizer.json"


def _is_ours(folder: Path) -> bool:
    """Whether our models compute the folder's; else transformers' own does, where it can."""
    try:
        section_of(folder)
    except ConfigError:
        read_config(folder)  # what can't be read at all is told
        return False
    return True


def _vocabulary(manifest: Manifest) -> int:
    """Rows of the embedding."""
    return next((entry.shape[0] for name, entry in manifest.parameters.items() if name.rpartition(".")[0].endswith(("embed_in", "embed_tokens"))), 0)


def _ends(folder: Path, job: Job) -> list[int]:
    """Tokens that end a text: those of the model's config, and the one that ended the documents of a run."""
    ends, data = [], job.data.path / "manifest.json"
    for path in (folder, job.model.init_from):
        if path is not None and (path / CONFIG).exists() and (found := read_config(path).get("eos_token_id")) is not None:
            ends += found if isinstance(found, list) else [found]
    return ends + ([json.loads(data.read_text(encoding="utf-8"))["eod_id"]] if data.exists() else [])


def generate_worker(config: dict[str, Any]) -> None:
    """Entry point of every Ray Train worker; `config` holds the request as plain values and the actor that gathers the texts."""
    import ray
    import ray.train

    context = ray.train.get_context()
    request = Request.model_validate(config["request"])
    found = texts(request, context.get_world_rank(), context.get_world_size(), ray.train.torch.get_device())
    ray.get(config["texts"].add.remote(found))


def on_the_cluster(request: Request) -> dict[int, str]:
    """All continuations, by workers of the cluster that this process is connected to.

    Raises:
        ClusterError: the cluster can't hold the workers.
        RayZero3Error: a worker failed; its error, or what is known of it.
    """
    import ray
    from ray.train import RunConfig, ScalingConfig, TrainingFailedError, WorkerGroupError
    from ray.train.torch import TorchTrainer

    from rayzero3.train import generate as importable
    from rayzero3.train.check import Resources
    from rayzero3.train.process_group import ProcessGroup

    class Texts:
        """Gathers what the workers send."""

        def __init__(self) -> None:
            self.found: dict[int, str] = {}

        def add(self, found: dict[int, str]) -> None:
            self.found |= found

        def all(self) -> dict[int, str]:
            return self.found

    workers = WorkersSection(count=request.workers, device=request.device)
    resources = Resources.of(workers, ray.cluster_resources())
    name = f"generate-{os.getpid()}"
    gathered = ray.remote(num_cpus=0)(Texts).remote()
    trainer = TorchTrainer(
        importable.generate_worker,  # by name, since this module may run as __main__
        train_loop_config={"request": request.model_dump(mode="json"), "texts": gathered},
        torch_config=ProcessGroup(timeout_s=round(workers.timeout_s)),
        scaling_config=ScalingConfig(
            num_workers=request.workers,
            use_gpu=resources.gpu,
            resources_per_worker={"CPU": resources.worker_cpus, **({"GPU": 1} if resources.gpu else {})},
            placement_strategy="PACK" if resources.gpu else "SPREAD",
        ),
        run_config=RunConfig(name=name, storage_path=str(request.storage)),
    )
    try:
        trainer.fit()
    except WorkerGroupError as error:
        raise _explain(error.worker_failures) from None
    except TrainingFailedError as error:
        raise ClusterError("the workers did not start", None, str(error).strip().splitlines()[0], "See the job's log on the dashboard.") from None
    finally:
        shutil.rmtree(request.storage / name, ignore_errors=True)
    return ray.get(gathered.all.remote())


def _explain(failures: dict[int, Exception]) -> RayZero3Error:
    """The error that is a cause, not a consequence: one for the user where there is one, as it was raised."""
    causes = {rank: getattr(error, "cause", None) or error for rank, error in failures.items()}
    rank = min(causes, key=lambda rank: (isinstance(causes[rank], CollectiveError), not isinstance(causes[rank], RayZero3Error), rank))
    cause = causes[rank]
    if isinstance(cause, RayZero3Error):
        for kind in type(cause).__mro__:  # Ray's own subclass of it carries a traceback in its text
            if kind.__module__ == RayZero3Error.__module__:
                return kind(cause.what, cause.got, cause.expected, cause.do)
    text = str(cause).strip() or type(cause).__name__
    return TrainingError(f"worker {rank} failed", None, text.splitlines()[-1], "Try fewer prompts or tokens if memory ran out, or more workers.")


def main(path: str) -> int:
    """Run a request file on the cluster and print a line of JSON for each prompt; the exit code."""
    import logging

    import ray

    try:
        request = Request.model_validate(yaml.safe_load(Path(path).read_text(encoding="utf-8")))
        check(request)
        ray.init(log_to_driver=False, logging_level=logging.WARNING, ignore_reinit_error=True)
        for line in lines(request, on_the_cluster(request)):
            print(line, flush=True)
    except RayZero3Error as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


def lines(request: Request, found: dict[int, str]) -> list[str]:
    """One JSON object a prompt, in the order given: prompt and text."""
    if missing := sorted(set(range(len(request.prompts))) - set(found)):
        raise ConfigError(f"prompts {missing}", None, "no worker continued them", "Run it again.")
    return [json.dumps({"prompt": prompt, "text": found[index]}, ensure_ascii=False) for index, prompt in enumerate(request.prompts)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
