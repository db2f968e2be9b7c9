"""A head of our own for the CLI's tests, the CLI as a process, and small files for it. No test imports Ray into its own process."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from rayzero3.data.manifest import Manifest, RowGroup, Shard

VARIABLES = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "HOME")

STAND_IN = """
import sys
from rayzero3.cli import head
from rayzero3.cli.jobs import connect
from rayzero3.config import load_job
print(connect(head.recorded().dashboard, own_head=True).submit(load_job(sys.argv[1]), sys.argv[2]))
"""


@dataclass
class Cli:
    """The command line with a state folder of its own, and a home folder that nothing may be written to."""

    home: Path
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        nowhere = self.home.parent / "home"
        nowhere.mkdir(exist_ok=True)
        return {**clean, "HOME": str(nowhere), "RAYZERO3_HOME": str(self.home), "COLUMNS": "160", **self.variables}

    def with_token(self, path: Path, **variables: str) -> Cli:
        """The same with a token that the user names."""
        return Cli(self.home, {**self.variables, "RAY_AUTH_TOKEN_PATH": str(path), **variables})

    def __call__(self, *arguments: object, code: int = 0) -> str:
        """Run a command; what it printed on both streams. Fails unless it ended with `code`, and on any traceback."""
        text = self.python("-m", "rayzero3.cli.main", *arguments, code=code)
        assert "Traceback" not in text
        return text

    def python(self, *arguments: object, code: int = 0) -> str:
        """Run the interpreter in the same environment."""
        command = [sys.executable, *map(str, arguments)]
        done = subprocess.run(command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=180)
        assert done.returncode == code, f"{command} ended with {done.returncode}, not {code}:\n{done.stdout}"
        return done.stdout

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        """Start a command as a terminal would: in a process group of its own, heeding Ctrl-C; its output on a pipe.

        A shell without job control starts what it puts into the background with SIGINT ignored, and children inherit that.
        """
        command = [sys.executable, "-u", "-m", "rayzero3.cli.main", *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        return subprocess.Popen(command, env=self.environment, text=True, start_new_session=True, preexec_fn=heed, **pipes)

    def submit_stand_in(self, job_file: Path, body: str) -> str:
        """Send a job whose driver is not the trainer but these lines of Python; its submission id."""
        script = job_file.with_name("stand_in.py")
        script.write_text(body, encoding="utf-8")
        return self.python("-c", STAND_IN, job_file, f"{sys.executable} -u {script}").splitlines()[-1]

    @property
    def head(self) -> dict | None:
        """What head.json says."""
        path = self.home / "head.json"
        return json.loads(path.read_text()) if path.exists() else None


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Cli]:
    """The CLI with an empty state folder: no cluster. What a test starts ends with it."""
    cli = Cli(tmp_path / "state")
    yield cli
    if (cli.home / "head.json").exists():  # whatever it holds: a test may have spoilt it
        cli("cluster", "down")


@pytest.fixture(scope="session")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    """The CLI with a live head of 4 logical CPUs."""
    cli = Cli(tmp_path_factory.mktemp("cli") / "state")
    cli("cluster", "up", "--num-cpus", 4)
    yield cli
    cli("cluster", "down")


def write_job(folder: Path, name: str = "small", **changes: object) -> Path:
    """Write a small job file into a folder, with changes to its sections; its path."""
    raw: dict = {
        "name": name,
        "model": {"layers": 1, "width": 16, "heads": 2, "rotary_fraction": 1.0},
        "data": {"path": str(folder / "data"), "sequence_length": 8},
        "workers": {"count": 1, "device": "cpu"},
        "storage": str(folder / "runs"),
    }
    for key, value in changes.items():
        raw[key] = {**raw[key], **value} if isinstance(raw.get(key), dict) and isinstance(value, dict) else value
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(raw), encoding="utf-8")
    return path


@pytest.fixture
def job_file(tmp_path: Path) -> Callable[..., Path]:
    """`job_file(name, section={...})` writes a small job file; its path."""
    return partial(write_job, tmp_path)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Token shards of 64 documents where `job_file` looks for them; a vocabulary of 31 tokens."""
    folder, documents, length = tmp_path / "data", 64, 40
    folder.mkdir()
    column = pa.array([[(row + at) % 31 for at in range(length)] for row in range(documents)], pa.list_(pa.uint16()))
    table = pa.table({"tokens": column, "length": pa.array([length] * documents, pa.int64())})
    shards = {}
    for split in ("train", "validation"):
        pq.write_table(table, folder / f"{split}-00000.parquet")
        shards[split] = (Shard(f"{split}-00000.parquet", (RowGroup(documents, documents * length),)),)
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    Manifest("-", hashlib.sha256(b"{}").hexdigest(), 31, 0, "uint16", (), shards).write(folder)
    return folder
