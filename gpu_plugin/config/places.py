"""Where things lie that every command knows of."""

STATE_DIR = "/var/lib/gpu-plugin"
"""The daemon's state directory, where no other is named."""
