"""A user's mistake: one message that teaches, the right exit code, no traceback, and nothing started."""

from __future__ import annotations

import hashlib
import json
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


@pytest.fixture
def model(tmp_path):
    """A model's folder as far as its config.json."""
    folder = tmp_path / "model"
    folder.mkdir()
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 32, "vocab_size": 40}
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt_neox", "rotary_pct": 0.5, **sizes}))
    return folder


TOKENIZER = {"model": {"vocab": {"a": 0}, "merges": []}}
FOLDERS = {
    "nothing": ({}, "has no safetensors; expected model.safetensors"),
    "pickled weights": ({"pytorch_model.bin": ""}, "it has pytorch_model.bin, which is pickled code. Load the model with transformers and save it"),
    "another tokenizer": ({"model.safetensors": "", "tokenizer.json": json.dumps(TOKENIZER)}, "it is not that of"),
    "a broken tokenizer": ({"model.safetensors": "", "tokenizer.json": "{}"}, "expected a tokenizer.json of the `tokenizers` library"),
    "an unknown key": ({"config.json": json.dumps({"model_type": "gpt_neox2"})}, "our models are gpt_neox, llama"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_a_model_folder_that_will_not_do_starts_nothing(case, fresh, job_file, data, model):
    files, message = FOLDERS[case]
    for name, text in files.items():
        (model / name).write_text(text)
    (data / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"b": 0}, "merges": []}}))
    file = job_file()
    manifest = json.loads((data / "manifest.json").read_text())
    manifest["tokenizer_sha256"] = hashlib.sha256((data / "tokenizer.json").read_bytes()).hexdigest()
    (data / "manifest.json").write_text(json.dumps(manifest))
    text = fresh("submit", file, "--set", f"model={{init_from: {model}}}", code=2)
    assert message in text and text.startswith("error: ")
    assert not (fresh.home / "head.log").exists()


def test_the_tokenizer_that_is_not_a_file_is_answered_with_how_to_get_one(fresh, tmp_path, model):
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}\n')
    command = ("tokenize", tmp_path / "texts.jsonl", "--out", tmp_path / "out", "--tokenizer")
    assert f"AutoTokenizer.from_pretrained('{model}').save_pretrained('{model}') writes one" in fresh(*command, model / "tokenizer.json", code=2)
    (model / "tokenizer.json").write_text("{}")
    assert f"is a folder; expected a tokenizer.json file. Give {model / 'tokenizer.json'}." in fresh(*command, model, code=2)


def test_what_is_no_model_is_neither_continued_nor_exported(fresh, tmp_path, model, data):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    for path, message in ((tmp_path / "adapter", "is an adapter; its base is not in it"), (data, "is a folder of token shards"), (tmp_path / "x", "no such folder")):
        assert message in fresh("generate", path, "--prompt", "a", code=1)
    for path, message in ((tmp_path / "x", "is missing"), (model, "is a folder without manifest.json"), (data, "is a folder of token shards")):
        assert message in fresh("export", path, tmp_path / "out", code=1)
    assert not list(tmp_path.glob("out*"))


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
