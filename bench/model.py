"""`python -m bench.model [--rounds R] [--only SHAPE,...] [--profile] [--update]`: our models beside transformers' of the same weights, and the goals.

A step is forward and backward of the loss in fp32, in one process with one thread, so the goals are about its CPU seconds: the wall clock shows
the same where nobody else computes. Steps of the two are interleaved and the ratio is the median over the rounds. Then the peak memory of the
loss over 131,072 words. Exits with 1 when a goal that bench/held.json lists fails by more than its margin, or when losses or gradients disagree.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile

from bench import goals
from bench.loss_memory import LOSSES, TOKENS, VOCABULARY, WIDTH, peak_bytes
from bench.pairs import SHAPES, Pair, Shape

LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4
ROUNDS, PROFILED = 9, 12
SIDES = ("ours", "transformers")
_DTYPES = {"fp32": (torch.float32, 1e-5), "bf16": (torch.bfloat16, 1e-3)}


class Results:
    """All rows so far. Prints each as it comes and derives what the goals are about."""

    def __init__(self) -> None:
        self.measured: dict[str, float] = {}
        self.disagreements: list[str] = []

    def add_steps(self, name: str, shape: Shape, rounds: int, profiled: bool = False) -> None:
        """Time and compare the two models of one shape; a first step of each counts for the comparison only."""
        pair = Pair(shape)
        losses = {side: pair.time(side)[2] for side in SIDES}
        loss_error, gradient_error = abs(losses["ours"] / losses["transformers"] - 1), pair.gradient_error()
        self._compare(f"{name}: loss", loss_error, LOSS_TOLERANCE)
        self._compare(f"{name}: gradients", gradient_error, GRADIENT_TOLERANCE)
        cpu, wall = ({side: [] for side in SIDES} for _ in range(2))
        for round_ in range(rounds):
            for side in SIDES if round_ % 2 else SIDES[::-1]:
                cpu_s, wall_s, _ = pair.time(side)
                cpu[side].append(cpu_s)
                wall[side].append(wall_s)
        ratio, wall_ratio = (median(own / other for own, other in zip(times["ours"], times["transformers"], strict=True)) for times in (cpu, wall))
        self.measured[f"{name} step / transformers"] = ratio
        cells = [f"{median(times[side]) * 1e3:.0f}" for times in (cpu, wall) for side in SIDES]
        print(_line(name, *cells[:2], f"{ratio:.3f}", *cells[2:], f"{wall_ratio:.3f}", f"{loss_error:.0e}", f"{gradient_error:.0e}"), flush=True)
        if profiled:
            for side in SIDES:
                print_profile(side, pair.steps[side])

    def add_loss_memory(self, tokens: int = TOKENS, width: int = WIDTH, vocabulary: int = VOCABULARY) -> None:
        """Peak memory of the loss in both dtypes, at once and ours."""
        print(f"\nloss of {tokens} tokens, D {width}, V {vocabulary}: peak over the start, gradients included")
        print(_line("dtype", "at once MB", "ours MB", "ratio", "loss err"))
        for dtype, (torch_dtype, tolerance) in _DTYPES.items():
            (before, expected), (after, found) = (peak_bytes(loss, torch_dtype, tokens, width, vocabulary) for loss in LOSSES)
            error = abs(found / expected - 1)
            self._compare(f"loss over {vocabulary} words in {dtype}", error, tolerance)
            self.measured[f"loss peak / at once, {dtype}"] = after / before
            print(_line(dtype, f"{before / 1e6:.0f}", f"{after / 1e6:.0f}", f"{after / before:.3f}", f"{error:.0e}"), flush=True)

    def verdict(self, held: dict[str, float]) -> list[str]:
        """What makes the bench fail, a line each."""
        return [f"broken: {name}" for name in goals.broken(self.measured, held)] + self.disagreements

    def _compare(self, what: str, error: float, tolerance: float) -> None:
        if not error <= tolerance:  # nan too
            self.disagreements.append(f"{what} differs by {error:.1e} relative from the reference; at most {tolerance:g}")


def print_profile(side: str, step: Callable[[], torch.Tensor]) -> None:
    """The operators that take most of a step, by the CPU time spent in each itself."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        step()
    rows = sorted(recorded.key_averages(), key=lambda row: -row.self_cpu_time_total)
    total = sum(row.self_cpu_time_total for row in rows)
    print(f"    {side}: {total / 1e3:.0f} ms")
    for row in rows[:PROFILED]:
        print(f"      {row.self_cpu_time_total / 1e3:>8.1f} ms {row.self_cpu_time_total / total:>6.1%} {row.count:>5} x {row.key}")


def _line(name: str, *cells: str) -> str:
    return f"  {name:<14}" + "".join(f"{cell:>12}" for cell in cells)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.model", description="Our models beside transformers': one table, and the goals.")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"timed steps of each model; {ROUNDS} unless given")
    parser.add_argument("--only", help="shapes, with commas between them: " + ", ".join(SHAPES))
    parser.add_argument("--profile", action="store_true", help="print the operators that take most of a step, on both sides")
    parser.add_argument("--update", action="store_true", help="rewrite bench/held.json with the goals that hold now")
    options = parser.parse_args(arguments)
    names = options.only.split(",") if options.only else list(SHAPES)
    if unknown := sorted(set(names) - set(SHAPES)):
        parser.error(f"no shape {', '.join(unknown)}; there are {', '.join(SHAPES)}")
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}; it must be at least 1")
    start, results = time.monotonic(), Results()
    torch.set_num_threads(1)
    if not options.only:
        results.add_loss_memory()
    print("\nforward and backward of the loss, fp32, one thread, medians; CPU seconds are judged")
    print(_line("shape", "ours CPU ms", "theirs", "ratio", "wall ms", "theirs", "ratio", "loss err", "grad err"))
    for name in names:
        results.add_steps(name, SHAPES[name], options.rounds, options.profile)
    held = goals.load_held()
    print("\n" + "\n".join(goals.report(results.measured, held, goals.MODEL_GOALS)))
    verdict = results.verdict(held)
    print("\n".join(verdict) if verdict else "losses and gradients agree; no goal that held is broken")
    if options.update:
        goals.save_held(goals.updated(results.measured, held))
    print(f"{time.monotonic() - start:.0f} s")
    return 1 if verdict else 0


if __name__ == "__main__":
    sys.exit(main())
