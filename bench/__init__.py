"""Speed and size of the daemon on a simulated 8-GPU node, as one table: `python -m bench`."""
