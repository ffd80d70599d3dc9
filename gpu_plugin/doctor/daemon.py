"""The status of the running daemon. Blocks."""

import os
from pathlib import Path

import msgspec

from gpu_plugin.doctor.finding import Known, Unknown
from gpu_plugin.health.signals.orders import MAINTENANCE
from gpu_plugin.runtime import control
from gpu_plugin.status.model import Status


class Daemon(msgspec.Struct, frozen=True):
    """The status of the running daemon, None if no daemon answers; then `trouble` is the reason.

    `forbidden` is True if this process may not connect to the daemon's socket. `refused` is True if a daemon answered with an
    error, such as that it waits for another daemon; `trouble` is its text. `abandoned` is True if the socket exists and no
    process listens on it, so that the daemon was killed.
    """

    status: Status | None = None
    trouble: str = ""
    forbidden: bool = False
    refused: bool = False
    abandoned: bool = False


def read_daemon(state_dir: Path) -> Known[Daemon]:
    """Return the status of the daemon that uses this directory."""
    path = state_dir / control.SOCKET
    try:
        return Daemon(msgspec.convert(control.request(state_dir, "status"), Status))
    except msgspec.ValidationError as error:
        return Unknown(f"the daemon is of another version, so its status is not known here ({error})")
    except control.SilentDaemonError as error:
        return Unknown(str(error), hung=True)
    except control.NoDaemonError as error:
        forbidden = _forbidden(path)
        abandoned = not forbidden and path.is_socket() and not control.answers(state_dir)
        return Daemon(trouble=str(error), forbidden=forbidden, abandoned=abandoned)
    except control.ControlError as error:
        return Daemon(trouble=str(error), refused=True)


def released_gpus(status: Status) -> tuple[str, ...]:
    """Return the indices of the GPUs in a daemon's status that an operator has released for maintenance."""
    return tuple(str(gpu.index) for gpu in status.gpus if any(each.name == MAINTENANCE for each in gpu.signals))


def _forbidden(path: Path) -> bool:
    try:
        path.stat()
    except PermissionError:
        return True
    except OSError:
        return False
    return not os.access(path, os.W_OK, effective_ids=True)
