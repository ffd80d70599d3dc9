"""`python -m bench.fleet`: a fleet of GPUs whose true state is known, under several policies of what the kubelet is told."""
