"""Where MPS daemons and their clients meet. Pure. Paths are those below the host's MPS root (--mps-root).

Source: NVIDIA's plugin v0.20.0, cmd/mps-control-daemon/mps (Root and Daemon), so that either program's daemons are found.
"""

IN_CONTAINERS = "/mps"  # where NVIDIA's manifests mount the host's MPS root
PIPE = "pipe"  # directory below a resource's
LOG = "log"  # directory below a resource's
SHM = "shm"  # directory below the MPS root
CONTROL = "control"  # socket of a control daemon in its pipe directory
CONTROL_LOCK = "control_lock"  # file in its pipe directory that it holds a lock of
LOG_FIFO = "log"  # FIFO in its pipe directory: servers and clients write their log records to it
STARTED = ".started"  # NVIDIA's mps-control-daemon makes it in the resource's directory (daemon.go)


def resource_directory(root: str, resource: str) -> str:
    """Where all that belongs to one resource's daemon lies."""
    return f"{root.rstrip('/')}/{resource}"


def pipe_directory(root: str, resource: str) -> str:
    """Where clients of a resource meet its daemon."""
    return f"{resource_directory(root, resource)}/{PIPE}"


def container_pipe_directory(resource: str) -> str:
    """Where a container finds its resource's pipe directory."""
    return pipe_directory(IN_CONTAINERS, resource)


def log_directory(root: str, resource: str) -> str:
    """Where the daemon of a resource and its servers write their logs."""
    return f"{resource_directory(root, resource)}/{LOG}"


def shm_directory(root: str) -> str:
    """The shared memory of all daemons and clients; containers get it as /dev/shm."""
    return f"{root.rstrip('/')}/{SHM}"
