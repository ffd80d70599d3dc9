"""Replaces NVIDIA's mps-control-daemon on a node without shared GPUs: wait for SIGTERM."""

import signal

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
signal.sigwait([signal.SIGTERM])
