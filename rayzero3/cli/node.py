"""Node: one more raylet on this machine, beside the head's, on loopback. `python -m rayzero3.cli.node GCS_ADDRESS NUM_CPUS`.

`ray start --address` refuses to join a cluster on loopback (it takes it for one on another machine), so this makes Ray's own Node object,
as Ray's test clusters do. It runs until a signal or until one of its processes ends.
"""

from __future__ import annotations

import sys
import time

from ray._private.node import Node
from ray._private.parameter import RayParams


def main(gcs_address: str, num_cpus: int) -> int:
    """Start the raylet and stay. GPUs are the head's: this node would count the same ones again."""
    parameters = RayParams(
        gcs_address=gcs_address,
        node_ip_address="127.0.0.1",
        num_cpus=num_cpus,
        num_gpus=0,
        node_manager_port=0,
        min_worker_port=0,
        max_worker_port=0,
        dashboard_agent_listen_port=0,
    )
    node = Node(parameters, head=False, shutdown_at_exit=True, spawn_reaper=True)
    while not node.dead_processes():
        time.sleep(1)
    node.kill_all_processes(check_alive=False, allow_graceful=False)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
