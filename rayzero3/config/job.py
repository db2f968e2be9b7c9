"""The job file: typed models, did-you-mean, cross-checks, derived values.

A job file is YAML. Every field but `name`, `model` and `data` has a default. An unknown key, a wrong type or a value out of range is
a ConfigError that says what, got, expected, do; all the faults of a file are told at once. Nothing here imports torch or Ray.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError

from rayzero3.config import huggingface
from rayzero3.config.architectures import GptNeox, Llama, Model, Transformers
from rayzero3.config.sections import (
    CheckpointSection,
    DataSection,
    LossSection,
    TrainSection,
    TuneSection,
    ValidationSection,
    WorkersSection,
)
from rayzero3.config.values import CountOrZero, Section
from rayzero3.errors import ConfigError


class Job(Section):
    """A training job."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")] = Field(description="names the run, its folder and the job on the cluster")
    model: Model
    data: DataSection
    tune: TuneSection = TuneSection()
    train: TrainSection = TrainSection()
    loss: LossSection = LossSection()
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

        May change: steps, micro-batch, when to reduce, recompute and fetch, offloading, workers, validation, checkpoint, and where data, model folder and storage lie. The
        schedule follows the new steps.
        """
        mine, theirs = (job.model_dump(mode="json") for job in (self, older))
        free = {("train", key) for key in ("steps", "micro_batch", "reduce_every", "recompute_every", "keep_fetched_bytes", "offload")} 
        free |= {("data", "path"), ("model", "init_from"), ("model", "transformers")}
        found = [] if self.seed == older.seed else [f"seed: {older.seed} -> {self.seed}"]
        for section in ("model", "data", "tune", "train", "loss"):
            for key in mine[section].keys() | theirs[section].keys():
                was, now = (side[section].get(key) for side in (theirs, mine))
                if (section, key) not in free and was != now:
                    found.append(f"{section}.{key}: {was} -> {now}")
        return sorted(found)


_FAMILIES: dict[Any, type[Section]] = {"gpt_neox": GptNeox, "llama": Llama, "transformers": Transformers}


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
    if isinstance(raw.get("model"), dict):
        raw = raw | {"model": huggingface.complete(raw["model"])}
    try:
        job = Job.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(fault) for fault in error.errors())) from None
    _cross_check(job)
    return job.model_copy(
        update={
            "storage": job.storage.expanduser().absolute(),
            "data": _with_absolute(job.data, "path"),
            "model": _with_absolute(job.model, "transformers" if isinstance(job.model, Transformers) else "init_from"),
        }
    )


def _with_absolute(section: Section, key: str) -> Section:
    path = getattr(section, key)
    return section if path is None else section.model_copy(update={key: path.expanduser().absolute()})


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
    faults = job.model.faults() + job.tune.faults()
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
    location = fault["loc"]
    where = ".".join(str(part) for index, part in enumerate(location) if not (part in _FAMILIES and location[index - 1] == "model"))
    value, limits = fault["input"], fault.get("ctx", {})
    shown = _kind(value) if isinstance(value, (dict, type(None))) else repr(value)
    if fault["type"] == "union_tag_invalid":
        where, shown, limits = f"{where}.family", repr(limits["tag"]), {"expected": ", ".join(_FAMILIES)}
        fault = fault | {"type": "literal_error"}
    if fault["type"] == "extra_forbidden":
        siblings = _keys_at(location[:-1])
        close = difflib.get_close_matches(str(location[-1]), siblings, n=1)
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
    section: Any = Job
    for part in location:
        if part in _FAMILIES:
            section = _FAMILIES[part]
        else:
            section = section.model_fields[part].annotation
            section = next((choice for choice in get_args(section) if isinstance(choice, type) and issubclass(choice, BaseModel)), section)
    return list(section.model_fields)
