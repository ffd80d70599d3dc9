"""Directories and files that MPS daemons share with their clients, below the host's MPS root (--mps-root). Pure.

They are those of NVIDIA's plugin, so that each program finds the other's daemons. Source: version v0.20.0,
cmd/mps-control-daemon/mps (Root and Daemon).
"""

IN_CONTAINERS = "/mps"  # where NVIDIA's manifests mount the host's MPS root
PIPE = "pipe"  # directory below a resource's directory
LOG = "log"  # directory below a resource's directory
SHM = "shm"  # directory below the MPS root
CONTROL = "control"  # socket of a control daemon in its pipe directory
CONTROL_LOCK = "control_lock"  # file in its pipe directory that a control daemon locks
LOG_FIFO = "log"  # FIFO in its pipe directory, to which servers and clients write their log records
STARTED = ".started"  # NVIDIA's mps-control-daemon makes it in the resource's directory (daemon.go)


def resource_directory(root: str, resource: str) -> str:
    """Return the directory with all files of a resource's daemon."""
    return f"{root.rstrip('/')}/{resource}"


def pipe_directory(root: str, resource: str) -> str:
    """Return the pipe directory of a resource, through which clients connect to its daemon."""
    return f"{resource_directory(root, resource)}/{PIPE}"


def container_pipe_directory(resource: str) -> str:
    """Return the path of a resource's pipe directory in a container."""
    return pipe_directory(IN_CONTAINERS, resource)


def log_directory(root: str, resource: str) -> str:
    """Return the directory of the logs of a resource's daemon and its servers."""
    return f"{resource_directory(root, resource)}/{LOG}"


def shm_directory(root: str) -> str:
    """Return the directory of the shared memory of all daemons and clients; containers get it as /dev/shm."""
    return f"{root.rstrip('/')}/{SHM}"
