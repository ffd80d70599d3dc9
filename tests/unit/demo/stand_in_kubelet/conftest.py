from pathlib import Path

import pytest

from demo.stand_in_kubelet import StandInKubelet


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.fixture
async def kubelets(directory):
    """Makes started kubelets over `directory`; stops them and looks for descriptors left open."""
    before = open_descriptors()
    made: list[StandInKubelet] = []

    async def start(**settings):
        kubelet = StandInKubelet(directory, **settings)
        made.append(kubelet)
        await kubelet.start()
        return kubelet

    yield start
    for kubelet in made:
        await kubelet.stop()
    assert open_descriptors() == before


@pytest.fixture
async def kubelet(kubelets):
    return await kubelets()
