"""Replaces NVIDIA's gpu-feature-discovery with a file of labels, not a NodeFeature.

As that program does, it removes the file on SIGTERM.
"""

import os
import signal
from pathlib import Path

FILE = Path("/etc/kubernetes/node-feature-discovery/features.d/gfd")
LABELS = {"gpu.product": "STAND-IN", "gpu.count": len(os.environ["STAND_IN_GPUS"].split(","))}

assert os.environ["GFD_USE_NODE_FEATURE_API"] == "false"
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
FILE.write_text("".join(f"nvidia.com/{name}={value}\n" for name, value in LABELS.items()))
signal.sigwait([signal.SIGTERM])
FILE.unlink(missing_ok=True)
