"""Views of the links of GPUs, of the served GPUs and of choices: as text, as a picture, as plain objects. Pure."""
