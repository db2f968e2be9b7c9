"""The engine benchmark: its goals' logic, and one tiny run in which a peer fails."""

from __future__ import annotations

import os

import pytest

from bench import goals, measure, peers
from bench.engine import Results
from bench.group import Group, GroupError
from bench.measure import Measurement, time_engines
from bench.workloads import WORKLOADS

STEP = "fp32 step / fsdp2"


def test_a_goal_that_held_is_broken_only_beyond_its_margin():
    bound, margin = goals.GOALS[STEP].bound, goals.GOALS[STEP].margin
    within, beyond = bound * (1 + margin / 2), bound * (1 + 2 * margin)
    assert not goals.GOALS[STEP].holds(within)
    assert goals.broken({STEP: within}, {STEP: 0.6}) == []
    assert goals.broken({STEP: beyond}, {STEP: 0.6}) == [STEP]


def test_a_goal_that_never_held_or_was_not_measured_is_not_broken():
    assert goals.broken({STEP: 9.0}, {}) == []
    assert goals.broken({}, {STEP: 0.6}) == []


def test_on_a_disturbed_machine_bytes_are_judged_and_times_are_not():
    sent = "fp32 bytes sent / formula, N=2"
    assert goals.broken({STEP: 9.0, sent: 9.0}, {STEP: 0.6, sent: 1.0}, disturbed=True) == [sent]


def test_an_update_adds_what_holds_drops_what_does_not_and_keeps_what_was_not_measured():
    peak, sent = "wide peak / fsdp2, N=2", "fp32 bytes sent / formula, N=2"
    held = goals.updated({STEP: 0.5, sent: 1.2}, {sent: 1.0, peak: 0.98, "a goal of old": 1.0})
    assert held == {STEP: 0.5, peak: 0.98}


def test_held_goals_survive_the_file(tmp_path):
    path = tmp_path / "held.json"
    assert goals.load_held(path) == {}
    goals.save_held({STEP: 0.5}, path)
    assert goals.load_held(path) == {STEP: 0.5}


def test_the_report_names_every_goal_and_its_verdict():
    lines = goals.report({STEP: 0.7}, {STEP: 0.65})
    assert len(lines) == 1 + len(goals.GOALS)
    assert any(STEP in line and "does not hold (held with 0.650)" in line for line in lines)


def test_ratios_are_taken_round_by_round():
    ours = Measurement("ours", "tiny", 2, step_s=[1.0, 10.0, 3.0])
    limit = Measurement("limit", "tiny", 2, step_s=[1.0, 8.0, 2.0])
    assert ours.ratio_to(limit) == 1.25
    assert ours.overhead_s_per_layer(limit) == 1.0 / WORKLOADS["tiny"].modules


def test_the_formula_counts_two_gathers_and_one_reduce():
    tiny = WORKLOADS["tiny"]
    assert tiny.formula_bytes(1) == 0
    assert tiny.formula_bytes(4) == 3 * sum(p.numel() for layer in tiny.build() for p in layer.parameters()) * 4 * 3


def test_traffic_is_that_of_the_round_with_the_least_since_others_only_add():
    formula = WORKLOADS["tiny"].formula_bytes(2)
    assert Measurement("ours", "tiny", 2, sent=[1.5 * formula, 1.25 * formula]).sent_over_formula == 1.25
    assert Measurement("limit", "tiny", 2).sent_over_formula is None


def test_a_tiny_run_agrees_and_a_failing_peer_shows_its_error(monkeypatch, capsys):
    monkeypatch.setattr(measure, "missing", lambda engine: "not installed" if engine == "deepspeed" else None)
    rows = time_engines(["ours", peers.SENDING, "fsdp2", "no such engine", "deepspeed"], "tiny", 2, rounds=1, steps=2)
    ours, sending, reference, failed, absent = rows
    assert (ours.error, sending.error, reference.error) == (None, None, None)
    assert ours.loss_error(reference) < 1e-5 and len(ours.losses) == 3
    assert sending.losses == ours.losses and sending.sent_over_formula > 0.8, "other programs on loopback can only add to it"
    assert len(ours.sent) == 1 and ours.cpu_s[0] > 0
    assert "no such engine" in failed.error and absent.error == "not installed"
    results = Results()
    results.add_times(rows)
    printed = capsys.readouterr().out
    assert "KeyError" in printed and "not installed" in printed
    assert results.measured["tiny step / fsdp2"] > 0 and not results.disagreements


def test_processes_end_with_their_group():
    with Group("limit", "tiny", 1) as group:
        group.wait_ready()
        process = group._ranks[0]
        os.kill(process.pid, 9)
        with pytest.raises(GroupError, match="a rank ended"):
            group.ask("steps", 1)
    assert not process.is_alive()


def test_peers_say_why_they_can_not_run():
    assert peers.missing("ours") is None
