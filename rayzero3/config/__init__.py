"""The job file: typed sections, did-you-mean, cross-checks, derived values. Nothing here imports torch or Ray."""

from rayzero3.config.architectures import Architecture, GptNeox, Llama, RotaryScaling
from rayzero3.config.job import Job, load_job, parse_job
from rayzero3.config.sections import LoraSection, LossSection, TrainSection, TuneSection

__all__ = [
    "Architecture",
    "GptNeox",
    "Job",
    "Llama",
    "LoraSection",
    "LossSection",
    "RotaryScaling",
    "TrainSection",
    "TuneSection",
    "load_job",
    "parse_job",
]
