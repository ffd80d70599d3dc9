"""A node's GPUs without the GPUs: simulated hardware, a driver that answers as NVML does, and faults to inject."""
