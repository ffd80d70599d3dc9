"""The daemon's metrics for Prometheus: converts the status to families of metrics, and these to text. Pure."""
