"""Neighbour: another process of this host, whose memory this one may read.

Reading is process_vm_readv: one copy, done by the kernel, from where the other process has the bytes to where they are wanted here.

Note: permission. The kernel lets a process read others of the same user, except where it restricts ptrace (Yama, common on desktops): there
only those that the other has named. `admit` names them: one process where one is enough, else all of the user's, since there is no way to
name two. It is called only after reading was refused, and undone where it did not help.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import secrets
from pathlib import Path

_PR_SET_PTRACER = 0x59616D61
NOBODY, ANYBODY = 0, 2**64 - 1


class Gone(RuntimeError):
    """The process has ended."""


class Neighbour:
    """A process that has introduced itself.

    Args:
        name: For errors.
        pid: Its number.
        address: Where it keeps a word.
        word: That no other process has there.
    """

    def __init__(self, name: str, pid: int, address: int, word: int) -> None:
        self.name, self.pid, self.word, self._address = name, pid, word, address

    def look(self) -> None:
        """See that it lives and is the process that it was. Raises Gone, or OSError if it may not be read."""
        seen = ctypes.c_uint64()
        self.read(self._address, ctypes.addressof(seen), 8)
        if seen.value != self.word:
            raise Gone(f"{self.name} has ended, and another process has its number")

    def read(self, address: int, into: int, length: int) -> None:
        """Copy `length` bytes from an address of its to one of ours.

        Raises:
            Gone: it has ended, also if nobody has waited for it yet.
            OSError: it may not be read, or has nothing there.
        """
        while length:
            copied = _read_memory(self.pid, (ctypes.c_size_t * 2)(into, length), 1, (ctypes.c_size_t * 2)(address, length), 1, 0)
            if copied <= 0:
                code = ctypes.get_errno()
                raise Gone(f"{self.name} has ended") if code == errno.ESRCH else OSError(code, os.strerror(code))
            address, into, length = address + copied, into + copied, length - copied


class Introduction:
    """What this process tells those that are to read it. Keep it as long as they may look.

    Attributes:
        place: The same number in all processes that can call each other by their pids, on the same running system.
        numbers: The arguments of a Neighbour after its name.
    """

    def __init__(self) -> None:
        self._word = ctypes.c_uint64(secrets.randbits(62))
        self.place, self.numbers = _place(), (os.getpid(), ctypes.addressof(self._word), self._word.value)


def admit(whom: int) -> None:
    """Name who may read this process: a pid, ANYBODY or NOBODY of the same user. Does nothing where that is not restricted."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(whom), 0, 0, 0)


def _place() -> int:
    try:
        boot, names = Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")
    except OSError:
        return secrets.randbits(62)  # nobody else's
    return int.from_bytes(hashlib.blake2b(f"{boot}{names}".encode(), digest_size=7).digest(), "little")


def _open_libc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.process_vm_readv.restype = ctypes.c_ssize_t
    except (OSError, TypeError, AttributeError):  # not Linux
        return None
    return libc


_libc = _open_libc()


def _read_memory(*arguments: object) -> int:
    if _libc is None:
        raise OSError(errno.ENOSYS, "no process_vm_readv on this system")
    return _libc.process_vm_readv(*arguments)
