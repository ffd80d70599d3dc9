"""What a real daemon leaves on a node, and that `gpu-plugin cleanup` takes all of it away."""

import os
import subprocess
import sys

from tests.node.daemon import GPU, healthy


def cleanup(daemon):
    directories = ("--state-dir", daemon.state, "--cdi-dir", daemon.specs, "--device-plugin-dir", daemon.directory)
    command = [sys.executable, "-m", "gpu_plugin", "cleanup", *map(str, directories)]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("DP_")}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    return done.returncode, done.stdout, done.stderr


async def test_after_a_life_with_faults_a_kill_and_orders_nothing_is_left(kubelet, daemon):
    daemon.start("--device-list-strategy", "cdi-cri")
    await kubelet.wait_for(healthy(kubelet, 8))
    daemon.fault(3, xid=79)
    await kubelet.wait_for(healthy(kubelet, 7))
    daemon.kill()  # its sockets stay behind
    daemon.start("--device-list-strategy", "cdi-cri")
    await kubelet.wait_for(lambda: kubelet.registrations[GPU].accepted == 2)

    code, out, err = cleanup(daemon)
    assert (code, out) == (1, "")
    assert "a daemon is running" in err

    assert (await daemon.stop())[0] == 0
    code, out, err = cleanup(daemon)
    assert (code, err) == (0, "")
    assert not daemon.state.exists()
    assert list(daemon.specs.iterdir()) == []
    assert [path.name for path in daemon.directory.glob("gpu-plugin-*")] == []
    assert f"{daemon.state}: removed" in out
    assert cleanup(daemon) == (0, "nothing of gpu-plugin is on this node\n", "")
