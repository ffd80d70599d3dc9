"""State that outlives the process: the state directory and the state log in it. And the locks for one daemon on each node."""
