"""Replaces NVIDIA's config-manager on a node without the label: link the default config, and end if ONESHOT is true."""

import os
import signal
from pathlib import Path

config = Path(os.environ["CONFIG_FILE_SRCDIR"], os.environ["DEFAULT_CONFIG"])
link = Path(os.environ["CONFIG_FILE_DST"])

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
config.read_text()
link.unlink(missing_ok=True)
link.symlink_to(config)
if os.environ["ONESHOT"] != "true":
    signal.sigwait([signal.SIGTERM])
