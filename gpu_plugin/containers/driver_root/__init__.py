"""The files of a driver installation below its root directory."""
