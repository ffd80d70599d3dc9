"""Detects the platform of this node (NVML, WSL or Tegra), and has a driver for each."""
