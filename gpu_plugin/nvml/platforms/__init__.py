"""What kind of node this is, and how its GPUs are found there: NVML, WSL, or Tegra."""
