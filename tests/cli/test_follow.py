"""Following a job whose connection breaks: every line once, and the exit code of the final status."""

from __future__ import annotations

import re
import socket
import threading
from types import SimpleNamespace

import pytest

from rayzero3.cli import follow as module
from rayzero3.cli.follow import follow
from rayzero3.errors import ClusterError

TEXT = "".join(f"line {number}\n" for number in range(50))


class Status(str):
    value = property(str)

    def is_terminal(self) -> bool:
        return self in ("SUCCEEDED", "FAILED")


class BrokenJobs:
    """A cluster whose streams break after so many characters, each at another place, and whose answers fail in between."""

    def __init__(self, breaks: list[int], failures: int = 0) -> None:
        self.breaks, self.failures = breaks, failures

    async def tail(self, job_id):
        end = self.breaks.pop(0)
        for at in range(0, end, 7):
            yield TEXT[at : min(end, at + 7)]
        if self.breaks:
            raise RuntimeError("WebSocket connection closed unexpectedly")

    def info(self, job_id):
        if self.failures:
            self.failures -= 1
            raise ClusterError("the cluster does not answer")
        return SimpleNamespace(status=Status("RUNNING" if self.breaks else "SUCCEEDED"))

    def log(self, job_id):
        if self.breaks:
            raise ClusterError("the cluster does not answer")
        return TEXT


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)


@pytest.mark.parametrize("breaks", [[0, 10, 10, 5, 200, 199, 300, 300], [0, 0, 0], [20]], ids=str)
def test_every_line_once_however_often_the_stream_breaks(breaks):
    shown, notes = [], []
    info = follow(BrokenJobs(list(breaks), failures=2), "id", shown.append, notes.append)
    assert "".join(shown) == TEXT and info.status == "SUCCEEDED"
    assert [note.split(";")[0] for note in notes] == ["connection lost", "connected again."]


def test_a_cluster_that_stays_away_is_given_up(monkeypatch):
    monkeypatch.setattr(module, "LOST_AFTER_S", 0.05)
    with pytest.raises(ClusterError, match="does not answer"):
        follow(BrokenJobs([10, 10], failures=10**9), "id", lambda text: None)


def test_a_stream_that_falls_silent_is_replaced(monkeypatch):
    monkeypatch.setattr(module, "SILENCE_S", 0.05)
    jobs, shown = BrokenJobs([30, len(TEXT)]), []
    healthy = jobs.tail

    async def silent_once(job_id):
        first = len(jobs.breaks) == 2
        async for piece in healthy(job_id) if not first else _first_then_silence(jobs):
            yield piece

    jobs.tail = silent_once
    assert follow(jobs, "id", shown.append).status == "SUCCEEDED"
    assert "".join(shown) == TEXT


async def _first_then_silence(jobs):
    import asyncio

    yield TEXT[: jobs.breaks.pop(0)]
    await asyncio.sleep(1000)


class Proxy:
    """A TCP proxy on loopback, in front of a dashboard, that can cut all its connections."""

    def __init__(self, target: str) -> None:
        host, port = target.removeprefix("http://").split(":")
        self._target, self._open = (host, int(port)), []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            upstream = socket.create_connection(self._target)
            self._open += [client, upstream]
            for source, sink in ((client, upstream), (upstream, client)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket) -> None:
        try:
            while piece := source.recv(65536):
                sink.sendall(piece)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def cut(self) -> None:
        """Break every connection, now."""
        broken, self._open = self._open, []
        for one in broken:
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            one.close()

    def close(self) -> None:
        self._server.close()
        self.cut()


def test_a_live_log_survives_cut_connections(cli, job_file):
    body = "import sys, time\nfor i in range(35):\n    print('line', i)\n    time.sleep(0.1)\nsys.exit(3)"
    job_id = cli.submit_stand_in(job_file("cut"), body)
    proxy = Proxy(cli.head["dashboard"])
    try:
        following = cli.with_token(cli.home / "token").start("logs", job_id, "--follow", "--address", proxy.address)
        text, cut_at = "", ["line 5\n", "line 25\n"]
        for line in following.stdout:
            text += line
            if line in cut_at:
                cut_at.remove(line)
                proxy.cut()
        assert following.wait(60) == 3
    finally:
        proxy.close()
    assert not cut_at, "both cuts were made"
    assert re.findall(r"^line (\d+)$", text, re.M) == [str(number) for number in range(35)]
    assert "Traceback" not in text and "FAILED" in text
