"""The Grafana dashboard of the chart: its rows and variables. `deploy/generate.py` writes it."""

from collections.abc import Mapping

from deploy import grafana
from deploy.gpu_rows import PER_GPU, PER_POD
from deploy.grafana import Json
from deploy.node_rows import FLEET, PER_NODE, PLUGIN
from deploy.queries import NODES

UID = "gpu-plugin"

ROWS = (FLEET, PER_NODE, PER_GPU, PER_POD, PLUGIN)

VARIABLES: Mapping[str, str] = {
    "cluster": "label_values(gpu_plugin_build_info, cluster)",
    "node": 'label_values(gpu_plugin_build_info{cluster=~"$cluster"}, node)',
    "gpu": f"label_values(gpu_plugin_gpu_info{{{NODES}}}, uuid)",
}
"""Grafana's queries for their values, by name. Where series have no label `cluster`, that one has none."""


def dashboard() -> Json:
    """The dashboard, as Grafana imports it."""
    what = "Which GPU is sick, why, whom it hits; and how the device plugins are."
    return grafana.dashboard(UID, "GPU plugin", what, ("gpu", "kubernetes"), ROWS, VARIABLES)
