"""How GPUs are linked, what of them is served, and why GPUs were chosen: as text, as a picture, as plain objects. Pure."""
