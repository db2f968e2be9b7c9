"""The quickstart as a newcomer meets it: the Makefile's own commands, with fewer steps, and every command that the README names."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rayzero3.train.run import read_lines
from tests.cli.conftest import Cli

ROOT = Path(__file__).parent.parent.parent


def demo_commands(corpus: Path) -> list[list[str]]:
    """What `make demo` runs after the set-up, as words after `rayzero3`."""
    makefile = (ROOT / "Makefile").read_text()
    recipe = re.search(r"^demo:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)[1]
    python = sys.executable
    stdlib = subprocess.run([python, "-c", 'import sysconfig; print(sysconfig.get_path("stdlib"))'], capture_output=True, text=True, check=True).stdout.strip()
    lines = [re.sub(r'"\$\$\(.*?\)"', stdlib, line).replace("$(CORPUS)", str(corpus)) for line in recipe.split("\n") if line.strip()]
    return [shlex.split(line.strip().removeprefix("$(BIN)/rayzero3")) for line in lines]


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """The quickstart at 8 steps on the modules and packages up to the letter f, submitted and followed to its end, on the head that the submit starts by itself.

    Yields the CLI, its output, the run's folder and the words of the submit.
    """
    folder = tmp_path_factory.mktemp("quickstart")
    cli = Cli(folder / "state")
    tokenize, submit = demo_commands(folder / "stdlib")
    assert (tokenize[0], submit[0]) == ("tokenize", "submit")
    told = cli(*tokenize, "--exclude", "[g-z]*")  # a part of the library: the suite runs at every commit
    assert "1,024 tokens" in told
    few = ["train.steps=8", "validation.every_steps=4", "validation.samples=8", "checkpoint.every_steps=4", "train.micro_batch=4"]
    few += [f"data.path={folder / 'stdlib'}", f"storage={folder / 'runs'}"]
    submit = [submit[0], str(ROOT / submit[1]), *(word for change in few for word in ("--set", change))]
    output = cli(*submit)
    yield cli, output, folder / "runs" / "quickstart", submit
    cli("cluster", "down")


def steps_of(run: Path) -> list[int]:
    return [line["step"] for line in read_lines(run / "metrics.jsonl")]


def test_the_follower_sees_progress_checkpoints_the_curve_and_what_counting_gives(quickstart):
    _, output, run, _ = quickstart
    assert "starting a Ray head on this machine, on loopback" in output
    assert re.search(r"dashboard +http://127.0.0.1:\d+/#/jobs/quickstart-", output)
    assert "dtypes: parameters fp32, compute fp32" in output
    assert re.search(r"memory of each worker: [\d.]+ MiB between steps \(12 bytes x [\d,]+ / 2 \+ alignment\)", output)
    assert re.search(r"step 8/8  loss \d\.\d+  gradient norm [\d.]+  [\d,]+ tokens/s  0s left", output)
    assert "step 4  validation loss" in output and "checkpoint checkpoints/step-00000008.attempt-0001" in output
    assert re.search(r"validation loss after step 8: [\d.]+ nats/token\n.*unigram [\d.]+, smoothed bigram [\d.]+", output)
    assert "training loss" in output and "┤" in output and "rayzero3 cluster down" in output
    assert (run / "checkpoints/step-00000008.attempt-0001/manifest.json").exists()


def test_status_list_and_logs_tell_the_same(quickstart):
    cli, output, run, _ = quickstart
    status = cli("status", "quickstart")
    assert "SUCCEEDED" in status and "8 of 8" in status and str(run) in status
    assert re.search(r"quickstart +quickstart-\d+-\d+ +SUCCEEDED", cli("list"))
    assert "step 8/8" in cli("logs", "quickstart") and "step 8/8" in output


GAUGES = """
import time, urllib.request
from rayzero3.cli import auth, head
auth.use(own_head=True)
import os
os.environ.update(head.ENVIRONMENT)
import ray
ray.init(address=head.recorded().gcs, log_to_driver=False)
ports = [node["MetricsExportPort"] for node in ray.nodes()]
for _ in range(300):  # until they are those of the run that goes on after step 8
    text = "".join(urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode() for port in ports)
    steps = [line for line in text.splitlines() if line.startswith("ray_rayzero3_step{") and 'run="quickstart"' in line and 'rank="0"' in line]
    found = max((float(line.split()[-1]) for line in steps), default=0)
    if found > 8 and all('ray_rayzero3_' + name in text for name in ("loss", "tokens_per_s")):
        break
    time.sleep(0.2)
else:
    raise SystemExit(f"no gauges on Ray's own metrics endpoint after step 8:\\n{text}")
"""


def test_submitted_again_it_goes_on_shows_gauges_and_a_stop_saves_the_step_it_is_at(quickstart):
    cli, _, run, submit = quickstart
    longer = [word.replace("train.steps=8", "train.steps=100000") for word in submit]
    cli(*longer, "--detach")
    assert "already" in cli(*longer, "--detach", code=2)
    follower = cli.start("logs", "quickstart", "--follow")
    until = time.monotonic() + 300
    while (steps := steps_of(run))[-1] < 10:
        assert time.monotonic() < until, "the job does not get going:\n" + cli("logs", "quickstart")
        time.sleep(0.2)
    assert steps[8] == 9, "the step after the last of the run before"
    cli.python("-c", GAUGES)
    assert "STOPPED" in cli("stop", "quickstart")
    text, _ = follower.communicate(timeout=60)
    assert follower.returncode == 130 and "attempt 2 goes on after step 8" in text and "submit the job again to go on" in text
    assert (run / f"checkpoints/step-{steps_of(run)[-1]:08d}.attempt-0002/manifest.json").exists()


def test_the_dashboard_lists_the_job_with_its_name(quickstart):
    cli, *_ = quickstart
    code = """
import os, urllib.request
from rayzero3.cli import auth, head
auth.use(own_head=True)
token = open(os.environ["RAY_AUTH_TOKEN_PATH"]).read()
request = urllib.request.Request(head.recorded().dashboard + "/api/jobs/", headers={"Authorization": "Bearer " + token})
print(urllib.request.urlopen(request).read().decode())
"""
    jobs = json.loads(cli.python("-c", code))
    assert any((job.get("metadata") or {}).get("name") == "quickstart" for job in jobs)
