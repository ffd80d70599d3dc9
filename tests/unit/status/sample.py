"""A status of a node with GPUs in different states, for tests of its readers."""

from typing import Any

from gpu_plugin.health.explain import Explanation
from gpu_plugin.status import model
from gpu_plugin.status.model import Gpu, Status

RESOURCE = "nvidia.com/gpu"


def signal(detail: str, verdict: str, name: str = "xid", **more: Any) -> Explanation:
    return Explanation(name=name, detail=detail, verdict=verdict, since=3600.0, **more)


def gpu(index: int, **more: Any) -> Gpu:
    return Gpu(index=index, uuid=f"GPU-{index}", bus_id=f"0000:1{index}:00.0", model="NVIDIA H100", **more)


GPUS = (
    gpu(0, holders=("default/train-0", "default/train-1")),
    gpu(
        1,
        state="withheld",
        verdict="APP",
        signals=(signal("Xid 31 (page fault)", "APP", xid=31),),
        withheld=("its MPS daemon is down",),
    ),
    gpu(2, state="degraded", verdict="DEGRADED", signals=(signal("NVLink 5 is down", "DEGRADED", "nvlink"),)),
    gpu(3, state="unhealthy", healthy=False, verdict="FATAL", signals=(signal("Xid 79", "FATAL", xid=79),)),
)

COUNTERS = model.Counters(
    snapshot_version=4,
    supported={"GPU-0": {"xid": True, "margin": False}},
    transitions=({"uuid": "GPU-3", "signal": "xid", "verdict": "FATAL", "total": 2},),
    xids=({"uuid": "GPU-1", "xid": 31, "class": "application", "total": 300, "first": 1e9},),
)

STATUS = Status(
    daemon=model.Process(version="1.2.3", python="3.11.7", pid=7, started=1.0),
    driver=model.Driver(version="580.1"),
    kubelet=model.Kubelet(socket="/k/kubelet.sock", directory="/k"),
    resources={
        RESOURCE: model.Resource(
            devices=9,
            healthy=6,
            retired=1,
            registration=model.Registration(registered=True, since=2.0, endpoint="/k/ours.sock"),
        )
    },
    gpus=GPUS,
    configuration=model.Configuration(since=1.0, reloads={"applied": 2, "unchanged": 0, "refused": 1}),
    device_list_strategy=model.Strategy(used=("envvar",)),
    counters=COUNTERS,
)
