"""A user's mistake: one message that teaches, the right exit code, no traceback, and nothing started."""

from __future__ import annotations

import os
import stat

import pytest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": {"stpes": 3}}, "Did you mean steps?"),
        ({"train": {"steps": "many"}}, "train.steps is 'many'; expected a whole number"),
        ({"workers": {"count": 0}}, "workers.count is 0"),
        ({"model": {"layers": 1, "width": 16, "heads": 3}}, "model.heads is 3; model.width 16 must be a multiple of it"),
        ({}, "Write it with `rayzero3 tokenize INPUT --out FOLDER`"),
    ],
    ids=["unknown key", "wrong type", "out of range", "do not fit", "no data folder"],
)
def test_a_wrong_job_file_starts_nothing(fresh, job_file, changes, message):
    text = fresh("submit", job_file(**changes), code=2)
    assert message in text and text.startswith("error: ")
    assert not (fresh.home / "head.json").exists() and not (fresh.home / "head.log").exists()


def test_a_vocabulary_that_is_too_small_starts_nothing(fresh, job_file, data):
    text = fresh("submit", job_file(), "--set", "model.vocab_size=30", code=2)
    assert "model.vocab_size is 30; the tokenizer has 31 tokens" in text
    assert not (fresh.home / "head.log").exists()


@pytest.mark.parametrize(
    "arguments",
    [("sumbit",), ("submit",), ("submit", "job.yaml", "--fast"), ("list", "--address", "ray://host:10001"), ("tokenize", "x")],
    ids=" ".join,
)
def test_a_wrong_command_ends_with_2(fresh, arguments):
    fresh(*arguments, code=2)


@pytest.mark.parametrize("arguments", [("list",), ("status", "x"), ("logs", "x"), ("stop", "x")], ids=" ".join)
def test_without_a_cluster_commands_say_how_to_get_one(fresh, arguments):
    assert "Run `rayzero3 cluster up`" in fresh(*arguments, code=3)


def test_an_address_that_does_not_answer_is_named(fresh):
    text = fresh("list", "--address", "127.0.0.1:1", code=3)
    assert "http://127.0.0.1:1 does not answer" in text


def test_down_without_a_cluster_is_no_error(fresh):
    assert "no cluster" in fresh("cluster", "down")


def test_the_state_folder_is_private_and_home_is_left_alone(fresh):
    fresh("list", code=3)
    token = fresh.home / "token"
    assert stat.S_IMODE(fresh.home.stat().st_mode) == 0o700
    assert stat.S_IMODE(token.stat().st_mode) == 0o600 and len(token.read_text()) == 64
    assert not os.listdir(fresh.environment["HOME"])


def test_help_imports_neither_ray_nor_torch(fresh):
    code = "import sys\nfrom rayzero3.cli.main import run\nrun(['submit', '--help'])\n"
    code += "print([name for name in ('ray', 'torch') if name in sys.modules])"
    assert fresh.python("-c", code).splitlines()[-1] == "[]"
