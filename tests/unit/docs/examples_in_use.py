"""Use the examples of CONTRIBUTING.md in the copy of the code on the path, and print the results as JSON.

A program of its own: `test_contributing.py` runs it in the copy, since the tests themselves have imported the code as it is.
"""

import json
import sys
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from click.testing import CliRunner

import gpu_plugin
from deploy import choices
from gpu_plugin.cli.run import command as run
from gpu_plugin.cli.simulate_allocation import command as simulate_allocation
from gpu_plugin.config.json_schema import json_schema
from gpu_plugin.config.resolve import resolve
from gpu_plugin.containers.edits import Access, container_edits
from gpu_plugin.devices.device import Device
from gpu_plugin.devices.node import Gpu, Node
from gpu_plugin.devices.plan import plan
from gpu_plugin.doctor.checks import CHECKS, examine
from gpu_plugin.health.observation import Facts, Sample
from gpu_plugin.health.policy import policy
from gpu_plugin.health.xid_table import XID_TABLE
from gpu_plugin.simulation.profile import load, names
from tests.unit.docs.test_docs import ROOT, TABLES, missing_rows
from tests.unit.health.watching import Watched

assert Path.cwd() in Path(gpu_plugin.__file__).parents, "the copy comes first"


def verdicts(asked: Watched) -> list[str]:
    """Return the verdicts of the new signal for hot and cool memory."""
    return [
        said.name for said in asked.steps(*(Sample(memory_temperature=celsius) for celsius in (80, 90, 90, 80, 80, 80)))
    ]


def allocation() -> dict[str, Any]:
    """Return the choice of the new policy, and its reason."""
    given = "--simulate t4-4 --policy roomiest --replicas 4 --available 0:1,1:3,2:2 --size 4 --json"
    answer = CliRunner().invoke(simulate_allocation, given.split(), catch_exceptions=False)
    told = json.loads(answer.stdout)
    return {"chosen": told["choice"]["counts"], "why": told["why"]}


def check(state_dir: str) -> str:
    """Return the result of the new check."""
    settings = resolve({"state_dir": state_dir}, {})
    [found] = examine("volatile-state", cast("Any", SimpleNamespace(settings=settings)))
    return found.status.value


def works() -> dict[str, object]:
    """Return the result of each example."""
    fatal = policy(resolve({}, {}, {"health": {"signals": {"warm-memory": "fatal"}}}), XID_TABLE)
    strategy = resolve({"device_list_strategy": "site-mounts"}, {}).device_list_strategy
    edits = container_edits([Device("a", "a", "GPU-a", "0")], Access(strategy))
    partitioned = Node((Gpu("GPU-a", 0), Gpu("GPU-b", 1, mig_enabled=True)))
    [resource] = plan(partitioned, resolve({}, {"MIG_STRATEGY": "unpartitioned"})).resources
    order, site = list(CHECKS), attrgetter("site")
    return {
        "signal": verdicts(Watched("warm-memory", Facts())),
        "signal, judged by the file": verdicts(Watched("warm-memory", Facts(), fatal)),
        "device list strategy": [mount.container_path for mount in edits.mounts],
        "MIG strategy": [device.id for device in resource.devices],
        "allocation policy": allocation(),
        "simulated node": [gpu.name for gpu in load("l4-2").gpus],
        "simulated node, by name": "l4-2" in names(),
        "option": [
            site(each)
            for each in (
                resolve({"site": "here"}, {}),
                resolve({}, {"SITE": "there"}),
                resolve({}, {}, {"flags": {"site": "elsewhere"}}),
            )
        ],
        "check": [check("/run/state"), check("/var/lib/gpu-plugin")],
        "check, in its place": order[order.index("volatile-state") - 1],
    }


json.dump(
    {
        "help": " ".join(CliRunner().invoke(run, ["--help"]).stdout.split()),
        "schema": json_schema(),
        "chart": {
            name: making((ROOT / "helm/gpu-plugin" / name).read_text())
            for name, making in (("values.schema.json", choices.schema), ("values.yaml", choices.values))
        },
        "missing rows": [missing_rows((ROOT / each[0]).read_text(), each[1], each[2]) for each in TABLES],
        "works": works(),
    },
    sys.stdout,
)
