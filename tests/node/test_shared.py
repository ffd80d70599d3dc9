"""Several resources, shared devices and names, from the config file to a pod."""

import pytest

from demo.stand_in_kubelet import AdmissionError
from tests.node.daemon import GPU, healthy

SHARED = "nvidia.com/gpu.shared"


def configured(directory, text):
    file = directory / "config.yaml"
    file.write_text(f"version: v1\n{text}\n")
    return "--config-file", str(file)


@pytest.mark.parametrize("live", [True, False])
async def test_a_lower_replica_count_gives_no_gpu_to_more_pods(kubelet, directory, daemon, live):
    def shared_by(count):
        sharing = f"sharing: {{timeSlicing: {{resources: [{{name: nvidia.com/gpu, replicas: {count}}}]}}}}"
        return configured(directory, f"selection: {{include: [0]}}\n{sharing}")

    daemon.start(*shared_by(4))
    await kubelet.wait_for(healthy(kubelet, 4))
    pods = {}
    for number in range(4):
        admitted = await kubelet.admit(f"pod-{number}", {GPU: 1})
        pods[admitted.ids[0].partition("::")[2]] = f"pod-{number}"
    kubelet.release(pods["0"])
    if live:
        shared_by(3)
        await kubelet.wait_for(lambda: kubelet.resources[GPU].allocatable < 4)
    else:
        daemon.kill()
        await kubelet.wait_for(lambda: kubelet.resources[GPU].streams == 0)
        daemon.start(*shared_by(3))
        await kubelet.wait_for(lambda: kubelet.resources[GPU].streams == 1)
    with pytest.raises(AdmissionError):
        await kubelet.admit("a fourth", {GPU: 1})
    await kubelet.wait_for(healthy(kubelet, 2))  # ::1 and ::2, which pods have; ::0 makes up for ::3
    with pytest.raises(AdmissionError):
        await kubelet.admit("a fourth", {GPU: 1})
    kubelet.release(pods["3"])
    await kubelet.wait_for(healthy(kubelet, 3), timeout=30)
    await kubelet.admit("a third", {GPU: 1})


async def test_shared_and_exclusive_gpus_side_by_side(kubelet, directory, daemon):
    entry = f"{{name: nvidia.com/gpu, rename: {SHARED}, devices: [0, 1], replicas: 4}}"
    daemon.start(*configured(directory, f"sharing: {{timeSlicing: {{resources: [{entry}]}}}}"))
    await kubelet.wait_for(healthy(kubelet, 6))
    await kubelet.wait_for(healthy(kubelet, 8, SHARED))
    exclusive = (await kubelet.admit("all", {GPU: 6})).allocations[0].response.envs["NVIDIA_VISIBLE_DEVICES"]
    shared = (await kubelet.admit("one", {SHARED: 1})).allocations[0].response.envs["NVIDIA_VISIBLE_DEVICES"]
    assert shared not in exclusive.split(",")
    daemon.fault(0, xid=79)  # reaches every replica of GPU 0, and nothing else
    await kubelet.wait_for(healthy(kubelet, 4, SHARED))
    assert healthy(kubelet, 6)()
    assert kubelet.registrations[GPU].total == kubelet.registrations[SHARED].total == 1
