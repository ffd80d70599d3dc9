"""`gpu-plugin`, and `python -m gpu_plugin`."""

import os
import sys

# Exit status after an interrupt and after a SIGTERM: 128 and the number of the signal, as in shells
INTERRUPTED = 130
TERMINATED = 143

# Verbs that run until SIGTERM, which ends them with exit status 0
SERVING = frozenset({"run", "mps"})


def main() -> int:
    """Run the command line, and return its exit status. An interrupt at any time ends it without a traceback."""
    try:
        return _main()
    except KeyboardInterrupt:
        return INTERRUPTED


def _main() -> int:
    import signal  # noqa: PLC0415 - `main` catches an interrupt during this import

    # SIGUSR2 asks `run` and `mps` to log what they do. It must not end the process before that is possible.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    # The kernel drops a SIGTERM if PID 1 of a container has no handler for it, so install a handler before the long imports.
    # The event loop of `run` and `mps` replaces it. Until then there is nothing to clean up.
    verb = (*sys.argv[1:2], "")[0]
    serves = verb in SERVING or verb.startswith("-")  # options without a verb are options of `run`
    terminated = 0 if serves else TERMINATED
    signal.signal(signal.SIGTERM, lambda *_: os._exit(terminated))
    heeded = (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )  # else the parent process ignores SIGINT for us
    if heeded:  # a module that is being imported may swallow an exception
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    _have_standard_streams()
    from gpu_plugin import cli  # noqa: PLC0415 - a long import, for which SIGINT has the handler above

    try:
        if heeded:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return cli.main()
    finally:
        if heeded:  # only the end of the interpreter follows
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def _have_standard_streams() -> None:
    """Open descriptors 0 to 2 if they are closed. Otherwise the next opened file would get the number and the output of one."""
    try:
        while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
            os.set_inheritable(descriptor, True)
    except OSError:
        return
    os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
