"""Every exception of this project.

    WanDistError
    +-- ConfigError          what was asked for cannot be done; nothing was started or lost
    |   +-- ModelFileError   a file on disk is not what it should be
    |   +-- MeshError          the mesh does not suit the model, the devices or the job
    |   +-- InsufficientMemoryError  a device has too little free memory
    +-- JobCancelled         the job was stopped on request; the group lives on
    +-- WorkerError          the worker group failed
    |   +-- WorkerStartError   it did not become ready
    |   +-- WorkerDied         a rank ended while it was needed
    |   |   +-- WorkerStopped  the group was told to end while it was needed
    |   |   +-- MachineLost    one of the group's other machines is gone
    |   +-- WorkerTimeout      no word within the deadline
    |   +-- RemoteError        a rank raised an error that is not a ConfigError
    +-- ProtocolError        a message that neither side should have sent
        +-- VersionMismatch  a message of another version of this project

A message says what is wrong, what was got, what is allowed, and what to do about it, in that order.
"""

from __future__ import annotations


class WanDistError(Exception):
    """Base of all errors that this project raises on purpose."""


class ConfigError(WanDistError):
    """The request cannot be carried out as it stands; nothing was started or lost."""


class ModelFileError(ConfigError):
    """A file on disk is missing, damaged, or of another kind than asked for."""


class MeshError(ConfigError):
    """The mesh does not suit the model, the devices or the job."""


class InsufficientMemoryError(ConfigError):
    """A device has less free memory than its shard needs."""


class JobCancelled(WanDistError):
    """The job was stopped on request; the group lives on."""


class WorkerError(WanDistError):
    """The worker group failed."""


class WorkerStartError(WorkerError):
    """The group did not become ready; the message ends with the tail of its log."""


class WorkerDied(WorkerError):
    """A rank ended while it was needed; the message carries its traceback or the tail of the log."""


class WorkerStopped(WorkerDied):
    """The group was told to end while it was needed: nobody wants the job any more."""


class MachineLost(WorkerDied):
    """One of the group's other machines is gone: starting again would only wait for it."""


class WorkerTimeout(WorkerError):
    """The group gave no sign of life within the deadline."""


class RemoteError(WorkerError):
    """A rank raised an unexpected error.

    Attributes: rank (global rank inside the plane), traceback (text of the remote traceback).
    """

    def __init__(self, message: str, *, rank: int, traceback: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback


class ProtocolError(WanDistError):
    """A message that neither side should have sent."""


class VersionMismatch(ProtocolError):
    """A message of another version of this project."""


# Errors that travel by name: what a rank raises, the client raises again as the same class.
CONFIG_ERRORS: dict[str, type[ConfigError]] = {
    kind.__name__: kind
    for kind in (ConfigError, ModelFileError, MeshError, InsufficientMemoryError)
}


def error_name(error: BaseException) -> str:
    """The name under which `error` travels; a subclass of a known class goes by that class."""
    for kind in type(error).__mro__:
        if kind.__name__ in CONFIG_ERRORS or kind is JobCancelled:
            return kind.__name__
    return type(error).__name__
