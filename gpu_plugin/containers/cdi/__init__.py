"""CDI specifications: the files and device nodes that a container runtime adds to a container for each device. Pure."""
