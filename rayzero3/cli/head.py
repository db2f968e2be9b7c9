"""Head: the Ray cluster that we start on this machine, on loopback, with token authentication.

Note, loopback. `ray start` turns a node address of 127.0.0.1 into the machine's own, and so does every driver. Where Ray believes that it
has no multi-node support (the default on macOS and Windows, and RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 elsewhere) all of it uses loopback:
GCS, raylet, agents, dashboard, workers. That setting goes to the head and, through it, to the jobs.

Note, the temporary folder. A job's driver finds its cluster through the file ray_current_cluster in the cluster's temporary folder. In
Ray's default folder that file names the cluster that was started last on this machine, perhaps another one. So each state folder has a
temporary folder of its own, with a short path: the sockets in it may have 107 bytes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rayzero3.cli import auth
from rayzero3.cli.processes import Started, end
from rayzero3.errors import ClusterError

START_TIMEOUT_S = 120.0
"""A head takes 7 s on a free machine; this is for a busy one."""

_FIRST_PORT = 8265
"""Where the search for free ports begins: Ray's own choice for a dashboard."""

_PASSING_FAULTS = ("Timed out waiting for node info", "node timed out during startup", "address already in use")
"""What Ray says when a busy machine keeps it waiting for more than 30 s, or somebody takes a port first: worth a second try."""

ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "1",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
}
"""What the head and all that runs on it find in their environment, beside RAY_AUTH_*."""


@dataclass(frozen=True)
class Head:
    """A cluster that we started.

    Attributes:
        dashboard: Address of its dashboard and jobs API, with http.
        gcs: Address that drivers connect to.
        nodes: The process of each node, the head's first.
        log: What these processes printed.
    """

    dashboard: str
    gcs: str
    nodes: list[Started]
    log: Path

    def alive(self) -> bool:
        """Whether the head's own process still runs."""
        return self.nodes[0].process() is not None


def recorded() -> Head | None:
    """The head that head.json names, dead or alive. Needs no Ray."""
    try:
        raw = json.loads((auth.state_folder() / "head.json").read_text(encoding="utf-8"))
        return Head(raw["dashboard"], raw["gcs"], [Started(**node) for node in raw["nodes"]], Path(raw["log"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def find() -> Head | None:
    """Our head, if it lives."""
    head = recorded()
    return head if head is not None and head.alive() else None


def start(num_cpus: int | None = None, nodes: int = 1) -> Head:
    """Start our head, or return the one that lives.

    Args:
        num_cpus: Logical CPUs of each node; the machine's cores unless given.
        nodes: Raylets on this machine.

    Raises:
        ClusterError: it did not come up; the error shows the end of its log. Nothing is left running.
    """
    auth.use(own_head=True)
    with _lock():
        head = find()
        if head is not None:
            return head
        log = auth.state_folder() / "head.log"
        log.write_text("", encoding="utf-8")
        try:
            head = _bring_up(num_cpus, nodes, log)
        except ClusterError:
            if not any(text in log.read_text(encoding="utf-8", errors="replace") for text in _PASSING_FAULTS):
                raise
            head = _bring_up(num_cpus, nodes, log)
        _record(head)
        return head


def _bring_up(num_cpus: int | None, nodes: int, log: Path) -> Head:
    temp, (port, client_port), started = _temp_folder(), _free_ports(2), []
    dashboard, address_file = f"http://127.0.0.1:{port}", temp / "ray_current_cluster"
    try:
        started.append(_spawn(_head_command(num_cpus, port, client_port, temp), log))
        _until(lambda: address_file.exists() and address_file.read_text() and _count_nodes(dashboard) == 1, started, log)
        gcs = address_file.read_text().strip()
        for _ in range(nodes - 1):
            started.append(_spawn(["-m", "rayzero3.cli.node", gcs, str(num_cpus or os.cpu_count())], log))
        _until(lambda: _count_nodes(dashboard) == nodes, started, log)
    except BaseException:
        end(started)
        shutil.rmtree(temp.parent, ignore_errors=True)
        raise
    return Head(dashboard, gcs, started, log)


def stop() -> Head | None:
    """End exactly the processes that we started, and remove their temporary folder. The head that they were, or None if there was none."""
    with _lock():
        head = recorded()
        if head is None:
            return None
        lived = any(node.process() for node in head.nodes)
        end(head.nodes[::-1])
        (auth.state_folder() / "head.json").unlink(missing_ok=True)
        shutil.rmtree(_temp_folder().parent, ignore_errors=True)
        return head if lived else None


def _head_command(num_cpus: int | None, port: int, client_port: int, temp: Path) -> list[str]:
    command = ["-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    options = {
        "port": 0,
        "dashboard-host": "127.0.0.1",
        "dashboard-port": port,
        "dashboard-agent-listen-port": 0,
        "ray-client-server-port": client_port,
        "min-worker-port": 0,
        "max-worker-port": 0,
        "temp-dir": temp,
        "num-cpus": num_cpus or os.cpu_count(),
    }
    return command + [f"--{name}={value}" for name, value in options.items()]


def _spawn(arguments: list[str], log: Path) -> Started:
    """In a session of its own: neither this process's end nor Ctrl-C in the terminal reaches it."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")}
    with open(log, "ab") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=log.parent,
            env={**environment, **ENVIRONMENT},
            start_new_session=True,
        )
    return Started.of(process.pid)


def _until(ready, started: list[Started], log: Path) -> None:
    until = time.monotonic() + START_TIMEOUT_S
    while not ready():
        dead = [one for one in started if one.process() is None]
        if dead or time.monotonic() > until:
            text = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(encoding="utf-8", errors="replace"))
            tail = "\n".join("    " + line for line in text.splitlines()[-15:])
            why = "a process of it ended" if dead else f"no answer after {START_TIMEOUT_S:g} s"
            raise ClusterError("the local Ray head did not start", None, f"{why}; the end of {log}:\n{tail}\n", "Mend that and try again.")
        time.sleep(0.2)


def _count_nodes(dashboard: str) -> int:
    """Nodes that the dashboard counts as alive; 0 where it does not answer yet."""
    from rayzero3.cli.jobs import connect

    try:
        return connect(dashboard, own_head=True).count_nodes()
    except ClusterError:
        return 0


def _record(head: Head) -> None:
    path = auth.state_folder() / "head.json"
    text = json.dumps({**asdict(head), "log": str(head.log)}, indent=1)
    path.with_suffix(".new").write_text(text, encoding="utf-8")
    path.with_suffix(".new").rename(path)


@contextmanager
def _lock() -> Iterator[None]:
    """One start or stop at a time."""
    with open(auth.state_folder() / "head.lock", "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _temp_folder() -> Path:
    """This state folder's temporary folder, empty. Ray opens its own to everybody, so it lies in one that is ours alone."""
    root = Path("/tmp") if Path("/tmp").is_dir() else Path(tempfile.gettempdir())
    folder = root / f"rayzero3-{hashlib.sha256(str(auth.state_folder()).encode()).hexdigest()[:8]}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise ClusterError("the head's temporary folder", folder, "it belongs to someone else", "Set RAYZERO3_HOME to another folder.")
    folder.chmod(0o700)
    shutil.rmtree(folder / "ray", ignore_errors=True)
    return folder / "ray"


def _free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens at. Below those that the system deals out by itself: seconds pass until the head binds them,
    and its own processes ask for any free port meanwhile."""
    try:
        lowest_dealt = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        lowest_dealt = 32768
    found: list[int] = []
    for port in range(_FIRST_PORT, lowest_dealt):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            found.append(port)
        if len(found) == count:
            return found
    raise ClusterError("the ports of this machine", None, f"none is free between {_FIRST_PORT} and {lowest_dealt}", "End what listens there.")
