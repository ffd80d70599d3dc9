"""CDI specifications: what a container runtime must add to a container for each device. Pure: facts in, documents out."""
