"""Output of the running daemon for operators: logs, counters, readings, metrics and the status page."""
