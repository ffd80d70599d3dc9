"""What the daemon says of itself, as Prometheus reads it: the status in, families of metrics out, as text. Pure."""
