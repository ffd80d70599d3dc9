"""The HTTP listener: the kubelet's probes, Prometheus metrics, and the status page."""
