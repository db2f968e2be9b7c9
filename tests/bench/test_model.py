"""The models' benchmark on a tiny shape: it compares what both sides compute, and its verdict can fail."""

from __future__ import annotations

import pytest
import torch

from bench import goals, loss_memory, pairs
from bench.model import Results
from bench.pairs import Pair, Shape

TINY = {family: Shape(family, layers=2, width=32, heads=4, groups=2, vocab_size=64, batch=2, length=8) for family in ("gpt_neox", "llama")}
GOAL = "gpt_neox step / transformers"


@pytest.mark.parametrize("family", TINY)
def test_both_sides_compute_the_same_and_are_timed(family, capsys):
    results = Results()
    results.add_steps(family, TINY[family], rounds=1, profiled=True)
    assert results.disagreements == [] and results.measured[f"{family} step / transformers"] > 0
    printed = capsys.readouterr().out
    assert printed.count("x aten::") > 2 and "transformers:" in printed


@pytest.mark.parametrize("family", TINY)
def test_a_model_that_computes_something_else_is_found_out(family, monkeypatch):
    pair = Pair(TINY[family])
    with torch.no_grad():
        pair._pairs[-1][0].mul_(2.0)  # our readout alone
    monkeypatch.setattr("bench.model.Pair", lambda shape: pair)
    results = Results()
    results.add_steps(family, TINY[family], rounds=1)
    assert [text.split(" differs")[0] for text in results.verdict({})] == [f"{family}: loss", f"{family}: gradients"]


def test_a_goal_that_held_and_fails_is_in_the_verdict():
    results, goal = Results(), goals.MODEL_GOALS[GOAL]
    results.measured[GOAL] = goal.bound * (1 + goal.margin / 2)
    assert results.verdict({GOAL: 0.8}) == []
    results.measured[GOAL] = goal.bound * (1 + 2 * goal.margin)
    assert results.verdict({GOAL: 0.8}) == [f"broken: {GOAL}"] and results.verdict({}) == []


def test_every_shape_and_every_dtype_of_the_loss_has_a_goal():
    names = [f"{name} step / transformers" for name in pairs.SHAPES] + ["loss peak / at once, fp32", "loss peak / at once, bf16"]
    assert sorted(names) == sorted(goals.MODEL_GOALS)


def test_the_loss_in_pieces_peaks_below_all_logits_at_once(monkeypatch):
    """64 MiB of logits in pieces of 4 MiB."""
    monkeypatch.setattr("rayzero3.models.loss._PIECE_NUMEL", 2**20)
    results = Results()
    results.add_loss_memory(tokens=512, width=32, vocabulary=32768)
    assert results.disagreements == []
    assert results.measured["loss peak / at once, fp32"] < 0.3 and results.measured["loss peak / at once, bf16"] < 0.3


def test_a_loss_that_is_wrong_is_found_out(monkeypatch):
    monkeypatch.setitem(loss_memory.LOSSES, "ours", lambda *about: loss_memory.at_once(*about) * 1.1)
    results = Results()
    results.add_loss_memory(tokens=8, width=8, vocabulary=4096)
    assert len(results.verdict({})) == 2
