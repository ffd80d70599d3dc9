"""Labels that are told from the others by name."""

from gpu_plugin.config.names import DOMAIN

PRESENT = f"{DOMAIN}/gpu.present"
"""That there is a GPU. GPU Feature Discovery leaves this one to NVIDIA's operator and to people."""

TIMESTAMP = f"{DOMAIN}/gfd.timestamp"
"""Unix time in whole seconds when the others came to be what they are."""
