"""An NVIDIA GPU device plugin for the kubelet: finds the node's GPUs, keeps their health true, and hands them to pods."""

__version__ = "0.1.0"
