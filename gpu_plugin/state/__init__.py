"""What outlives the process: the state directory, the journal, events, and the lock that keeps a node to one daemon."""
