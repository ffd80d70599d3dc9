"""Paths that every command uses."""

STATE_DIR = "/var/lib/gpu-plugin"
"""The default state directory of the daemon."""
