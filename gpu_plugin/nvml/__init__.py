"""Access to the NVIDIA driver through NVML. Only this package imports pynvml."""
