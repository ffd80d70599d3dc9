"""Keep the CDI specifications of the node written: when they are needed, the look at the host, the files and their devices."""
