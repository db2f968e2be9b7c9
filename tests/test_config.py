"""A wrong job file teaches: every fault is named at once, with what, got, expected, do."""

from __future__ import annotations

import pickle

import pytest

from rayzero3.config import load_job, parse_job
from rayzero3.errors import CheckpointError, ConfigError, RayZero3Error

GOOD = {"name": "job", "model": {"layers": 2, "width": 64, "heads": 4}, "data": {"path": "shards"}}


def changed(**changes):
    return {key: {**GOOD.get(key, {}), **value} if isinstance(value, dict) else value for key, value in {**GOOD, **changes}.items()}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (changed(trian={}), r"trian is not a key of the job file. Did you mean train\?"),
        (changed(model={"layer": 3}), r"model.layer is not a key of the job file. Did you mean layers\?"),
        (changed(train={"zzz": 3}), "train.zzz is not a key.*Known keys here: steps, global_batch"),
        (changed(train={"steps": "many"}), "train.steps is 'many'; expected a whole number.*--set train.steps"),
        (changed(train={"steps": 2.5}), "train.steps is 2.5; expected a whole number"),
        (changed(train={"steps": True}), "train.steps is True; expected a whole number"),
        (changed(train={"steps": 0}), "train.steps is 0; expected greater than or equal to 1"),
        (changed(train={"learning_rate": -1}), "train.learning_rate is -1; expected greater than 0"),
        (changed(train={"compute_dtype": "fp8"}), "compute_dtype is 'fp8'; expected one of 'fp32', 'bf16' or 'fp16'"),
        (changed(train={"adam_betas": [0.9, 1.0]}), r"adam_betas is \[0.9, 1.0\]; both must be at least 0 and below 1"),
        (changed(train={"steps": 5, "warmup_steps": 6}), "warmup_steps is 6; it can't exceed train.steps, 5"),
        (changed(train={"final_learning_rate": 1.0}), "final_learning_rate is 1.0; it can't exceed"),
        (changed(workers={"timeout_s": "soon"}), "timeout_s is 'soon'; expected a number, or a time such as 90s"),
        (changed(workers=[1]), r"workers is \[1\]; expected a section"),
        (changed(name="a/b"), "name is 'a/b'; it names a folder"),
        ({"name": "job"}, "model is missing.*\n.*data is missing"),
        (changed(model={"width": 512, "heads": 12}), "model.heads is 12; model.width 512 must be a multiple of it. Try heads: 8 or width: 576."),
        (changed(model={"rotary_fraction": 0.1}), "rotary_fraction is 0.1; of 16 channels a head it rotates 1"),
    ],
)
def test_a_fault_is_named_with_what_to_do(raw, message):
    with pytest.raises(ConfigError, match=message) as failure:
        parse_job(raw)
    assert failure.value.exit_code == 2


def test_all_faults_are_told_at_once():
    with pytest.raises(ConfigError) as failure:
        parse_job(changed(train={"steps": 0, "stepz": 1}, seed=-1))
    assert len(str(failure.value).splitlines()) == 3


@pytest.mark.parametrize(("text", "message"), [("- a\n- b", "is a list"), ("", "is empty"), ("a: [", "is not YAML"), ("!!python/object:os.system {}", "is not YAML")])
def test_a_file_that_is_no_job_is_refused(tmp_path, text, message):
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_job(tmp_path / "job.yaml")
    with pytest.raises(ConfigError, match="not readable"):
        load_job(tmp_path / "nowhere.yaml")


def test_overrides_durations_and_relative_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("name: job\nmodel: {layers: 2, width: 64, heads: 4}\ndata: {path: shards}\ntrain: {learning_rate: 1e-3}\n")
    job = load_job("job.yaml", ("train.steps=50", "workers.timeout_s=2m", "seed=3"))
    assert (job.train.steps, job.workers.timeout_s, job.seed, job.train.learning_rate) == (50, 120.0, 3, 1e-3)
    assert job.data.path == tmp_path / "shards" and job.run_folder == tmp_path / "runs" / "job"
    assert (job.model.mlp, job.train.warmup, job.train.final_rate) == (256, 2, pytest.approx(1e-4))
    (tmp_path / "again.yaml").write_text(job.to_yaml())
    assert load_job("again.yaml") == job
    for text in ("train.steps", "=3", "name.x=1", "seed=[", "train.stepz=1"):
        with pytest.raises(ConfigError):
            load_job("job.yaml", (text,))


def test_errors_survive_pickling_with_all_four_parts():
    error = CheckpointError("the file", 3, "expected 4", "Mend it.")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.what, again.got, again.expected, again.do) == (CheckpointError, "the file", 3, "expected 4", "Mend it.")
    assert str(again) == "the file is 3; expected 4. Mend it."
    assert str(RayZero3Error("alone")) == "alone."
