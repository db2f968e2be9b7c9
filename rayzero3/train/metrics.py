"""Metrics: what the run tells about its steps. Rank 0 writes metrics.jsonl; every rank writes which samples it consumed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from rayzero3.engine import LossScaler
from rayzero3.errors import TrainingError
from rayzero3.train.loop import StepResult
from rayzero3.train.run import Run, append_line

Gauges = Callable[[int, float, float], None]
"""`gauges(step, loss, tokens_per_s)` publishes this rank's view of a step."""


class Metrics:
    """Log step results, each one step late, so that the host reads a loss only when the next step is under way.

    Args:
        run: The run's folder.
        rank: Of this process; rank 0 writes the metrics.
        attempt: Of this start.
        tokens_per_sample: Valid tokens of one sample.
        global_batch: Samples of a step, over all ranks.
        gauges: Publishes to the cluster's metrics endpoint.
        scaler: The loss scaler, if there is one; it may skip steps.
        layers: Names of the trainable layers.
        flops_per_sample: Of a sample in a step.
        peak_flops: FLOP/s of all workers together; None where it is not known.
    """

    def __init__(
        self,
        run: Run,
        rank: int,
        attempt: int,
        tokens_per_sample: int,
        global_batch: int,
        gauges: Gauges,
        scaler: LossScaler | None = None,
        layers: Sequence[str] = (),
        flops_per_sample: int = 0,
        peak_flops: float | None = None,
    ) -> None:
        self._samples_for_peak = None if peak_flops is None else peak_flops / flops_per_sample
        self._scaler, self._layers = scaler, layers
        self._run, self._rank, self._attempt, self._gauges = run, rank, attempt, gauges
        self._tokens_per_sample, self._tokens_per_step = tokens_per_sample, tokens_per_sample * global_batch
        self._waiting: StepResult | None = None
        self._samples_file = run.rank_folder(rank) / "samples.jsonl"

    def log(self, result: StepResult) -> bool:
        """Take a result; write the one before it. Returns what `flush` does."""
        stop = self.flush()
        self._waiting = result
        return stop

    def flush(self) -> bool:
        """Write what waits. Returns whether a rank was asked to stop by then: the same on all ranks.

        Raises:
            TrainingError: the step's loss or gradient norm is not finite; its update was skipped, the weights are those of the step before.
            StateError: the loss scaler has skipped too many steps in a row.
        """
        if self._waiting is None:
            return False
        result, self._waiting = self._waiting, None
        loss, norm = float(result.loss), float(result.grad_norm)
        overflow = int(result.first_overflow)
        where = self._layers[overflow] if 0 <= overflow < len(self._layers) else None
        if self._scaler is not None and overflow >= 0:
            self._scaler.check(where)
        elif not (math.isfinite(loss) and math.isfinite(norm)):
            raise TrainingError(
                f"step {result.step}" + (f", layer {where} first," if where else ""),
                f"loss {loss}, gradient norm {norm}",
                "both must be finite; this step's update was skipped",
                "Lower train.learning_rate or set train.clip_norm, then submit again: the run goes on from its last checkpoint.",
            )
        append_line(self._samples_file, {"attempt": self._attempt, "step": result.step, "samples": result.own_ids})
        tokens_per_s = self._tokens_per_step / result.seconds
        self._gauges(result.step, loss, tokens_per_s)
        if self._rank == 0:
            append_line(
                self._run.metrics,
                {
                    "step": result.step,
                    "loss": loss,
                    "grad_norm": norm if math.isfinite(norm) else None,
                    **({} if self._scaler is None else {"loss_scale": float(self._scaler.scale), "skipped": overflow >= 0}),
                    "learning_rate": result.learning_rate,
                    "samples": result.samples,
                    "tokens": result.samples * self._tokens_per_sample,
                    "tokens_per_s": round(tokens_per_s, 1),
                    "mfu": self._mfu(tokens_per_s),
                    "seconds": round(result.seconds, 4),
                    "attempt": self._attempt,
                    "time": round(time.time(), 3),
                },
            )
        return bool(result.stop)

    def _mfu(self, tokens_per_s: float) -> float | None:
        """Model FLOPs per second over the peak."""
        return None if self._samples_for_peak is None else round(tokens_per_s / self._tokens_per_sample / self._samples_for_peak, 4)
