"""The job file: typed models, did-you-mean, cross-checks, derived values.

A job file is YAML. Every field but `name`, `model` and `data` has a default. An unknown key, a wrong type or a value out of range is
a ConfigError that says what, got, expected, do; all the faults of a file are told at once. Nothing here imports torch or Ray.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from rayzero3.errors import ConfigError

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_duration_s(value: object) -> object:
    """Seconds from `90`, `90s`, `30m`, `2h` or `1d`; anything else is returned for pydantic to refuse."""
    if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd])\s*", value)):
        return float(match[1]) * _SECONDS[match[2]]
    return value


def parse_size_bytes(value: object) -> object:
    """Bytes from `512MiB`, `16GiB` or a whole number; anything else is returned for pydantic to refuse."""
    if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT])iB\s*", value)):
        return round(float(match[1]) * 2 ** (10 * (1 + "KMGT".index(match[2]))))
    return value


Count = Annotated[int, Field(strict=True, ge=1)]
CountOrZero = Annotated[int, Field(strict=True, ge=0)]
Size = Annotated[int, BeforeValidator(parse_size_bytes), Field(strict=True, ge=0)]
Duration = Annotated[float, BeforeValidator(parse_duration_s), Field(gt=0)]


class Section(BaseModel):
    """A part of the job file: closed (unknown keys are refused) and frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ModelSection(Section):
    """The model, built from its numbers and initialised from the job's seed."""

    family: Literal["gpt_neox"] = Field("gpt_neox", description="architecture")
    layers: Count = Field(description="transformer blocks")
    width: Count = Field(description="hidden size d")
    heads: Count = Field(description="attention heads; divides width")
    mlp_width: Count | None = Field(None, description="hidden size of the feed-forward part; derived: 4 x width")
    vocab_size: Count | None = Field(None, description="rows of the embedding; derived: the tokenizer's vocabulary")
    rotary_fraction: float = Field(0.25, gt=0, le=1, description="part of each head that is rotated by position")
    rotary_base: float = Field(10000.0, gt=1, description="base of the rotary frequencies")
    parallel_residual: bool = Field(True, description="attention and feed-forward read the same residual")
    tie_embeddings: bool = Field(False, description="the readout is the embedding, transposed")
    layer_norm_eps: float = Field(1e-5, gt=0, description="epsilon of the layer norms")

    @property
    def head_width(self) -> int:
        """Channels of one head."""
        return self.width // self.heads

    @property
    def rotary_width(self) -> int:
        """Channels of one head that are rotated; even."""
        return int(self.head_width * self.rotary_fraction)

    @property
    def mlp(self) -> int:
        """Hidden size of the feed-forward part."""
        return self.mlp_width or 4 * self.width


class DataSection(Section):
    """The token shards that `rayzero3 tokenize` wrote, and how they are cut into samples."""

    path: Path = Field(description="folder of token shards, readable on every node")
    sequence_length: Count = Field(512, description="tokens a sample predicts; it reads one more")


class TrainSection(Section):
    """The steps: how many, how large, how fast."""

    steps: Count = Field(1000, description="steps of the run, counted from 1")
    global_batch: Count = Field(32, description="samples per step over all workers; any number is legal for any number of workers")
    micro_batch: Count = Field(8, description="samples per forward on one worker; bounds the activations, never changes the result")
    learning_rate: float = Field(6e-4, gt=0, description="peak of the schedule")
    final_learning_rate: float | None = Field(None, ge=0, description="end of the cosine; derived: a tenth of the peak")
    warmup_steps: CountOrZero | None = Field(None, description="linear warm-up; derived: a twentieth of the steps")
    weight_decay: float = Field(0.0, ge=0, description="decoupled, as in AdamW; spares norms and biases")
    adam_betas: tuple[float, float] = Field((0.9, 0.95), description="decay of Adam's two moments")
    adam_eps: float = Field(1e-8, gt=0, description="Adam's epsilon")
    clip_norm: float | None = Field(None, gt=0, description="bound of the global gradient norm; none unless given")
    compute_dtype: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="dtype of the fetched parameters and activations; chunks stay fp32; fp16 scales the loss"
    )
    reduce_every: Literal["micro_batch", "step"] = Field(
        "micro_batch", description="micro_batch: least memory; step: least traffic, for 4 bytes per trainable parameter on every worker"
    )
    recompute_every: CountOrZero = Field(0, description="every so many blocks keep only their inputs for backward and run again there; 0: none")

    offload: bool = Field(False, description="fp32 chunks and Adam's state stay in host memory and are updated there: for models that fill the GPUs")
    moment_dtype: Literal["fp32", "bf16"] = Field("fp32", description="dtype of Adam's two moments between steps; bf16 takes half the memory")
    average_decay: float | None = Field(
        None, gt=0, lt=1, description="keep an exponential moving average of the weights, 4 more bytes per parameter over N, and validate it too"
    )
    keep_fetched_bytes: Size = Field(
        0, description="memory for layers that stay whole over the micro-batches of a step (512MiB, 2GiB): less traffic"
    )

    @property
    def warmup(self) -> int:
        """Steps of linear warm-up."""
        return self.steps // 20 if self.warmup_steps is None else self.warmup_steps

    @property
    def final_rate(self) -> float:
        """Learning rate at the last step."""
        return self.learning_rate / 10 if self.final_learning_rate is None else self.final_learning_rate


class ValidationSection(Section):
    """The loss on the validation split."""

    every_steps: Count = Field(100, description="steps between two validations; one more after the last step")
    samples: Count = Field(256, description="samples at most, always the same ones")


class WorkersSection(Section):
    """The processes that train: one per GPU, or CPU processes with gloo."""

    count: Count = Field(1, description="number of workers N")
    device: Literal["auto", "cpu", "gpu"] = Field("auto", description="auto: gpu where the cluster has one, else cpu")
    shard_group: Count | None = Field(
        None, description="neighbours that share one copy of the model, such as the GPUs of a node; derived: all; full sharding where it does not divide count"
    )
    timeout_s: Duration = Field(60.0, description="a collective that takes longer has failed (60, 90s, 2m)")
    max_restarts: CountOrZero = Field(3, description="restarts from the last checkpoint before the job fails")


class CheckpointSection(Section):
    """When the run is saved."""

    every_steps: Count = Field(100, description="steps between two checkpoints; one more after the last step")
    keep: Count = Field(3, description="newest whole checkpoints that are kept")


class Job(Section):
    """A training job."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")] = Field(description="names the run, its folder and the job on the cluster")
    model: ModelSection
    data: DataSection
    train: TrainSection = TrainSection()
    validation: ValidationSection = ValidationSection()
    workers: WorkersSection = WorkersSection()
    checkpoint: CheckpointSection = CheckpointSection()
    storage: Path = Field(Path("runs"), description="folder of the runs, shared by every node")
    seed: CountOrZero = Field(0, description="of the initial weights and of the order of the samples")

    @property
    def run_folder(self) -> Path:
        """Where everything that this run writes lies."""
        return self.storage / self.name

    def to_yaml(self) -> str:
        """The job as YAML that `load_job` reads back to an equal job."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    def differences(self, older: "Job") -> list[str]:
        """What a resumed run may not change, where `older` is the job that wrote the checkpoint.

        May change: steps, micro-batch, when to reduce, recompute and fetch, offloading, workers, validation, checkpoint, and where data and storage lie. The schedule follows the new steps.
        """
        mine, theirs = (job.model_dump(mode="json") for job in (self, older))
        free = {("train", key) for key in ("steps", "micro_batch", "reduce_every", "recompute_every", "keep_fetched_bytes", "offload")} | {("data", "path")}
        found = [] if self.seed == older.seed else [f"seed: {older.seed} -> {self.seed}"]
        for section in ("model", "data", "train"):
            for key, value in mine[section].items():
                if (section, key) not in free and value != theirs[section][key]:
                    found.append(f"{section}.{key}: {theirs[section][key]} -> {value}")
        return found


def load_job(path: str | Path, overrides: tuple[str, ...] = ()) -> Job:
    """Read, override, check and complete a job file.

    Relative paths in it are taken from the current folder, as a shell would.

    Args:
        path: The YAML file.
        overrides: `section.key=value` texts, values as YAML.

    Raises:
        ConfigError: with every fault that was found, one per line.
    """
    try:
        raw = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the job file {path}", "not readable", error.strerror, "Give the path of a YAML file.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"the job file {path}", "not YAML", str(error).replace("\n", " "), "Mend the line.") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"the job file {path}", _kind(raw), "expected a mapping with name, model and data", "See jobs/quickstart.yaml.")
    for text in overrides:
        _override(raw, text)
    return parse_job(raw)


def parse_job(raw: dict[str, Any]) -> Job:
    """A checked Job from plain values. Raises ConfigError as `load_job` does."""
    try:
        job = Job.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(fault) for fault in error.errors())) from None
    _cross_check(job)
    return job.model_copy(
        update={
            "storage": job.storage.expanduser().absolute(),
            "data": job.data.model_copy(update={"path": job.data.path.expanduser().absolute()}),
        }
    )


def _override(raw: dict, text: str) -> None:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {text}", None, "expected section.key=value", "For example --set train.steps=50.")
    *parents, leaf = key.strip().split(".")
    node = raw
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f"--set {text}", None, f"{parent} is {node!r} in the job file, not a section", "Name a key of a section.")
    try:
        node[leaf] = yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(f"--set {text}", None, "the value is not YAML", "Quote it.") from None


def _cross_check(job: Job) -> None:
    model, faults = job.model, []
    if model.width % model.heads:
        fits = [h for h in range(model.heads, 0, -1) if model.width % h == 0][0]
        wider = -(-model.width // (8 * model.heads)) * 8 * model.heads
        faults.append(f"model.heads is {model.heads}; model.width {model.width} must be a multiple of it. Try heads: {fits} or width: {wider}.")
    elif model.rotary_width % 2 or not model.rotary_width:
        faults.append(
            f"model.rotary_fraction is {model.rotary_fraction}; of {model.head_width} channels a head it rotates {model.rotary_width}, "
            "which must be even and not zero. Try rotary_fraction: 1.0, or a width / heads that is a multiple of 8."
        )
    if job.train.warmup > job.train.steps:
        faults.append(f"train.warmup_steps is {job.train.warmup}; it can't exceed train.steps, {job.train.steps}. Lower it, or leave it out.")
    if job.train.final_rate > job.train.learning_rate:
        faults.append(f"train.final_learning_rate is {job.train.final_rate}; it can't exceed train.learning_rate, {job.train.learning_rate}. Lower it.")
    if job.train.moment_dtype == "bf16" and job.train.adam_betas[1] > 0.99:
        faults.append(
            f"train.adam_betas is {list(job.train.adam_betas)}; with moment_dtype bf16 the second must be at most 0.99, since smaller changes "
            "than 2**-9 are lost. Try [0.9, 0.95], or moment_dtype: fp32."
        )
    if not all(0 <= beta < 1 for beta in job.train.adam_betas):
        faults.append(f"train.adam_betas is {list(job.train.adam_betas)}; both must be at least 0 and below 1. Try [0.9, 0.95].")
    if faults:
        raise ConfigError("\n".join(faults))


def _kind(value: object) -> str:
    names = {type(None): "empty", list: "a list", dict: "a section", str: "a text", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)


def _explain(fault: dict) -> str:
    where = ".".join(str(part) for part in fault["loc"])
    value, limits = fault["input"], fault.get("ctx", {})
    shown = _kind(value) if isinstance(value, (dict, type(None))) else repr(value)
    if fault["type"] == "extra_forbidden":
        siblings = _keys_at(fault["loc"][:-1])
        close = difflib.get_close_matches(str(fault["loc"][-1]), siblings, n=1)
        hint = f"Did you mean {close[0]}?" if close else f"Known keys here: {', '.join(siblings)}."
        return f"{where} is not a key of the job file. {hint}"
    if fault["type"] == "missing":
        return f"{where} is missing; every job file needs it. Add it; jobs/quickstart.yaml shows how."
    if fault["type"] == "string_pattern_mismatch":
        return f"{where} is {shown}; it names a folder: letters, digits, '.', '_', '-', at most 63, a letter or digit first. Rename it."
    expected = {
        "literal_error": f"expected one of {limits.get('expected')}",
        "int_type": "expected a size such as 512MiB, 2GiB" if where.endswith("_bytes") else "expected a whole number",
        "bool_type": "expected true or false",
        "model_type": "expected a section of keys and values",
        "float_parsing": "expected a number, or a time such as 90s, 30m, 2h" if where.endswith("_s") else "expected a number",
    }.get(fault["type"], fault["msg"].replace("Input should be", "expected"))
    return f"{where} is {shown}; {expected}. Change it in the job file or with --set {where}=VALUE."


def _keys_at(location: tuple) -> list[str]:
    section: type[BaseModel] = Job
    for part in location:
        section = section.model_fields[part].annotation
    return list(section.model_fields)
