"""The container edits by which a container gets its devices, for each device list strategy. Pure."""
