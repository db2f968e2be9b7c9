"""Fine-tuning from a Hugging Face folder: who trains, what the rest costs, the same run at any N, and back to a folder."""

from __future__ import annotations

import json

import pytest
import torch

from rayzero3.checkpoint.export import export
from rayzero3.checkpoint.format import Position, newest
from rayzero3.checkpoint.load import load
from rayzero3.checkpoint.save import save
from rayzero3.config import parse_job
from rayzero3.errors import CheckpointError, ConfigError
from rayzero3.models.context import Context
from rayzero3.train.loop import steps
from rayzero3.train.trainee import build, check_model
from tests.engine.models import full_values
from tests.jobs import random_batches, small_job
from tests.models import folders
from tests.ranks import run_ranks

CPU = torch.device("cpu")
TUNES = {
    "all": {},
    "biases": {"parameters": "biases"},
    "by name": {"parameters": r".*\.layers\.1\..*"},
    "lora": {"lora": {"rank": 4, "alpha": 8, "dropout": 0.2}},
    "lora on blocks of int8": {"lora": {"rank": 4, "targets": ["q_proj", "v_proj"]}, "frozen_dtype": "int8"},
}
MODELS = {"ours": "init_from", "transformers' own": "transformers"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    folders.make_folder(path, "Llama", num_key_value_heads=2, attention_bias=True, shard_bytes="40KB")
    return path


def job_of(storage, folder, tune, key="init_from", **train):
    train = {"steps": 4, "learning_rate": 3e-3, "warmup_steps": 1, "clip_norm": 1.0} | train
    raw = small_job(storage, train=train).model_dump(mode="json")
    return parse_job(raw | {"model": {key: str(folder)}, "tune": tune})


def train(rank, world_size, job, until=None, resume=False):
    trainee = build(job, 0, rank, world_size, CPU)
    position = load(*newest(job.run_folder / "checkpoints"), job, trainee.model, trainee.optimizer, trainee.source) if resume else Position(0, 0)
    losses = []
    for result in steps(job, trainee, random_batches(job, position.step, rank, world_size), position.step, position.samples, CPU):
        losses.append(float(result.loss))
        if result.step == until:
            break
    save(job.run_folder / "checkpoints", job, trainee.model, trainee.optimizer, Position(result.step, result.samples), 1, trainee.source)
    layers = trainee.model.all_layers()
    with torch.no_grad():
        logits = trainee(torch.arange(12).view(1, 12) * 3, Context())
    return {
        "losses": losses,
        "values": full_values(trainee.model),
        "trainable": sorted(layer.full_name(name) for layer in layers if layer.trainable for name in layer.trainable.parameters),
        "trained_bytes": sum(chunk.nbytes for chunk in trainee.model.get_trainable_chunk()),
        "state_bytes": sum(t.nbytes for c in trainee.model.get_trainable_chunk() for t in trainee.optimizer.tensors(c).values()),
        "frozen_grads": sum(flat.chunk.grad is not None for layer in layers for flat in layer.frozen),
        "logits": logits,
    }


@pytest.mark.parametrize("tune", TUNES)
@pytest.mark.parametrize("kind", MODELS)
def test_the_same_run_at_any_n_and_nothing_else_trains(kind, tune, folder, tmp_path):
    one, more = (run_ranks(train, n, job_of(tmp_path / str(n), folder, TUNES[tune], MODELS[kind]))[0] for n in (1, 3 if kind == "ours" else 2))
    assert more["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert one["losses"][-1] < one["losses"][0] or tune == "lora", "the tokens are random, yet four steps learn their frequencies"
    before = dict(folders.load(folder).named_parameters())
    for name, value in one["values"].items():
        if name in before and name not in one["trainable"] and "int8" not in tune:
            assert torch.equal(value, before[name]), name
        if name in one["trainable"]:
            assert name not in before or not torch.equal(value, before[name]), name
    wanted = {"all": lambda n: True, "biases": lambda n: n.endswith("bias"), "by name": lambda n: ".layers.1." in n}.get(tune, lambda n: "lora_" in n)
    assert one["trainable"] == sorted(filter(wanted, one["values"]))
    assert one["state_bytes"] == 2 * one["trained_bytes"] and one["frozen_grads"] == 0


@pytest.mark.parametrize("kind", MODELS)
def test_a_run_with_adapters_resumes_bit_for_bit(kind, folder, tmp_path):
    job = job_of(tmp_path / "a", folder, TUNES["lora"], MODELS[kind])
    whole = run_ranks(train, 2, job)[0]
    broken = job_of(tmp_path / "b", folder, TUNES["lora"], MODELS[kind])
    first = run_ranks(train, 2, broken, 2)[0]
    second = run_ranks(train, 2, broken, None, True)[0]
    assert first["losses"] + second["losses"] == whole["losses"]
    assert all(torch.equal(second["values"][name], value) for name, value in whole["values"].items())


@pytest.mark.parametrize("tune", ["all", "biases", "by name"])
@pytest.mark.parametrize("kind", MODELS)
def test_an_export_is_loaded_by_transformers_and_says_the_same(kind, tune, folder, tmp_path):
    trained = run_ranks(train, 2, job_of(tmp_path, folder, TUNES[tune], MODELS[kind]))[0]
    export(tmp_path / "small", tmp_path / "out")
    model = folders.load(tmp_path / "out")
    torch.testing.assert_close(model(torch.arange(12).view(1, 12) * 3).logits, trained["logits"], rtol=1e-5, atol=1e-5)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("kind", MODELS)
def test_an_adapter_is_loaded_by_peft_and_says_the_same(kind, folder, tmp_path):
    from peft import PeftModel

    trained = run_ranks(train, 2, job_of(tmp_path, folder, TUNES["lora"], MODELS[kind]))[0]
    export(tmp_path / "small", tmp_path / "out")
    model = PeftModel.from_pretrained(folders.load(folder), tmp_path / "out").eval()
    assert sum("lora_" in name for name in model.state_dict()) == sum("lora_" in name for name in trained["values"])
    logits = model(torch.arange(12).view(1, 12) * 3).logits
    torch.testing.assert_close(logits, trained["logits"], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits, folders.load(folder)(torch.arange(12).view(1, 12) * 3).logits, atol=1e-4), "the adapter does something"


def test_a_foreign_models_own_dropout_is_named_and_is_the_same_at_the_same_n(tmp_path):
    folders.make_folder(tmp_path / "gpt2", "GPT2", n_embd=32, n_head=2, n_layer=2, n_positions=64)
    jobs = [job_of(tmp_path / name, tmp_path / "gpt2", {}, "transformers") for name in "ab"]
    (note,) = check_model(jobs[0], 0)
    assert "attn_pdrop 0.1" in note and "number of workers" in note
    first, second = (run_ranks(train, 2, job)[0] for job in jobs)
    assert first["losses"] == second["losses"] and check_model(job_of(tmp_path, tmp_path / "gpt2", {}, "transformers"), 0) == [note]
    config = json.loads((tmp_path / "gpt2" / "config.json").read_text())
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(config | {key: 0.0 for key in config if "drop" in key}))
    assert check_model(jobs[0], 0) == []
    assert run_ranks(train, 2, job_of(tmp_path / "c", tmp_path / "gpt2", {}, "transformers"))[0]["losses"] != first["losses"]


def test_another_folder_in_the_place_of_the_frozen_weights_is_refused(folder, tmp_path):
    other = tmp_path / "base"
    folders.make_folder(other, "Llama", num_key_value_heads=2, attention_bias=True)
    job = job_of(tmp_path, other, TUNES["lora"])
    run_ranks(train, 1, job, 2)
    folders.make_folder(other, "Llama", num_key_value_heads=2, attention_bias=True, dtype=torch.bfloat16)
    with pytest.raises(Exception, match="frozen weights that are not there"):
        run_ranks(train, 1, job, None, True)


MISTAKES = {
    "no such parameter": ({"parameters": "nothing"}, ConfigError, "no parameter has such a name"),
    "no such target": ({"lora": {"targets": ["query"]}}, ConfigError, r"the blocks have linear layers called .*q_proj"),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_before_a_worker_starts(mistake, kind, folder, tmp_path):
    tune, error, says = MISTAKES[mistake]
    with pytest.raises(error, match=says):
        check_model(job_of(tmp_path, folder, tune, MODELS[kind]), 0)


def test_a_tokenizer_that_transformers_own_model_has_no_rows_for_is_told_before_a_worker_starts(folder, tmp_path):
    check_model(job_of(tmp_path, folder, {}, "transformers"), 300)
    with pytest.raises(ConfigError, match="is 300; the tokenizer has 301 tokens"):
        check_model(job_of(tmp_path, folder, {}, "transformers"), 301)


@pytest.mark.parametrize("change", [{"intermediate_size": 64}, {"num_hidden_layers": 4}, {"num_hidden_layers": 2}, {"attention_bias": False}])
def test_weights_of_another_shape_are_refused_in_both_directions(change, tmp_path):
    folders.make_folder(tmp_path, "Llama", attention_bias=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError, match="in the (files|model)"):
        check_model(job_of(tmp_path, tmp_path, {}), 0)
