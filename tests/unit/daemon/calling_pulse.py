"""A pulse with which a test sees each ring."""

from collections.abc import Callable

from gpu_plugin.runtime.pulse import Pulse


class CallingPulse(Pulse):
    """Makes a call at each ring."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()
        self._call = call

    def ring(self) -> None:
        super().ring()
        self._call()
