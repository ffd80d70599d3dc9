"""State that outlives the process: the state directory, the journal and events. And the locks for one daemon on each node."""
