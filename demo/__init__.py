"""The stand-in kubelet, and a demonstration of the daemon in a few seconds, without a GPU or a cluster.

`python -m demo` plays the demonstration. Tests and benchmarks use the stand-in kubelet.
"""
