"""docs/finetune.md as its reader meets it: its commands and its job, in a folder with a tiny model; and jobs/finetune_neox.yaml, in small."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from rayzero3.config import parse_job
from rayzero3.train.trainee import check_model
from tests.models import folders

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs/finetune.md").read_text()
IDS = torch.arange(24).view(2, 12)


def blocks(kind: str) -> list[str]:
    """The page's blocks of a kind."""
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def texts(output: str) -> list[dict]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def page(cli, tmp_path_factory):
    """The current folder after all commands of the page, and what each of them said, by its words."""
    folder = tmp_path_factory.mktemp("finetune")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        folders.make_folder(folder / "models/neox", "GPTNeoX")
        lines = [f"{what} number {count} jumps over the lazy dog, {count} times. " * 3 for count in range(20) for what in ("fox", "cat", "bird")]
        (folder / "texts.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
        for block in blocks("yaml"):
            if name := re.match(r"# (\S+\.yaml)\n", block):
                (folder / name[1]).write_text(block)
        commands = [line for block in blocks("sh") for line in block.splitlines()]
        assert [line.split()[1] for line in commands] == ["tokenize", "submit", "generate", "export", "generate"]
        yield folder, {line: cli(*shlex.split(line)[1:]) for line in commands}


def test_the_pages_run_learns_and_its_export_is_another_model(page):
    folder, _ = page
    found = losses(folder / "runs/tune")
    assert len(found) == 12 and found[-1] < found[0] - 0.05
    (load,) = [block for block in blocks("python") if "peft" not in block]
    exec(load, {})
    tuned, base = folders.load(folder / "models/tuned"), folders.load(folder / "models/neox")
    assert not torch.allclose(tuned(IDS).logits, base(IDS).logits, atol=1e-3)
    for (name, after), (_, before) in zip(tuned.named_parameters(), base.named_parameters(), strict=True):
        assert torch.equal(after, before) != name.endswith("bias"), name


def test_the_pages_prompts_are_continued_alike_by_the_run_and_by_its_export(page):
    _, said = page
    of_run, of_export = (texts(output) for command, output in said.items() if command.startswith("rayzero3 generate"))
    assert [line["prompt"] for line in of_run] == ["The first", "And then the other"] and all(line["text"] for line in of_run)
    assert of_export == of_run[:1], "what stands beside a prompt changes nothing"


def test_an_export_never_overwrites(page, cli):
    assert "never overwrites" in cli("export", "runs/tune", "models/tuned", code=2)


def test_a_run_with_lora_and_workers_that_share_the_model_say_what_one_process_says(page, cli):
    folder, _ = page
    few = ["name=adapter", "tune={lora: {rank: 4}, frozen_dtype: int8}", "train.steps=3", "train.compute_dtype=bf16"]
    output = cli("submit", "tune.yaml", *(word for change in few for word in ("--set", change)))
    assert "frozen ones int8" in output and "rayzero3 export" in output
    cli("export", "runs/adapter", "models/adapter")
    (load,) = [block for block in blocks("python") if "peft" in block]
    found: dict = {}
    exec(load, found)
    assert not torch.allclose(found["model"].eval()(IDS).logits, folders.load(folder / "models/neox")(IDS).logits, atol=1e-3)
    assert "is an adapter" in cli("generate", "models/adapter", "--prompt", "a", code=1)
    command = ["generate", "runs/tune", "--max-tokens", "6", "--prompt", "The first", "--prompt", "a", "--prompt", "the other fox and the dog"]
    alone = texts(cli(*command, "--device", "cpu"))
    words = [sys.executable, "-m", "rayzero3.cli.main", *command, "--workers", "2", "--device", "cpu"]
    shared = subprocess.run(words, env=cli.environment, capture_output=True, text=True, timeout=180)
    assert shared.returncode == 0, shared.stdout + shared.stderr
    assert [json.loads(line) for line in shared.stdout.splitlines()] == alone, "standard output has the texts and nothing else"
    assert "SUCCEEDED" in shared.stderr and not list((folder / "runs").glob("generate*"))


def test_what_is_wrong_with_a_request_is_told_before_it_is_sent(page, cli):
    assert "the number of workers is 5" in cli("generate", "runs/tune", "--prompt", "a", "--workers", 5, "--device", "cpu", code=3)
    assert "prompt 2 is ''; it has no tokens" in cli("generate", "runs/tune", "--prompt", "a", "--prompt", "", "--workers", 2, code=2)


def test_a_failed_export_leaves_nothing(page, cli):
    folder, _ = page
    weights = folder / "models/neox/model.safetensors"
    kept = weights.rename(weights.with_suffix(".kept"))
    try:
        weights.write_bytes(kept.read_bytes()[:-1] + b"\1")
        assert "holds other weights than the run was started from" in cli("export", "runs/tune", "models/late", code=1)
    finally:
        kept.rename(weights)
    assert not list((folder / "models").glob("late*"))


def test_the_job_file_for_gpt_neox_trains_its_biases_in_fp16(page, cli):
    folder, _ = page
    few = ["model.init_from=models/neox", "data.path=data/texts", "workers={count: 2, device: cpu}", "train.steps=8"]
    output = cli("submit", ROOT / "jobs/finetune_neox.yaml", *(word for change in few for word in ("--set", change)))
    assert "frozen ones fp16, compute fp16" in output
    found = losses(folder / "runs/finetune_neox")
    assert len(found) == 8 and found[-1] < found[0]
    cli("export", "runs/finetune_neox", "models/neox-tuned")
    assert not torch.equal(folders.load(folder / "models/neox-tuned")(IDS).logits, folders.load(folder / "models/neox")(IDS).logits)


def test_every_choice_of_the_page_is_one_of_a_job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders.make_folder(tmp_path / "models/other", "Llama", attention_bias=True)
    job, other = (yaml.safe_load(block) for block in blocks("yaml"))
    check_model(parse_job(job | other), 280)
    choices = re.findall(r"^\| `(\w+: .*?)` \|", PAGE, re.MULTILINE)
    assert len(choices) == 3
    for choice in choices:
        check_model(parse_job(job | {"tune": yaml.safe_load(f"{{{choice}}}"), "model": {"init_from": "models/other"}}), 280)
