"""rayzero3: a multi-node trainer for large language models, ZeRO-3 on Ray.

`rayzero3.run(job)` trains a `rayzero3.Job` on the Ray cluster that this process belongs to; `rayzero3.engine` is ZeRO-3 by itself. Both
names are loaded at their first use, so that the engine needs nothing but torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rayzero3.config import Job
    from rayzero3.train.launch import run_job as run

__all__ = ["Job", "run"]


def __getattr__(name: str) -> Any:
    if name == "Job":
        from rayzero3.config import Job

        return Job
    if name == "run":
        from rayzero3.train.launch import run_job

        return run_job
    raise AttributeError(f"module 'rayzero3' has no attribute {name!r}")
