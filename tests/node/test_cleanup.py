"""`gpu-plugin cleanup` removes all files that a real daemon leaves on a node."""

import anyio
import anyio.to_thread

from tests.node.daemon import GPU, healthy
from tests.node.forked import run


def cleanup(daemon, *more):
    directories = ("--state-dir", daemon.state, "--cdi-dir", daemon.specs, "--device-plugin-dir", daemon.directory)
    done = run("cleanup", *more, *directories)
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

    ended: list[tuple[int, str, str]] = []

    async def wait_and_clean_up():
        ended.append(await anyio.to_thread.run_sync(cleanup, daemon, "--wait"))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait_and_clean_up)
        await anyio.sleep(1)
        assert ended == []
        assert (await daemon.stop())[0] == 0
    [(code, out, err)] = ended
    assert (code, err) == (0, "")
    assert not daemon.state.exists()
    assert list(daemon.specs.iterdir()) == []
    assert [path.name for path in daemon.directory.glob("gpu-plugin-*")] == []
    assert f"{daemon.state}: removed" in out
    assert cleanup(daemon) == (0, "nothing of gpu-plugin is on this node\n", "")
