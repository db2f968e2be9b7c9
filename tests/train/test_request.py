"""A request for text: which model it means, where texts end, what is shown of a job that continues them, and how it fails."""

from __future__ import annotations

import json

import pytest

from rayzero3.cli.models import Texts
from rayzero3.errors import CheckpointError, CollectiveError, ConfigError, RayZero3Error, TrainingError
from rayzero3.train import generate
from rayzero3.train.generate import Request
from tests.jobs import small_job

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 32, "vocab_size": 40}


@pytest.mark.parametrize(("config", "key"), [({}, "init_from"), ({"attention_dropout": 0.1}, "transformers"), ({"model_type": "gpt2"}, "transformers")])
def test_a_folder_that_our_models_refuse_is_transformers_own(config, key, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_neox", "rotary_pct": 0.5, **SIZES, **config}))
    job, manifest, *_ = generate._source(Request(model=tmp_path, prompts=("a",), storage=tmp_path))
    assert manifest is None and getattr(job.model, key) == tmp_path and job.model.family == ("gpt_neox" if key == "init_from" else "transformers")


def test_a_text_ends_where_the_model_and_where_its_documents_end(tmp_path):
    model, data = tmp_path / "model", tmp_path / "data"
    model.mkdir()
    data.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "gpt_neox", "rotary_pct": 0.5, "eos_token_id": [3, 4], **SIZES}))
    (data / "manifest.json").write_text(json.dumps({"eod_id": 7}))
    job = small_job(tmp_path, model={"init_from": str(model)}, data={"path": str(data)})
    assert set(generate._ends(tmp_path, job)) == {3, 4, 7}
    assert generate._ends(tmp_path, small_job(tmp_path, data={"path": str(tmp_path)})) == []


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_texts_go_to_standard_output_and_the_rest_of_the_log_does_not(size, capsys):
    lines = [json.dumps({"prompt": 'a "b"\n', "text": "c"}), json.dumps({"prompt": "ä", "text": "d"}, ensure_ascii=False)]
    log = "\n".join(["INFO starting", lines[0], '{"other": 1}', lines[1], "error: cut off"])
    texts = Texts(('a "b"\n', "ä"))
    for start in range(0, len(log), size):
        texts.take(log[start : start + size])
    texts.end()
    shown = capsys.readouterr()
    assert shown.out.splitlines() == lines
    assert shown.err.splitlines() == ["INFO starting", '{"other": 1}', "error: cut off"]


class Wrapped(Exception):
    def __init__(self, cause: Exception) -> None:
        self.cause = cause


class RaysOwn(CheckpointError):
    """As Ray makes of an error that a task raised: a subclass whose text is a traceback."""

    def __str__(self) -> str:
        return "Traceback (most recent call last) ..."


def test_the_error_of_a_worker_that_failed_first_is_told_as_it_was_raised():
    failures = {0: CollectiveError("rank 1 died"), 1: Wrapped(RaysOwn("the weights", "damaged", None, "Put them back."))}
    found = generate._explain(failures)
    assert type(found) is CheckpointError and str(found) == "the weights is damaged. Put them back."
    other = generate._explain({0: CollectiveError("rank 1 died"), 1: MemoryError("line\nno memory left")})
    assert type(other) is TrainingError and str(other).startswith("worker 1 failed; no memory left.")
    assert isinstance(generate._explain({0: KeyError()}), RayZero3Error) and not isinstance(other, ConfigError)
