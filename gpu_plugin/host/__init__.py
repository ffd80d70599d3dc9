"""Files of the host: the driver's installation, and what the node says of its kubelet and container runtime."""
