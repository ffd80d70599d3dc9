"""The daemon process: its parts, its status, and the commands of operators."""
