"""The former place of `threads.SlowCall`, for callers that import it from here."""

from gpu_plugin.runtime.threads import SlowCall

__all__ = ["SlowCall"]
