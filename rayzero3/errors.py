"""The error family. An error teaches in four parts: what, got, expected, do.

Every class carries the process exit code that the command line ends with. Instances survive pickling, so that an error raised in
an actor arrives whole in the driver. This file imports nothing: the engine uses it on machines that have only torch.
"""

from __future__ import annotations


class RayZero3Error(Exception):
    """Base of all errors that are meant for a user to read.

    Args:
        what: The thing that is wrong, named as the user knows it (`model.heads`, a file, a layer).
        got: Its value. Left out of the text where it is None.
        expected: What it should have been, as a clause.
        do: The next thing to do, as a sentence.
    """

    exit_code = 1

    def __init__(self, what: str, got: object = None, expected: str | None = None, do: str | None = None) -> None:
        super().__init__(what, got, expected, do)
        self.what, self.got, self.expected, self.do = what, got, expected, do

    def __reduce__(self) -> tuple:
        return type(self), (self.what, self.got, self.expected, self.do)

    def __str__(self) -> str:
        text = self.what if self.got is None else f"{self.what} is {self.got}"
        if self.expected:
            text += f"; {self.expected}"
        text = text.rstrip(".") + "."
        return f"{text} {self.do}" if self.do else text


class ConfigError(RayZero3Error):
    """The job file or the command is wrong. Nothing was started."""

    exit_code = 2


class DataError(ConfigError):
    """The token shards are not what their manifest or the job says."""


class ClusterError(RayZero3Error):
    """The cluster can't run the job, can't be reached, or refuses us."""

    exit_code = 3


class StateError(RayZero3Error):
    """An engine call that the layer's state does not allow."""


class CollectiveError(RayZero3Error):
    """A collective failed, timed out, or met another collective on another rank."""


class CheckpointError(RayZero3Error):
    """A checkpoint can't be written, read, or does not fit the job."""


class TrainingError(RayZero3Error):
    """The run can't go on: a loss or a gradient that is not finite, or a worker that failed."""
