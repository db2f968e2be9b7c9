"""Measurement: what one engine did on one workload, and the runs that find it out."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from bench import loopback
from bench.group import Group, GroupError
from bench.peers import missing
from bench.workloads import WORKLOADS

MEMORY_STEPS = 2


@dataclass
class Measurement:
    """One row of the table.

    Attributes:
        step_s: Wall seconds of a step, the slower rank's, one per round.
        cpu_s: CPU seconds of a step, all ranks, one per round.
        faults: Minor page faults of a step, all ranks, one per round.
        sent: Bytes on the loopback interface in a step, all ranks, one per round.
        foreign: Part of the machine's CPU time that other programs took, one per round.
        losses: Mean over the ranks, one per step.
        persistent_bytes, peak_bytes: Per rank (the largest), from a memory run.
        error: Why there is nothing, or not all.
    """

    engine: str
    workload: str
    world_size: int
    step_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    faults: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    foreign: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    persistent_bytes: int | None = None
    peak_bytes: int | None = None
    error: str | None = None

    @property
    def sent_over_formula(self) -> float | None:
        """Bytes sent, the least of the rounds (others can only add), over the formula of ZeRO-3."""
        formula = WORKLOADS[self.workload].formula_bytes(self.world_size)
        return min(self.sent) / formula if self.sent and formula else None

    def ratio_to(self, other: Measurement) -> float | None:
        """Step time over another engine's: the median over the rounds, which both ran one after the other."""
        pairs = list(zip(self.step_s, other.step_s, strict=False))
        return median(own / others for own, others in pairs) if pairs else None

    def overhead_s_per_layer(self, limit: Measurement) -> float | None:
        """What a layer costs beyond its computation: the median over the rounds."""
        pairs = list(zip(self.step_s, limit.step_s, strict=False))
        return median(own - bare for own, bare in pairs) / WORKLOADS[self.workload].modules if pairs else None

    def loss_error(self, reference: Measurement) -> float | None:
        """Relative difference of the last common step's loss."""
        last = min(len(self.losses), len(reference.losses))
        return abs(self.losses[last - 1] / reference.losses[last - 1] - 1) if last else None


def time_engines(engines: list[str], workload: str, world_size: int, rounds: int, steps: int, at_once: bool = True) -> list[Measurement]:
    """Time engines in turn: every round runs `steps` steps of each, in an order that rotates; a first step of each counts for the losses only.

    Args:
        at_once: All engines' processes live at the same time; else each lives for its own rounds, where memory is short.
    """
    found = {engine: Measurement(engine, workload, world_size, error=missing(engine)) for engine in engines}
    able = [engine for engine in engines if found[engine].error is None]
    batches = [able] if at_once else [[engine] for engine in able]
    for names in batches:
        with ExitStack() as stack:
            groups = {engine: stack.enter_context(Group(engine, workload, world_size)) for engine in names}
            _attempt_all(found, groups, lambda group, row: group.wait_ready())
            _attempt_all(found, groups, lambda group, row: _add_losses(row, group.ask("steps", 1)))
            for round_ in range(rounds):
                order = names[round_ % len(names) :] + names[: round_ % len(names)]
                _attempt_all(found, {engine: groups[engine] for engine in order}, lambda group, row: _time_round(group, row, steps))
    return list(found.values())


def measure_memory(engines: Sequence[str], workload: str, world_size: int) -> list[Measurement]:
    """Memory of engines, one after the other, in processes of their own, and bytes sent meanwhile."""
    found = {engine: Measurement(engine, workload, world_size, error=missing(engine)) for engine in engines}
    for engine in [engine for engine in engines if found[engine].error is None]:
        with Group(engine, workload, world_size, mapped=True) as group:
            _attempt_all(found, {engine: group}, _measure_memory)
    return list(found.values())


def _measure_memory(group: Group, row: Measurement) -> None:
    group.wait_ready()
    sent, answers = _count_sent(lambda: group.ask("memory", MEMORY_STEPS))
    row.persistent_bytes = max(answer["persistent_bytes"] for answer in answers)
    row.peak_bytes = max(answer["peak_bytes"] for answer in answers)
    if row.world_size > 1:
        row.sent.append(sent / MEMORY_STEPS)


def _time_round(group: Group, row: Measurement, steps: int) -> None:
    busy, start = _busy_s(), time.monotonic()
    sent, answers = _count_sent(lambda: group.ask("steps", steps))
    available = (time.monotonic() - start) * os.cpu_count()
    row.foreign.append(max(_busy_s() - busy - sum(answer["cpu_s"] for answer in answers), 0.0) / available)
    _add_losses(row, answers)
    row.step_s.append(max(answer["wall_s"] for answer in answers) / steps)
    row.cpu_s.append(sum(answer["cpu_s"] for answer in answers) / steps)
    row.faults.append(sum(answer["faults"] for answer in answers) / steps)
    row.sent.append(sent / steps)


def _count_sent(act: Callable[[], list[dict]]) -> tuple[float, list[dict]]:
    rate = loopback.idle_rate(0.1)
    before, start = loopback.sent_bytes(), time.monotonic()
    answers = act()
    return max(loopback.sent_bytes() - before - rate * (time.monotonic() - start), 0.0), answers


def _busy_s() -> float:
    """CPU seconds that all programs of this machine have used."""
    user, nice, system, _idle, _wait, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _add_losses(row: Measurement, answers: list[dict]) -> None:
    row.losses += [sum(losses) / len(losses) for losses in zip(*(answer["losses"] for answer in answers), strict=True)]


def _attempt_all(found: dict[str, Measurement], groups: dict[str, Group], act: Callable[[Group, Measurement], object]) -> None:
    for engine, group in groups.items():
        if found[engine].error is None:
            try:
                act(group, found[engine])
            except GroupError as error:
                found[engine].error = str(error)
