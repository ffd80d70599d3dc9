"""The daemon under a real kubelet, API server, scheduler and container runtime on this machine."""
