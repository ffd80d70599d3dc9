"""`gpu-plugin run` on its way to the daemon."""

import subprocess
import sys

from click.testing import CliRunner

from gpu_plugin.cli.run import command


def test_garbage_is_looked_for_once_the_daemon_begins_but_not_among_its_modules():
    code = (
        "import gc\nfrom gpu_plugin import cli\nfrom gpu_plugin.daemon import process\n"
        "process.run = lambda settings, resolve: print(gc.isenabled(), gc.get_freeze_count() > 10_000) or 0\n"
        "raise SystemExit(cli.main(['run', '--simulate', 'h200']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True True\n"


def test_an_address_that_is_none_is_refused_before_anything_is_begun():
    refused = CliRunner().invoke(command, ["--http-address", "9480"])
    assert refused.exit_code == 2
    assert "--http-address: '9480' is not HOST:PORT, such as 10.0.0.7:9480" in refused.output
