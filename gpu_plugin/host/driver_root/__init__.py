"""The files of a driver installation below its root directory, wherever that is mounted for this process. Blocks."""
