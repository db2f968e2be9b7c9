"""Jobs: the jobs of one cluster, through its dashboard's REST API."""

from __future__ import annotations

import difflib
import os
import shlex
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rayzero3 import __version__
from rayzero3.cli import auth
from rayzero3.config import Job
from rayzero3.errors import ClusterError, ConfigError

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

REQUEST_TIMEOUT_S = 20.0
STOP_WAIT_S = 30
"""What a stopped job has to save itself before it is killed."""

ENVIRONMENT = {
    "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S),
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "1",
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "PYTHONUNBUFFERED": "1",
}
"""What a job's driver and workers find in their environment. Visible to all who see the dashboard: nothing secret."""


class Jobs:
    """The jobs of one cluster.

    Args:
        client: Ray's client, connected.
        address: Of the dashboard, with http.
        own_head: Whether the cluster is our own head, so that this machine's interpreter runs the jobs.
    """

    def __init__(self, client: JobSubmissionClient, address: str, own_head: bool) -> None:
        self._client, self.address, self.own_head = client, address, own_head

    def submit(self, job: Job, entrypoint: str | None = None) -> str:
        """Send a job; its submission id. The job file travels as job.yaml, which the entrypoint finds in its folder."""
        facts = {"run_folder": str(job.run_folder), "steps": str(job.train.steps)}
        return self._submit(job.name, entrypoint or f"{self.python} -m rayzero3.train.launch job.yaml", job.to_yaml(), facts)

    def submit_generate(self, request: str) -> str:
        """Send a request for text, as YAML or JSON; its submission id."""
        return self._submit("generate", f"{self.python} -m rayzero3.train.generate job.yaml", request, {})

    def _submit(self, name: str, entrypoint: str, file: str, facts: dict[str, str]) -> str:
        with _explained(self.address), tempfile.TemporaryDirectory(prefix="rayzero3-job-") as folder:
            (Path(folder) / "job.yaml").write_text(file, encoding="utf-8")
            job_id = self._new_id(name)
            return self._client.submit_job(
                entrypoint=entrypoint,
                submission_id=job_id,
                runtime_env={"working_dir": folder, "env_vars": {**ENVIRONMENT, "RAYZERO3_JOB_ID": job_id}},
                metadata={"name": name, "rayzero3": __version__, **facts},
            )

    @property
    def python(self) -> str:
        """The interpreter of a job's driver, as a word of a shell command."""
        return shlex.quote(sys.executable) if self.own_head else "python"

    def all(self) -> list[JobDetails]:
        """Every job that rayzero3 submitted to this cluster, newest first."""
        with _explained(self.address):
            ours = [details for details in self._client.list_jobs() if details.submission_id and "rayzero3" in (details.metadata or {})]
        return sorted(ours, key=lambda details: details.start_time or 0, reverse=True)

    def find(self, name: str) -> JobDetails:
        """The job with this submission id, or the newest of this name.

        Raises:
            ConfigError: there is none; the error names the closest.
        """
        jobs = self.all()
        found = [job for job in jobs if job.submission_id == name] or [job for job in jobs if job.metadata["name"] == name]
        if found:
            return found[0]
        known = sorted({job.metadata["name"] for job in jobs})
        close = difflib.get_close_matches(name, known + [job.submission_id for job in jobs], n=1)
        do = f"Did you mean {close[0]}?" if close else f"Known names: {', '.join(known)}." if known else "Nothing was submitted to it yet."
        raise ConfigError(f"no job {name} on the cluster at {self.address}", None, None, do)

    def live(self, name: str) -> JobDetails | None:
        """The job of this name that waits or runs."""
        return next((job for job in self.all() if job.metadata["name"] == name and not job.status.is_terminal()), None)

    def info(self, job_id: str) -> JobDetails:
        """State and times of a job."""
        with _explained(self.address):
            return self._client.get_job_info(job_id)

    def log(self, job_id: str) -> str:
        """All that the job's driver has printed."""
        with _explained(self.address):
            return self._client.get_job_logs(job_id)

    def tail(self, job_id: str) -> AsyncIterator[str]:
        """The driver's log from its start, as it grows; ends with the job, or raises when the stream breaks."""
        return self._client.tail_job_logs(job_id)

    def stop(self, job_id: str) -> JobDetails:
        """Stop a job and wait until it has ended. Its workers have STOP_WAIT_S to save."""
        with _explained(self.address):
            self._client.stop_job(job_id)
        until = time.monotonic() + STOP_WAIT_S + REQUEST_TIMEOUT_S
        while not (info := self.info(job_id)).status.is_terminal():
            if time.monotonic() > until:
                raise ClusterError(f"job {job_id}", info.status.value, "it was told to stop and did not", "Look at its log, or try again.")
            time.sleep(0.3)
        return info

    def count_nodes(self) -> int:
        """Nodes of the cluster that are alive."""
        return len(self._nodes())

    def resources(self) -> dict[str, float]:
        """Logical CPUs and GPUs of the whole cluster, in use or not."""
        nodes = self._nodes()
        return {kind: sum(node["resources_total"].get(kind, 0.0) for node in nodes) for kind in ("CPU", "GPU")}

    def _nodes(self) -> list[dict]:
        with _explained(self.address):
            reply = self._client._do_request("GET", "/api/v0/nodes?detail=1&limit=10000")
            reply.raise_for_status()
            return [node for node in reply.json()["data"]["result"]["result"] if node["state"] == "ALIVE"]

    def _new_id(self, name: str) -> str:
        stem = f"{name}-{time.strftime('%y%m%d-%H%M%S')}"
        taken = {details.submission_id for details in self._client.list_jobs()}
        return next(text for number in range(1, 10**6) if (text := stem if number == 1 else f"{stem}-{number}") not in taken)


def given_address(option: str | None) -> str | None:
    """The address that the user names: the option, else RAY_API_SERVER_ADDRESS, else RAY_ADDRESS where it is one of a dashboard."""
    address = option or os.environ.get("RAY_API_SERVER_ADDRESS")
    if not address and os.environ.get("RAY_ADDRESS", "").startswith(("http://", "https://")):
        address = os.environ["RAY_ADDRESS"]
    if not address:
        return None
    if "://" not in address:
        address = f"http://{address}"
    if not address.startswith(("http://", "https://")):
        raise ConfigError("--address", address, "expected the dashboard's address", "For example --address http://127.0.0.1:8265.")
    return address.rstrip("/")


def connect(address: str, own_head: bool = False) -> Jobs:
    """Connect to the cluster whose dashboard is at `address`.

    Raises:
        ClusterError: it does not answer, is not Ray, or refuses our token.
    """
    auth.use(own_head)
    import logging

    from ray.job_submission import JobSubmissionClient

    class Client(JobSubmissionClient):
        """With a time limit on every request; without one, an address that swallows packets would hold us for ever."""

        def _do_request(self, method: str, endpoint: str, **options):
            return super()._do_request(method, endpoint, **{"timeout": REQUEST_TIMEOUT_S, **options})

    for name in ("ray.dashboard.modules.dashboard_sdk", "ray._private.runtime_env.packaging", "ray.dashboard.modules.job.sdk"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # These win over the argument, and the user's choice was made already.
    hidden = {name: os.environ.pop(name) for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS") if name in os.environ}
    try:
        with _explained(address):
            return Jobs(Client(address), address, own_head)
    finally:
        os.environ.update(hidden)


@contextmanager
def _explained(address: str) -> Iterator[None]:
    """What Ray's client raises, as a ClusterError that says what to do."""
    import requests
    from ray.exceptions import AuthenticationError

    try:
        yield
    except AuthenticationError:
        raise ClusterError(
            f"unauthorised: the cluster at {address} does not accept our token", None, None, f"Set {auth.VARIABLES} to the cluster's token."
        ) from None
    except requests.exceptions.HTTPError as error:
        code = error.response.status_code
        raise ClusterError(f"{address}", f"answering with status {code}", None, "Is it the dashboard of a Ray cluster?") from None
    except requests.exceptions.JSONDecodeError:
        raise ClusterError(f"{address}", None, "it answers, but not as a Ray dashboard does", "Give the dashboard's address.") from None
    except (ConnectionError, requests.exceptions.RequestException):
        raise ClusterError(
            f"the cluster at {address} does not answer", None, None, "Check the address, or leave it out to use a head on this machine."
        ) from None
    except RuntimeError as error:
        raise ClusterError(f"the cluster at {address} refused", str(error).strip().splitlines()[0], None, "See its dashboard.") from None
