"""The packages' one direction, read from their imports; and that the engine needs torch alone."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "rayzero3"

MAY_IMPORT = {
    "errors": set(),
    "config": {"errors"},
    "engine": {"errors"},
    "models": {"errors", "config"},
    "data": {"errors"},
    "checkpoint": {"errors", "config", "engine", "models"},
    "train": {"errors", "config", "engine", "models", "data", "checkpoint"},
    "cli": {"errors", "config", "data", "checkpoint", "train", "__init__"},
    "__init__": {"config", "train"},
}
MAY_USE_RAY = {"data/stream.py", "data/tokenize.py", "train/generate.py", "train/launch.py", "train/process_group.py", "train/worker.py", "cli"}
KNOW_NOTHING_OF_RAY_OR_THE_ENGINE = ["models", "data/pack.py", "data/order.py", "train/schedule.py"]
OTHERS = ["ray", "pydantic", "yaml", "pyarrow", "safetensors", "click", "rich", "transformers", "tokenizers", "plotext", "numpy", "hypothesis"]
WITHOUT_OTHERS = f"import sys\nfor name in {OTHERS}: sys.modules[name] = None\n"
"""Code that makes everything but torch and pytest unimportable."""
FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Full names of all modules that a file imports, inside functions too; those under TYPE_CHECKING excepted."""
    found = set()
    tree = ast.parse((ROOT / path).read_text())
    skipped = {
        inner for node in ast.walk(tree) if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING" for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found.add(node.module)
    return found


def package(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


def test_the_files_are_found():
    assert len(FILES) > 20


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_run_one_way(path):
    used = {(name.split(".") + ["__init__"])[1] for name in imports(path) if name.split(".")[0] == "rayzero3"} - {package(path)}
    assert used <= MAY_IMPORT[package(path)], f"{path} imports {used - MAY_IMPORT[package(path)]}"
    if any(name.split(".")[0] == "ray" for name in imports(path)):
        assert str(path) in MAY_USE_RAY or package(path) in MAY_USE_RAY, f"{path} imports Ray"


@pytest.mark.parametrize("place", KNOW_NOTHING_OF_RAY_OR_THE_ENGINE)
def test_pure_parts_reach_neither_ray_nor_the_engine(place):
    for path in FILES:
        if str(path).startswith(place):
            assert not any(name == "ray" or name.startswith(("ray.", "rayzero3.engine")) for name in imports(path))


def test_collectives_have_one_door():
    users = {str(path) for path in FILES if package(path) == "engine" and "torch.distributed" in imports(path)}
    calls = {"all_gather", "isend", "irecv", "all_reduce", "broadcast", "reduce_scatter", "barrier", "scatter"}
    for user in users - {"engine/comm.py"}:
        text = (ROOT / user).read_text()
        assert not any(f"dist.{call}" in text for call in calls), f"{user} calls torch.distributed itself"
    assert "engine/comm.py" in users


def test_the_engine_imports_on_a_machine_with_torch_alone():
    subprocess.run([sys.executable, "-c", f"{WITHOUT_OTHERS}import rayzero3.engine\n"], check=True, cwd=ROOT.parent)


def test_the_gpu_tests_are_collected_on_a_machine_with_torch_and_pytest_alone():
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    code = f"{WITHOUT_OTHERS}import pytest\nsys.exit(pytest.main(['tests/gpu', '-q', '--collect-only', '-p', 'no:cacheprovider']))\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "test_parity.py" in done.stdout, done.stdout + done.stderr
