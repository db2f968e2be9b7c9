"""The summary at the end of a run: a picture of the loss, the validation loss beside what counting gives, what to type next."""

from __future__ import annotations

import plotext

from rayzero3.config import Job
from rayzero3.data.baselines import ngram_losses
from rayzero3.train.run import Run, read_lines

WIDTH, HEIGHT = 90, 18
"""Characters."""


def loss_curve(run: Run) -> str:
    """The training and validation losses over the steps, drawn in characters."""
    metrics = read_lines(run.metrics)
    validations = {event["step"]: event["loss"] for event in read_lines(run.events) if event["event"] == "validation"}
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(WIDTH, HEIGHT)
    plotext.plot([line["step"] for line in metrics], [line["loss"] for line in metrics], label="training loss")
    if validations:
        plotext.scatter(list(validations), list(validations.values()), label="validation loss", marker="o")
    plotext.xlabel("step")
    return plotext.uncolorize(plotext.build()).rstrip()


def comparison(job: Job, run: Run) -> str:
    """The last validation loss beside those of a unigram and a bigram model on the same tokens, in nats per token."""
    last = [event for event in read_lines(run.events) if event["event"] == "validation"][-1]
    unigram, bigram = ngram_losses(job.data.path, job.data.sequence_length, job.validation.samples)
    return (
        f"validation loss after step {last['step']}: {last['loss']:.4f} nats/token\n"
        f"on the same tokens, counted on the training split: unigram {unigram:.4f}, smoothed bigram {bigram:.4f}"
    )


def next_commands(job: Job) -> str:
    """What a user may want to do now."""
    return (
        f"run folder: {job.run_folder}\n"
        f"again:      submit the same job with --set train.steps={2 * job.train.steps} and it goes on from here\n"
        f"look:       rayzero3 status {job.name}, rayzero3 logs {job.name}\n"
        f"use:        rayzero3 generate {job.run_folder} --prompt TEXT, rayzero3 export {job.run_folder} FOLDER\n"
        "done:       rayzero3 cluster down"
    )
