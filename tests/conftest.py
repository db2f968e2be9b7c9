"""One Ray cluster of two raylets for the whole session, and token shards of real text."""

from __future__ import annotations

import logging
import os
import secrets
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
_state = tempfile.TemporaryDirectory(prefix="rayzero3-tests-")
_token = Path(_state.name, "token")
_token.write_text(secrets.token_hex(32))
_token.chmod(0o600)
# Ray reads these when it is imported, which is when the tests are collected.
os.environ.update(
    RAY_AUTH_MODE="token",
    RAY_AUTH_TOKEN_PATH=str(_token),
    RAY_USAGE_STATS_ENABLED="0",
    OMP_NUM_THREADS="1",
    RAY_TRAIN_HEALTH_CHECK_INTERVAL_S="0.2",
    RAY_TRAIN_ENABLE_PRINT_PATCH="0",
    RAY_TRAIN_ENABLE_PREEMPTION_WATCHER="0",  # a process for each start of workers, for machines that are taken back
    PYTHONPATH=os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
)


CLUSTER = {"test_baselines.py", "test_job.py", "test_stream.py", "test_tokenize.py", "test_shards.py"}
"""Tests that use the session's cluster: one process runs them all, and starts it. Another one runs all that start heads of their own."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Whole files to one process, and those that share a cluster to one and the same. (pytest 9.2 does not heed pytest-xdist's own groups.)"""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            parts = path.split("/")
            return "tests/cli" if "cli" in parts else "the cluster" if parts[-1] in CLUSTER else path

    return Groups(config, log)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """Two raylets of 4 logical CPUs each, token authentication on, this process connected as a driver.

    With a dashboard: where there is none, Ray Train waits 12 s for an answer from it at the end of every job. Its port is some way from those
    that the heads of other tests take at the same time.
    """
    import ray
    from ray.cluster_utils import Cluster

    from rayzero3.cli.head import _free_ports

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": True, "dashboard_port": _free_ports(20)[-1]})
    cluster.add_node(num_cpus=4)
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="session")
def shards(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token shards of a few packages of the standard library, 300 tokens of vocabulary."""
    from rayzero3.data.tokenize import tokenize

    out = tmp_path_factory.mktemp("shards")
    sources = [Path(sysconfig.get_path("stdlib"), name) for name in ("json", "email", "http")]
    tokenize(sources, out, tokenizer=None, vocab_size=300, pattern="*.py", validation_fraction=0.1)
    return out
