"""Loopback: what the kernel counts on the interface `lo`, in a network of our own where the system lets us have one."""

from __future__ import annotations

import ctypes
import fcntl
import socket
import struct
import time
from pathlib import Path

_CLONE_NEWNET, _SIOCSIFFLAGS, _IFF_UP = 0x40000000, 0x8914, 1
_private = False


def make_private() -> bool:
    """Move this process, and all that it starts, into a network namespace with nothing in it but `lo`. Needs root; returns whether it worked."""
    global _private
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP))
    _private = True
    return True


def sent_bytes() -> int:
    """Bytes sent over `lo` since it exists, headers and acknowledgements included."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def idle_rate(seconds: float = 0.5) -> float:
    """Bytes per second that others send: the baseline to subtract. Nothing in a network of our own."""
    if _private:
        return 0.0
    before = sent_bytes()
    time.sleep(seconds)
    return (sent_bytes() - before) / seconds
