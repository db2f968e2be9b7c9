"""The README says what is: its job reference is that of the config classes, its job file and commands are those that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
import yaml
from click.testing import CliRunner
from pydantic import BaseModel

from rayzero3.cli.main import cli
from rayzero3.config import Job, load_job
from rayzero3.models.build import layers_of
from rayzero3.train.trainee import check_model
from tests.ranks import run_ranks

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def sections_in(annotation) -> list[type[BaseModel]]:
    """The sections that a field may hold."""
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return list(dict.fromkeys(section for part in get_args(annotation) for section in sections_in(part)))


def row(key: str, field, note: str = "") -> str:
    default = "required" if field.is_required() else "derived" if field.default is None and "derived" in field.description else field.default
    default = "none" if default is None else str(default).lower() if isinstance(default, bool) else default
    default = list(default) if isinstance(default, tuple) else default
    return f"| `{key}` | {default if default == 'required' else f'`{default}`'} | {note}{field.description} |"


def reference(section: type[BaseModel] = Job, prefix: str = "") -> list[str]:
    """The job reference, one table row a key; where a section may be one of several families, what only one of them has names it."""
    rows = []
    for name, field in section.model_fields.items():
        inner = sections_in(field.annotation)
        if not inner:
            rows.append(row(f"{prefix}{name}", field))
        elif len(inner) == 1:
            rows += reference(inner[0], f"{prefix}{name}.")
        else:
            found: dict[tuple[str, str], list[str]] = {}
            for choice in inner:
                for line in reference(choice, f"{prefix}{name}."):
                    key, text = line.split(" | ", 1)
                    found.setdefault((key, text), []).append(choice.model_fields["family"].default)
            shared = [families for families in found.values() if len(families) > 1]
            for (key, text), families in found.items():
                default, _, description = text.partition(" | ")
                rows.append(f"{key} | {default} | {description}" if families in shared else f"{key} | {default} | {families[0]}: {description}")
    return rows


def test_the_job_reference_is_that_of_the_config_classes():
    table = re.search(r"<!-- job reference -->\n(.*?)\n<!-- end -->", README, re.DOTALL)[1]
    assert table.splitlines()[2:] == reference(), "put this into README.md:\n" + "\n".join(reference())


def test_the_job_file_in_the_readme_is_the_quickstart():
    block = re.search(r"```yaml\n(.*?)```", README, re.DOTALL)[1]
    assert yaml.safe_load(block) == yaml.safe_load((ROOT / "jobs/quickstart.yaml").read_text())


def run_block(rank, world_size, code):
    found = {}
    exec(code, found)
    return float(found["loss"])


def test_the_engines_block_in_the_readme_runs():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert all(loss > 0 for loss in run_ranks(run_block, 2, code))


JOBS = sorted((ROOT / "jobs").glob("*.yaml"))


@pytest.fixture(scope="module")
def neighbours(tmp_path_factory):
    """A folder with a tiny model wherever a job file looks for one."""
    from tests.models import folders

    folder = tmp_path_factory.mktemp("neighbours")
    for source in {yaml.safe_load(path.read_text())["model"].get("init_from") for path in JOBS} - {None}:
        folders.make_folder(folder / source, "GPTNeoX" if "neox" in source else "Llama")
    return folder


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_every_job_file_loads_and_what_it_trains_is_in_its_model(path, neighbours, monkeypatch):
    monkeypatch.chdir(neighbours)
    job = load_job(path)
    assert job.name == path.stem
    check_model(job, 300)


def test_gpt_neox_20b_is_built_without_memory_and_has_its_parameters():
    parts = layers_of(load_job(ROOT / "jobs/pretrain_neox_20b.yaml").model, 0)
    parameters = [parameter for _, module in parts for parameter in module.parameters()]
    assert all(parameter.is_meta for parameter in parameters)
    assert sum(parameter.numel() for parameter in parameters) == pytest.approx(20.5e9, rel=0.02)


def test_every_command_in_the_documents_exists():
    """Commands and options named in `code` or in blocks; their behaviour is tested in tests/cli."""
    texts = [README, *(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")) + sorted((ROOT / "cluster").glob("*")))]
    used = {match for text in texts for match in re.findall(r"(?:^|`) *rayzero3 (cluster (?:up|down)|[a-z]+)((?: [^`\n#|]*)?)", text, re.MULTILINE)}
    assert len(used) > 5
    for command, rest in used:
        found = cli
        for word in command.split():
            assert word in found.commands, f"rayzero3 {command}"
            found = found.commands[word]
        known = {option for parameter in found.params for option in parameter.opts}
        assert set(re.findall(r"(?<!\S)--[a-z-]+", rest)) <= known | {"--help"}, f"rayzero3 {command}{rest}"


def test_every_target_of_make_that_the_readme_names_exists():
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"make ([a-z-]+)", README))
    assert {"demo", "test"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_help_names_every_exit_code():
    text = CliRunner().invoke(cli, ["--help"]).output
    assert all(re.search(rf"\b{code}\b", text) for code in (0, 1, 2, 3, 130))
