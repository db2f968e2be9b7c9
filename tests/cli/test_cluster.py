"""The head that we start: on loopback, beside other clusters, and gone after `down`."""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path

import pytest

from rayzero3.cli.head import _free_ports

BUSY_ONCE = """
import os
def hook(params, head):
    if not os.path.exists("{mark}"):
        open("{mark}", "w").close()
        raise RuntimeError("Timed out waiting for node info for node_id=0.")
"""
linux = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's /proc")


def descendants(pids: list[int]) -> set[int]:
    """These processes and all below them."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = set(pids) & set(parents)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def running(pids: set[int]) -> set[int]:
    """Those that run; a zombie does not."""
    alive = set()
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                alive.add(pid)
        except OSError:
            continue
    return alive


def listening(pids: set[int]) -> set[str]:
    """Addresses that these processes listen on."""
    sockets = set()
    for pid in pids:
        try:
            links = [os.readlink(f"/proc/{pid}/fd/{descriptor}") for descriptor in os.listdir(f"/proc/{pid}/fd")]
        except OSError:
            continue
        sockets |= {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                raw = bytes.fromhex(fields[1].split(":")[0])
                address = ipaddress.ip_address(b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4)))
                addresses.add(str(getattr(address, "ipv4_mapped", None) or address))
    return addresses


@linux
def test_two_nodes_on_loopback_beside_another_cluster_and_gone_after_down(cli, fresh, job_file):
    other = cli.head
    assert "2 nodes on this machine, 4 CPUs" in fresh("cluster", "up", "--nodes", 2, "--num-cpus", 2)
    assert "2 nodes on this machine, 4 CPUs" in fresh("cluster", "up"), "a second `up` finds the first"
    pids = descendants([node["pid"] for node in fresh.head["nodes"]])
    assert len(pids) > 10
    assert listening(pids) == {"127.0.0.1"}
    driver = "import ray\nray.init(log_to_driver=False)\nprint('nodes', len(ray.nodes()), ray.cluster_resources()['CPU'])"
    fresh.submit_stand_in(job_file("where"), driver)
    assert "nodes 2 4.0" in fresh("logs", "where", "--follow"), "the driver found its own cluster, not the one started first"
    running_job = fresh.submit_stand_in(job_file("sleeper"), "import time\ntime.sleep(1000)")
    pids = descendants([node["pid"] for node in fresh.head["nodes"]])
    assert running_job in fresh("cluster", "down")
    assert not running(pids)
    assert fresh.head is None
    assert cli.head == other and "no cluster" in fresh("list", code=3)
    cli("list")


def test_a_head_that_cannot_start_shows_the_end_of_its_log(fresh):
    fresh.variables["RAY_START_HOOK"] = "no.such.module"
    text = fresh("cluster", "up", code=3)
    assert "did not start" in text and "ModuleNotFoundError" in text and str(fresh.home / "head.log") in text
    assert fresh.head is None


def test_a_head_that_a_busy_machine_kept_waiting_is_started_again_and_its_two_cpus_do_for_two_workers_and_their_data(fresh, tmp_path, job_file, data):
    (tmp_path / "busy_once.py").write_text(BUSY_ONCE.format(mark=tmp_path / "mark"))
    fresh.variables |= {"RAY_START_HOOK": "busy_once.hook", "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"}
    fresh("cluster", "up", "--num-cpus", "2")
    assert (tmp_path / "mark").exists() and fresh.head is not None
    tight = job_file("tight", workers={"count": 2}, train={"steps": 3, "global_batch": 5, "micro_batch": 2})
    assert "step 3/3" in fresh("submit", tight)


def test_the_heads_ports_are_free_ones_that_the_system_never_deals_out_by_itself():
    first = _free_ports(2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first[0]))
        second = _free_ports(3)
    assert len(set(first)) == 2 and first[0] not in second and first[1] == second[0]
    with socket.socket() as dealt:
        dealt.bind(("127.0.0.1", 0))
        assert max(second) < dealt.getsockname()[1]


def test_a_stale_record_is_no_cluster(cli, fresh):
    fresh.home.mkdir(parents=True)
    record = (cli.home / "head.json").read_text()
    stale = record.replace('"time": 1', '"time": 0')
    assert stale != record
    (fresh.home / "head.json").write_text(stale)
    assert "no cluster" in fresh("list", code=3)
    assert "no cluster" in fresh("cluster", "down"), "a process with another start time is not ours to end"
    cli("list")
