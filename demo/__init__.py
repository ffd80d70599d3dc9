"""What the daemon does, without a GPU or a cluster: the stand-in kubelet, and a demonstration of a few seconds.

`python -m demo` plays the demonstration. Tests and benchmarks use the stand-in kubelet.
"""
