"""What a container must be given to reach its devices: device list strategies to container edits. Pure."""
