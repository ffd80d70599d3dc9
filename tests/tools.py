"""`python -m tests.tools`: installs, builds and fetches what `make e2e` needs, so that no test's time limit covers it.

Everything comes from apt, Go, npm and pip as they are set up on this machine, and stays in the caches that
`tests/cluster/README.md` names. The tests only look for it.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from tests.chart import grafana, openapi, prometheus, versions
from tests.cluster.harness import binaries, release
from tests.real import archive, browser, cdi_library, image_build, podman, systemd, wheels

Install = Callable[[Callable[[str], None]], Any]
"""Installs one thing where it is missing, names each long step first, and raises MissingError where it cannot."""

INSTALLS: tuple[Install, ...] = (
    podman.install,
    systemd.install,
    archive.install,
    *(partial(binaries.install_tool, name) for name in binaries.TOOLS),
    *(partial(openapi.install, version) for version in versions.KUBERNETES_VERSIONS),
    prometheus.install,
    grafana.install,
    browser.install,
    browser.install_axe,
    cdi_library.install,
    wheels.install,
    image_build.install,
    partial(image_build.install, tag=image_build.AGAIN),
    partial(image_build.install, tag=image_build.SUCCESSOR, version=image_build.SUCCESSOR_VERSION),
    *(partial(image_build.install, tag=tag, version=version) for tag, version in release.IMAGES),
    binaries.install,
)


def install_all(installs: Iterable[Install], say: Callable[[str], None]) -> list[str]:
    """Run every installation, also after one failed: on a full disk, say. Return what cannot be had, in words."""
    missing = []
    for install in installs:
        try:
            install(say)
        except (binaries.MissingError, OSError, subprocess.SubprocessError) as error:
            missing.append(str(error))
    return missing


def main() -> int:
    """Returns the exit status: 1 if something cannot be had and E2E=required."""
    if os.environ.get("E2E_INSTALL") != "1":
        return 0
    began = time.monotonic()
    missing = install_all(INSTALLS, lambda step: print(f"{time.monotonic() - began:4.0f} s: {step}", flush=True))
    for each in missing:
        print(f"missing: {each}", file=sys.stderr)
    return 1 if missing and os.environ.get("E2E") == "required" else 0


if __name__ == "__main__":
    sys.exit(main())
