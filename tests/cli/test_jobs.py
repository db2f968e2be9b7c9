"""The life of a job on a live head: submit, follow, status, list, logs, stop; who is let in; what is refused."""

from __future__ import annotations

import json
import os
import signal
from types import SimpleNamespace

import pytest

from rayzero3.cli.follow import exit_code
from tests.cli.conftest import write_job

LOOP = "import time\nfor i in range(1000):\n    print('line', i)\n    time.sleep(0.2)"


@pytest.fixture(scope="module")
def good(cli, tmp_path_factory) -> tuple[str, str]:
    """A job named `good` that ended well: its id, and what following it printed."""
    folder = tmp_path_factory.mktemp("good")
    run = folder / "runs" / "good"
    run.mkdir(parents=True)
    metrics = {"step": 7, "loss": 2.5, "grad_norm": 0.5, "tokens_per_s": 1234.5}
    (run / "metrics.jsonl").write_text(json.dumps(metrics) + "\n" + '{"step": 8, "lo')
    file = write_job(folder, "good")
    job_id = cli.submit_stand_in(file, "import os\nprint(open('job.yaml').readline(), os.environ['RAYZERO3_JOB_ID'])")
    return job_id, cli("logs", "good", "--follow")


def test_a_job_that_ends_well(cli, good):
    job_id, text = good
    assert "name: good" in text and job_id in text and "SUCCEEDED" in text
    assert cli("logs", job_id) in text
    status = cli("status", "good")
    assert all(part in status for part in (job_id, "SUCCEEDED", "runs/good", "7 of 1000", "2.5000", "1,23"))
    assert job_id in (listed := cli("list")) and "SUCCEEDED" in listed
    assert "has ended already: SUCCEEDED" in cli("stop", "good")


def test_an_unknown_name_is_answered_with_the_closest(cli, good):
    assert "Did you mean good?" in cli("status", "goood", code=2)


@pytest.mark.parametrize(
    ("status", "driver", "ours"), [("SUCCEEDED", 0, 0), ("STOPPED", None, 130), ("FAILED", 3, 3), ("FAILED", 77, 1), ("FAILED", None, 1)]
)
def test_every_final_status_has_its_exit_code(status, driver, ours):
    assert exit_code(SimpleNamespace(status=SimpleNamespace(value=status), driver_exit_code=driver)) == ours


def test_a_submit_is_followed_refused_twice_and_stopped(cli, job_file, data):
    file = job_file("real", train={"steps": 100_000})
    text = cli("submit", file, "--detach")
    job_id = text.split()[1]
    token = (cli.home / "token").read_text()
    assert job_id.startswith("real-") and f"{cli.head['dashboard']}/#/jobs/{job_id}" in text
    assert str(cli.home / "token") in text and token not in text
    again = cli("submit", file, code=2)
    assert job_id in again and "rayzero3 stop real" in again
    assert "STOPPED" in cli("stop", "real")
    assert "STOPPED" in cli("status", "real")


def test_ctrl_c_ends_the_following_and_neither_the_job_nor_the_head(cli, job_file):
    job_id = cli.submit_stand_in(job_file("long"), LOOP)
    following = cli.start("logs", "long", "--follow")
    for line in following.stdout:
        if line.startswith("line 3"):
            break
    os.killpg(following.pid, signal.SIGINT)
    rest = following.stdout.read()
    assert following.wait(30) == 130
    assert "goes on" in rest and "rayzero3 stop long" in rest and "Traceback" not in rest
    assert "RUNNING" in cli("status", job_id)
    cli("stop", "long")


@pytest.mark.parametrize("workers", [{"count": 1, "device": "gpu"}, {"count": 5, "device": "cpu"}], ids=["gpu", "cpu"])
def test_a_job_that_the_cluster_cannot_hold_is_refused_at_once(cli, job_file, data, workers):
    text = cli("submit", job_file("big", workers=workers), code=3)
    assert f"the number of workers is {workers['count']}" in text and "0 GPUs and 4 CPUs" in text
    assert "big" not in cli("list")


def test_a_wrong_or_missing_token_is_unauthorised(cli, tmp_path):
    wrong = tmp_path / "wrong"
    wrong.write_text("0" * 64)
    for other in (cli.with_token(wrong), cli.with_token(tmp_path / "absent"), cli.with_token(wrong, RAY_AUTH_MODE="disabled")):
        text = other("list", code=3)
        assert "unauthorised" in text and "RAY_AUTH_TOKEN_PATH" in text


def test_our_token_is_shown_to_our_head_only(cli, fresh):
    address = cli.head["dashboard"]
    assert cli("list", "--address", address)
    assert "unauthorised" in fresh("list", "--address", address, code=3)


def test_the_token_is_in_no_command_line_log_or_metadata(cli, good):
    token = (cli.home / "token").read_text()
    listing = "from rayzero3.cli import head\nfrom rayzero3.cli.jobs import connect\nprint(connect(head.recorded().dashboard, True).all())"
    seen = cli.python("-c", listing) + (cli.home / "head.log").read_text() + json.dumps(cli.head)
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{process}/cmdline", encoding="utf-8", errors="replace") as file:
                seen += file.read()
        except OSError:
            continue
    assert token not in seen
