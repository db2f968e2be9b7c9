"""Main: the command line `rayzero3`, and what its errors look like. Imports neither torch nor Ray, so that --help is instant."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TextIO

import click

from rayzero3 import __version__
from rayzero3.errors import RayZero3Error

address_option = click.option("--address", metavar="URL", help="The cluster's dashboard; without it the head on this machine.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="rayzero3")
def cli() -> None:
    """Train large language models on a Ray cluster, with ZeRO-3.

    Exit codes: 0 done, 1 the job failed, 2 the job file or the command is wrong, 3 the cluster can't run it, 130 interrupted or stopped.
    """


@cli.command()
@click.argument("job", type=click.Path())
@address_option
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Change a value of the job file, as --set train.steps=50.")
@click.option("--detach", is_flag=True, help="Return after the submit instead of following the job.")
def submit(job: str, address: str | None, overrides: tuple[str, ...], detach: bool) -> int:
    """Send a job file to the cluster and follow it.

    With no cluster to be found, starts a Ray head on this machine. Ctrl-C stops the following, not the job.
    """
    from rayzero3.cli import commands

    return commands.submit(job, address, overrides, detach)


@cli.command()
@click.argument("name")
@address_option
def status(name: str, address: str | None) -> int:
    """Show how far a job is."""
    from rayzero3.cli import commands

    return commands.status(name, address)


@cli.command()
@click.argument("name")
@address_option
@click.option("--follow", "-f", "following", is_flag=True, help="Go on until the job ends; exit as the job did.")
def logs(name: str, address: str | None, following: bool) -> int:
    """Show a job's log."""
    from rayzero3.cli import commands

    return commands.logs(name, address, following)


@cli.command("list")
@address_option
def list_command(address: str | None) -> int:
    """Show all jobs of the cluster."""
    from rayzero3.cli import commands

    return commands.list_jobs(address)


@cli.command()
@click.argument("name")
@address_option
def stop(name: str, address: str | None) -> int:
    """Stop a job and wait for its end."""
    from rayzero3.cli import commands

    return commands.stop(name, address)


@cli.command()
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option("--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="Folder that the token shards are written to.")
@click.option("--tokenizer", type=click.Path(path_type=Path), help="A tokenizer.json to use.")
@click.option("--vocab-size", type=click.IntRange(min=1), help="Train a tokenizer of this size on the input instead.")
@click.option("--pattern", default="*.txt", show_default=True, metavar="GLOB", help="Which files of a folder are read.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Which of them are not.")
@click.option("--validation-fraction", type=click.FloatRange(0, 1, max_open=True), default=0.05, show_default=True, help="Of documents.")
@click.option("--text-key", default="text", show_default=True, metavar="KEY", help="Field of a JSONL line that holds its text.")
def tokenize(
    inputs: tuple[str, ...],
    out: Path,
    tokenizer: Path | None,
    vocab_size: int | None,
    pattern: str,
    exclude: tuple[str, ...],
    validation_fraction: float,
    text_key: str,
) -> int:
    """Turn text into token shards.

    Each INPUT is a file or a folder. A text file is a document; of a JSONL file, each line is.
    """
    if (tokenizer is None) == (vocab_size is None):
        raise click.UsageError("Give one of --tokenizer FILE (use it) and --vocab-size N (train one).")
    from rayzero3.cli import commands

    return commands.tokenize(inputs, out.absolute(), tokenizer, vocab_size, pattern, exclude, validation_fraction, text_key)


@cli.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path, file_okay=False))
@click.option("--dtype", type=click.Choice(["fp32", "bf16", "fp16"]), help="Of the tensors; that of the run's model folder unless given, or fp32.")
def export(checkpoint: Path, out: Path, dtype: str | None) -> int:
    """Write a checkpoint as a Hugging Face folder.

    CHECKPOINT is a checkpoint or the folder of a run, whose newest one it is. A run with LoRA becomes an adapter in peft's format. Needs no
    GPU and little memory.
    """
    from rayzero3.cli import models

    return models.export(checkpoint.absolute(), out.absolute(), dtype)


@cli.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="What to continue; may be given several times.")
@click.option("--prompts", "file", type=click.File(encoding="utf-8"), help="A file with a prompt on each line.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Tokens added to a prompt at most.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="0 takes the likeliest token.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, show_default=True, help="Draw from the likeliest tokens of this probability.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of what is drawn.")
@click.option("--workers", type=click.IntRange(min=1), default=1, show_default=True, help="Workers on the cluster that share the model; one runs here.")
@click.option("--device", type=click.Choice(["auto", "cpu", "gpu"]), default="auto", show_default=True)
@click.option("--dtype", type=click.Choice(["fp32", "bf16", "fp16"]), help="To compute in; the run's unless given, fp32 for a folder.")
@click.option("--storage", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Folder shared by the nodes, for several workers.")
@address_option
def generate(
    model: Path,
    prompts: tuple[str, ...],
    file: TextIO | None,
    max_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    workers: int,
    device: str,
    dtype: str | None,
    storage: Path,
    address: str | None,
) -> int:
    """Continue prompts with a model: a checkpoint, the folder of a run, or a Hugging Face folder.

    Prints a line of JSON for each prompt: prompt and text.
    """
    prompts += tuple(line.rstrip("\n") for line in file) if file else ()
    if not prompts:
        raise click.UsageError("Give a --prompt TEXT, or --prompts FILE.")
    from rayzero3.cli import models

    choices = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed, "workers": workers, "device": device}
    return models.generate({"model": model.absolute(), "prompts": prompts, "compute_dtype": dtype, "storage": storage.absolute(), **choices}, address)


@cli.group()
def cluster() -> None:
    """Start or end a Ray cluster on this machine."""


@cluster.command()
@click.option("--num-cpus", type=click.IntRange(min=1), help="Logical CPUs of each node; the machine's cores unless given.")
@click.option("--nodes", type=click.IntRange(1, 16), default=1, show_default=True, help="Raylets, as if this machine were so many nodes.")
def up(num_cpus: int | None, nodes: int) -> int:
    """Start a Ray head on loopback, with token authentication."""
    from rayzero3.cli import commands

    return commands.cluster_up(num_cpus, nodes)


@cluster.command()
def down() -> int:
    """Stop its jobs, then end exactly the processes that `up` or `submit` started."""
    from rayzero3.cli import commands

    return commands.cluster_down()


def run(arguments: list[str] | None = None) -> int:
    """Run a command line; its exit code. A user's mistake is one message on standard error, never a traceback."""
    try:
        return cli.main(arguments, prog_name="rayzero3", standalone_mode=False) or 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except RayZero3Error as error:
        click.echo(f"error: {error}", err=True)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of a pipe left; nothing to say, and nobody to say it to
        return 1


def main() -> None:
    """Entry point of the program."""
    sys.exit(run())


if __name__ == "__main__":
    main()
