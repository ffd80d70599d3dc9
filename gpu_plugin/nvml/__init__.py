"""The GPU driver: the only door to pynvml, and what is asked through it."""
