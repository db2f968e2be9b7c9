"""`python -m bench.engine [--quick] [--only WORKLOAD,...] [--update]`: our engine beside its peers, and the goals.

Times are at N=2, interleaved, medians over rounds, with the transport that a user gets on one host: ours sends nothing there, since its ranks
read each other's memory. Bytes sent are the kernel's count on the loopback interface; the goal for them is that of our engine when it sends,
as it does between hosts. Memory is measured in processes of their own, where every large block is a mapping. Where other programs took much of the CPU, times are printed but not judged. Exits with 1
when a goal that bench/held.json lists fails by more than its margin, or when losses disagree.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from statistics import median

from bench import goals, loopback
from bench.measure import Measurement, measure_memory, time_engines
from bench.peers import ENGINES, SENDING, SHARDED
from bench.workloads import WORKLOADS

TIMED = ("fp32", "bf16", "comm-heavy", "thin", "wide")
MEMORY = {"fp32": (2, 4), "wide": (2, 4)}
QUICK_TIMED = ("fp32", "comm-heavy", "thin")
SLOW_TO_START = {"thin": ("fsdp2", "deepspeed")}  # their first steps take time quadratic in the number of parameters, a minute there
TIMED_ENGINES = tuple(engine for engine in ENGINES if engine != SENDING)
QUICK_ENGINES = ("ours", "fsdp2", "deepspeed", "limit")
QUICK_ROUNDS, QUICK_STEPS = 4, 1
MEMORY_OF_MANY = ("ours", SENDING, "fsdp2")
TOO_LARGE_AT_ONCE = ("wide",)
LOSS_TOLERANCE = 1e-5
DISTURBED = 0.15
_REFERENCE = "fsdp2"
_MB = 1e6


class Results:
    """All rows so far. Prints each as it comes and derives what the goals are about."""

    def __init__(self) -> None:
        self.measured: dict[str, float] = {}
        self.disagreements: list[str] = []
        self.disturbed = False

    def add_times(self, rows: list[Measurement]) -> None:
        """Print the rows of one workload at N=2."""
        by_engine = {row.engine: row for row in rows}
        workload, limit, reference = rows[0].workload, by_engine.get("limit"), by_engine.get(_REFERENCE)
        shape = WORKLOADS[workload]
        print(f"\n{workload}: {shape.parameters / 1e6:.1f}M parameters, {shape.layers} layers of d {shape.width}, {shape.tokens} tokens a rank, N=2")
        print(_line("engine", ("ms/step", "/limit", "/fsdp2", "tokens/s", "CPU s", "CPU/limit", "faults", "MB sent", "/formula", "ms/layer", "loss err")))
        for row in rows:
            if not row.step_s:
                print(_line(row.engine, ()) + f"  {row.error}")
                continue
            step, error = median(row.step_s), row.loss_error(reference) if reference else None
            bare = row is limit
            overhead = row.overhead_s_per_layer(limit) if limit else None
            cells = (
                f"{step * 1e3:.0f}",
                _number(row.ratio_to(limit) if limit else None, "{:.3f}"),
                _number(row.ratio_to(reference) if reference else None, "{:.3f}"),
                f"{row.world_size * shape.tokens / step:.0f}",
                f"{median(row.cpu_s):.2f}",
                _number(median(row.cpu_s) / median(limit.cpu_s) if limit and limit.cpu_s else None, "{:.3f}"),
                f"{median(row.faults):.0f}",
                "-" if bare else f"{min(row.sent) / _MB:.1f}",
                "-" if bare else _number(row.sent_over_formula, "{:.3f}"),
                "-" if bare or overhead is None else f"{overhead * 1e3:.2f}",
                "-" if bare else _number(error, "{:.0e}"),
            )
            print(_line(row.engine, cells) + (f"  {row.error}" if row.error else ""), flush=True)
            if shape.dtype == "fp32" and not bare and error is not None and error > LOSS_TOLERANCE:
                self.disagreements.append(f"{workload}: loss of {row.engine} differs by {error:.1e} relative from {_REFERENCE}'s")
        print(f"  ours sends nothing on one host; what {SENDING} sends, as between hosts, stands with the memory")
        others = median([share for row in rows for share in row.foreign] or [0.0])
        self.disturbed |= others > DISTURBED
        print(f"  others took {others:.0%} of the CPU" + (": take the times as rough ones, CPU seconds as fair" if others > DISTURBED else ""))
        self._note_times(workload, by_engine)

    def add_memory(self, rows: list[Measurement]) -> None:
        """Print the rows of one workload at one N."""
        workload, world_size = rows[0].workload, rows[0].world_size
        print(f"\n{workload}: memory per rank over the start, N={world_size}")
        print(_line("engine", ("persist MB", "peak MB", "MB sent", "/formula")))
        for row in rows:
            cells = (
                _number(row.persistent_bytes and row.persistent_bytes / _MB, "{:.0f}"),
                _number(row.peak_bytes and row.peak_bytes / _MB, "{:.0f}"),
                _number(row.sent[0] / _MB if row.sent else None, "{:.1f}"),
                _number(row.sent_over_formula, "{:.3f}"),
            )
            print(_line(row.engine, cells) + (f"  {row.error}" if row.error else ""), flush=True)
        by_engine = {row.engine: row for row in rows}
        ours, reference = by_engine["ours"], by_engine[_REFERENCE]
        if ours.peak_bytes and reference.peak_bytes:
            self.measured[f"{workload} peak / fsdp2, N={world_size}"] = ours.peak_bytes / reference.peak_bytes
        if (sending := by_engine.get(SENDING)) and sending.sent_over_formula:
            self.measured[f"{workload} bytes sent / formula, N={world_size}"] = sending.sent_over_formula

    def _note_times(self, workload: str, by_engine: dict[str, Measurement]) -> None:
        ours = by_engine["ours"]
        for other, row in by_engine.items():
            ratio = ours.ratio_to(row)
            if other != "ours" and ratio is not None:
                self.measured[f"{workload} step / {other}"] = ratio
        limit = by_engine.get("limit")
        overhead = ours.overhead_s_per_layer(limit) if limit else None
        if overhead is not None:
            self.measured[f"{workload} overhead per layer, ms"] = overhead * 1e3


def _line(name: str, cells: Iterable[str]) -> str:
    return f"  {name:<10}" + "".join(f"{cell:>10}" for cell in cells)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description="Our engine beside its peers: one table, and the goals.")
    parser.add_argument("--quick", action="store_true", help="under 3 minutes: fewer engines, workloads and rounds")
    parser.add_argument("--only", help="workloads, with commas between them: " + ", ".join(TIMED))
    parser.add_argument("--update", action="store_true", help="rewrite bench/held.json with the goals that hold now")
    options = parser.parse_args(arguments)
    timed = options.only.split(",") if options.only else list(QUICK_TIMED if options.quick else TIMED)
    if unknown := sorted(set(timed) - set(WORKLOADS)):
        parser.error(f"no workload {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    engines = list(QUICK_ENGINES if options.quick else TIMED_ENGINES)
    start, private, results = time.monotonic(), loopback.make_private(), Results()
    print(f"loopback: {'a network of our own' if private else 'shared with others, whose idle rate is subtracted'}")
    for workload in timed:
        shape = WORKLOADS[workload]
        rounds, steps = (QUICK_ROUNDS, QUICK_STEPS) if options.quick else (shape.rounds, shape.steps)
        names = [engine for engine in engines if not options.quick or engine not in SLOW_TO_START.get(workload, ())]
        results.add_times(time_engines(names, workload, 2, rounds, steps, at_once=workload not in TOO_LARGE_AT_ONCE))
    for workload in [workload for workload in timed if workload in MEMORY]:
        for world_size in MEMORY[workload][:1] if options.quick else MEMORY[workload]:
            names = MEMORY_OF_MANY if options.quick or world_size > 2 else SHARDED
            results.add_memory(measure_memory(names, workload, world_size))
    held = goals.load_held()
    print("\n" + "\n".join(goals.report(results.measured, held, goals.ENGINE_GOALS)))
    broken = goals.broken(results.measured, held, results.disturbed)
    for text in [f"broken: {name}" for name in broken] + results.disagreements:
        print(text)
    if not results.disagreements:
        print(f"losses agree to {LOSS_TOLERANCE:g} where they were compared (fp32)")
    if options.update:
        goals.save_held(goals.updated(results.measured, held))
    print(f"{time.monotonic() - start:.0f} s")
    return 1 if broken or results.disagreements else 0


if __name__ == "__main__":
    sys.exit(main())
