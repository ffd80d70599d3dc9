"""Sharing by MPS: what its daemons must be, running them, and telling the device plugin which of them are up."""
