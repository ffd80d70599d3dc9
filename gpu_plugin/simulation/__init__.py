"""Simulates a node's GPUs: the hardware, a driver that answers like NVML, and faults to inject."""
