"""Threads, events, supervision, back-off and files for all other packages. Has no knowledge of GPUs."""
