"""`gpu-plugin`, and `python -m gpu_plugin`."""

import os
import sys

INTERRUPTED = 130
TERMINATED = 143
"""Exit status after an interrupt, and after a SIGTERM, as shells have it: 128 and the number of the signal."""

SERVING = frozenset({"run", "mps"})
"""Verbs that run until they are stopped: for them, SIGTERM is the order to end with exit status 0."""


def main() -> int:
    """Runs the command line. An interrupt ends it without a word, however early or late it comes."""
    try:
        return _main()
    except KeyboardInterrupt:
        return INTERRUPTED


def _main() -> int:
    import signal  # noqa: PLC0415 - where an interrupt is caught, as what follows

    # Who asks `run` or `mps` where it stands ends nothing: neither before there is an answer nor after.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    # The kernel drops a SIGTERM for which PID 1 of a container has no handler, so it has one before the long imports. There is
    # nothing to put in order until the event loop of `run` and `mps` replaces this handler.
    verb = (*sys.argv[1:2], "")[0]
    serves = verb in SERVING or verb.startswith("-")  # options without a verb are options of `run`
    terminated = 0 if serves else TERMINATED
    signal.signal(signal.SIGTERM, lambda *_: os._exit(terminated))
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else who started us had it ignored
    if heeded:  # an exception would end up in whatever is being imported, which cannot always pass it on
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    _have_standard_streams()
    from gpu_plugin import cli  # noqa: PLC0415 - most of the time before there is anything to interrupt

    try:
        if heeded:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return cli.main()
    finally:
        if heeded:  # what is left is the interpreter's own end
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def _have_standard_streams() -> None:
    """Has descriptors 0 to 2 open: what is opened next would take the number of a closed one, and what is said there."""
    try:
        while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
            os.set_inheritable(descriptor, True)
    except OSError:
        return
    os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
