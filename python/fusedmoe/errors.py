"""The exceptions of fusedmoe: one class for each error code of the library.

Every message names the argument, what came, what was expected and what to do. Classes also derive
from the built-in exception that fits, so that ``except ValueError`` works where one expects it.
"""

from __future__ import annotations

__all__ = [
    "Busy",
    "DeviceError",
    "Error",
    "InternalError",
    "InvalidArgument",
    "IoError",
    "OutOfMemory",
    "StaleWeights",
    "Unsupported",
    "WorkspaceTooSmall",
    "from_code",
]


class Error(RuntimeError):
    """Base of all errors of fusedmoe. ``code`` is the library's name of the kind."""

    code = "internal"


class InvalidArgument(Error, ValueError):
    """A size, pointer, dtype, shape or id that is wrong; nothing was written."""

    code = "invalid_argument"


class Unsupported(Error, NotImplementedError):
    """Sound, but this build or device does not do it; the message says why."""

    code = "unsupported"


class StaleWeights(Error):
    """The weights changed, were released, or a refresh failed: call ``refresh()``."""

    code = "stale_weights"


class WorkspaceTooSmall(Error, ValueError):
    """Less than ``min_workspace_size()``; the message says need and have."""

    code = "workspace_too_small"


class Busy(Error):
    """The workspace or the weights are in use by another call."""

    code = "busy"


class OutOfMemory(Error, MemoryError):
    """The system or the device has no more memory."""

    code = "out_of_memory"


class DeviceError(Error):
    """An asynchronous fault of a device, or its driver refused a call."""

    code = "device"


class IoError(Error, OSError):
    """A file is missing, broken, or not what it claims to be."""

    code = "io"


class InternalError(Error):
    """A defect of this library: please report it."""

    code = "internal"


_CLASSES: dict[str, type[Error]] = {
    cls.code: cls
    for cls in (InvalidArgument, Unsupported, StaleWeights, WorkspaceTooSmall, Busy, OutOfMemory,
                DeviceError, IoError, InternalError)
}


def from_code(code: str, message: str) -> Error:
    """The exception for an error code of the library, by its name; the message stays whole."""
    return _CLASSES.get(code, InternalError)(message)
