"""Many more pods than GPUs at the same time: each pod gets a GPU, and no two pods ever hold the same GPU."""

from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

from .harness.cluster import Cluster
from .harness.plugin import GPUS
from .harness.pods import Pod
from .harness.wait import expect, wait_until

SHORT = 50
LONG_GPUS = 2

SHELL = 'echo "begin $NVIDIA_VISIBLE_DEVICES"; sleep 1; echo end'


@dataclass(frozen=True, order=True)
class Hold:
    """The time that a pod held a GPU, as logged by its container."""

    begin: datetime
    end: datetime
    pod: str
    gpu: str


def hold(cluster: Cluster, pod: Pod) -> Hold:
    first, last = cluster.pods.log(pod)
    assert last.text == "end"
    return Hold(first.when, last.when, pod.name, first.text.removeprefix("begin "))


def test_fifty_pods_at_once_share_the_gpus_in_turn(cluster: Cluster) -> None:
    long = cluster.pods.run("long", gpus=LONG_GPUS)
    names = [f"short-{number:02}" for number in range(SHORT)]
    for name in names:
        cluster.pods.create(name, gpus=1, shell=SHELL)

    def all_done() -> list[Pod]:
        pods = [pod for pod in cluster.pods.all() if pod.name in names]
        failed = [str(pod) for pod in pods if pod.phase == "Failed"]
        assert not failed, "; ".join(failed)
        left = [str(pod) for pod in pods if pod.phase != "Succeeded"]
        expect(holds=not left, seen=f"{len(left)} left: {'; '.join(left[:5])}")
        return pods

    holds = sorted(hold(cluster, pod) for pod in wait_until(all_done, "all short pods succeed", within=120, every=0.5))

    assert len(holds) == SHORT
    turns: dict[str, list[Hold]] = defaultdict(list)
    for each in holds:
        turns[each.gpu].append(each)
    assert len(turns) == GPUS - LONG_GPUS
    assert not set(turns) & set(long.device_health)
    overlaps = [(one, two) for queue in turns.values() for one, two in pairwise(queue) if two.begin < one.end]
    assert not overlaps
    assert cluster.pods.get("long").running
