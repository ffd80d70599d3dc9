"""A stand-in kubelet, and a demonstration of the daemon that needs no GPU and no cluster and takes a few seconds.

`python -m demo` runs the demonstration. Tests and benchmarks use the stand-in kubelet.
"""
