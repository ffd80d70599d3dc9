"""`gpu-plugin run` on its way to the daemon."""

import subprocess
import sys


def test_garbage_is_looked_for_once_the_daemon_begins_but_not_among_its_modules():
    code = (
        "import gc\nfrom gpu_plugin import cli, daemon\n"
        "daemon.run = lambda settings, resolve: print(gc.isenabled(), gc.get_freeze_count() > 10_000) or 0\n"
        "raise SystemExit(cli.main(['run', '--simulate', 'h200']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True True\n"
