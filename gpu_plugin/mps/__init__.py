"""Sharing GPUs by MPS: plans and runs MPS control daemons, and reports to the device plugin which daemons are up."""
