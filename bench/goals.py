"""Goal: a bound that our engine or our models must keep, and whether they do. Pure: measured numbers in, verdicts out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

HELD = Path(__file__).parent / "held.json"


@dataclass(frozen=True)
class Goal:
    """An upper bound.

    Attributes:
        name: What is bounded, with its unit.
        bound: Measured values up to it hold.
        margin: Relative noise that a goal which held before may show before the bench fails.
        is_time: Whether other programs on the machine change it.
    """

    name: str
    bound: float
    margin: float
    is_time: bool = False

    def holds(self, measured: float) -> bool:
        return measured <= self.bound

    def broken(self, measured: float) -> bool:
        """Whether it fails by more than noise."""
        return measured > self.bound * (1 + self.margin)


TIME_NOISE, BYTES_NOISE, MEMORY_NOISE = 0.05, 0.005, 0.02

ENGINE_GOALS = {
    goal.name: goal
    for goal in (
        Goal("fp32 step / fsdp2", 0.66, TIME_NOISE, is_time=True),
        Goal("fp32 step / deepspeed", 0.75, TIME_NOISE, is_time=True),
        Goal("fp32 step / limit", 1.06, TIME_NOISE, is_time=True),
        Goal("comm-heavy step / fsdp2", 0.50, TIME_NOISE, is_time=True),
        Goal("thin overhead per layer, ms", 1.5, 2 * TIME_NOISE, is_time=True),
        Goal("fp32 bytes sent / formula, N=2", 1.02, BYTES_NOISE),
        Goal("fp32 bytes sent / formula, N=4", 1.02, BYTES_NOISE),
        Goal("fp32 peak / fsdp2, N=2", 1.0, MEMORY_NOISE),
        Goal("fp32 peak / fsdp2, N=4", 1.0, MEMORY_NOISE),
        Goal("wide peak / fsdp2, N=2", 1.0, MEMORY_NOISE),
        Goal("wide peak / fsdp2, N=4", 1.0, MEMORY_NOISE),
    )
}
MODEL_GOALS = {
    goal.name: goal
    for goal in (
        Goal("gpt_neox step / transformers", 0.9, TIME_NOISE, is_time=True),
        Goal("llama step / transformers", 0.9, TIME_NOISE, is_time=True),
        Goal("gpt_neox-64k step / transformers", 0.9, TIME_NOISE, is_time=True),
        Goal("llama-64k step / transformers", 0.9, TIME_NOISE, is_time=True),
        Goal("loss peak / at once, fp32", 0.5, MEMORY_NOISE),
        Goal("loss peak / at once, bf16", 0.3, MEMORY_NOISE),
    )
}
GOALS = ENGINE_GOALS | MODEL_GOALS


def report(measured: dict[str, float], held: dict[str, float], goals: dict[str, Goal] = GOALS) -> list[str]:
    """One line for each of the goals: measured, bound, verdict, and what it was when it last held."""
    lines = [f"{'goal':<34}{'measured':>10}{'bound':>8}  verdict"]
    for name, goal in goals.items():
        before = f" (held with {held[name]:.3f})" if name in held else ""
        if name not in measured:
            lines.append(f"{name:<34}{'-':>10}{goal.bound:>8.2f}  not measured{before}")
            continue
        verdict = "holds" if goal.holds(measured[name]) else "does not hold"
        lines.append(f"{name:<34}{measured[name]:>10.3f}{goal.bound:>8.2f}  {verdict}{before}")
    return lines


def broken(measured: dict[str, float], held: dict[str, float], disturbed: bool = False) -> list[str]:
    """Goals that held before and now fail by more than their margin. What was not measured is not broken, nor is a disturbed time."""
    judged = [GOALS[name] for name in held if name in GOALS and name in measured]
    return [goal.name for goal in judged if goal.broken(measured[goal.name]) and not (disturbed and goal.is_time)]


def updated(measured: dict[str, float], held: dict[str, float]) -> dict[str, float]:
    """What holds now; goals that were not measured stay as they are, goals that no longer exist go."""
    now = {name: round(measured[name], 4) if name in measured else held.get(name) for name in GOALS}
    return {name: value for name, value in now.items() if value is not None and (name not in measured or GOALS[name].holds(measured[name]))}


def load_held(path: Path = HELD) -> dict[str, float]:
    """The goals that held at the last update, with what was measured."""
    return json.loads(path.read_text()) if path.exists() else {}


def save_held(held: dict[str, float], path: Path = HELD) -> None:
    path.write_text(json.dumps(held, indent=2) + "\n")
