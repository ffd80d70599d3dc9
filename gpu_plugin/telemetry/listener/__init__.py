"""What the kubelet's probes and Prometheus ask of the daemon, over HTTP."""
