"""ProcessGroup: Ray Train's set-up of torch.distributed, bound to the network interface of each node's own address.

gloo and NCCL pick an interface by themselves, gloo the one that the host's name resolves to, which is often loopback: fine on one
machine, a hang on two. Ray knows the address under which the nodes reach each other; the interface that bears it is the right one.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from dataclasses import dataclass

import ray
from ray.train.torch import TorchConfig
from ray.train.torch.config import _TorchBackend

_SIOCGIFADDR = 0x8915


def interface_of(address: str) -> str | None:
    """Name of this machine's network interface that bears an IPv4 address; None if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def bind_to_node_address() -> str | None:
    """Make this process's gloo and NCCL use the interface of the node's address in the cluster. Returns its name."""
    name = interface_of(ray.util.get_node_ip_address())
    if name is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = name
    return name


class _Backend(_TorchBackend):
    def on_start(self, worker_group, backend_config):  # noqa: ANN001, the base class's signature
        worker_group.execute(bind_to_node_address)
        super().on_start(worker_group, backend_config)


@dataclass
class ProcessGroup(TorchConfig):
    """A TorchConfig for `TorchTrainer(torch_config=...)`."""

    @property
    def backend_cls(self) -> type[_Backend]:
        return _Backend
