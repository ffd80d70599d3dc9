"""An init container of NVIDIA's chart, which has nothing to do here."""
