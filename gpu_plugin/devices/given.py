"""Which devices were given to containers a moment ago, so that the kubelet may not have said so yet. The time is an argument."""

from collections.abc import Iterable

LATELY = 5.0
"""Seconds within which a kubelet has entered what it was given into its books, and says so to whoever asks."""


class Given:
    """Notes what Allocate answers. Calls from several threads do no harm: each is one step on a dict."""

    def __init__(self) -> None:
        self._at: dict[tuple[str, str], float] = {}

    def note(self, resource: str, ids: Iterable[str], now: float) -> None:
        """These devices of a resource are about to be given away."""
        for identifier in ids:
            self._at[resource, identifier] = now

    def lately(self, keys: Iterable[tuple[str, str]], now: float) -> frozenset[tuple[str, str]]:
        """Which of these (resource name, device id) may have been given away less than `LATELY` seconds before `now`."""
        for key, at in tuple(self._at.items()):
            if now - at >= LATELY:
                self._at.pop(key, None)
        return frozenset(key for key in keys if key in self._at)
