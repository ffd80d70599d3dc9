"""`python -m bench.fleet`: simulates a fleet of GPUs whose true state is known, under several health policies."""
