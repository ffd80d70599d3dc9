"""Tests of the daemon with a real kubelet, API server, scheduler and container runtime on this machine."""
