"""What the plugin wrote on its Node and outlives it: condition, taint, labels; and their removal."""

import shlex
from collections.abc import Iterator
from pathlib import Path

import anyio

from gpu_plugin.cluster.connection import UnreachableError, require_client
from gpu_plugin.cluster.labels.keeper import LABELS_FILE, Applied
from gpu_plugin.cluster.node_api import NodeApi
from gpu_plugin.cluster.node_condition import CONDITION, TAINT
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.state.directory import StateDirectory
from gpu_plugin.state.records import OWN_MARKS_FILE, OwnMarks

PATIENCE = 15.0
"""Seconds for all of it: who uninstalls waits."""


def take_back(state_dir: Path, node_name: str, kubeconfig: str) -> list[str]:
    """Takes back what is remembered in the state directory. Blocks. Returns a sentence for each thing, gone or still there."""
    state = StateDirectory(state_dir)
    written = state.read(OWN_MARKS_FILE, OwnMarks) or OwnMarks()
    applied = state.read(LABELS_FILE, Applied) or Applied()
    marks = [name for name, there in (("condition", written.condition), ("taint", written.taint)) if there]
    nodes = dict.fromkeys(marks, node_name) | ({"labels": applied.node} if applied.labels else {})
    if not nodes:
        return []
    return list(_sentences(nodes, anyio.run(_taken, nodes, kubeconfig), applied))


async def _taken(nodes: dict[str, str], kubeconfig: str) -> dict[str, str]:
    """Why each mark is still there; empty for those that are gone."""
    why = dict.fromkeys(nodes, f"the Kubernetes API did not answer within {PATIENCE:g} s")
    with anyio.move_on_after(PATIENCE):
        for mark, node in nodes.items():
            try:
                await _take(mark, node, kubeconfig)
            except (UnreachableError, ConfigError) as error:
                why[mark] = str(error)
            else:
                why[mark] = ""
    return why


async def _take(mark: str, node: str, kubeconfig: str) -> None:
    require_client("reporting to the cluster", "")
    if not node:
        raise ConfigError("the Node's name is not known: set --node-name (NODE_NAME)")
    api = NodeApi(node, kubeconfig)
    if mark == "condition":
        await api.apply_condition(None)
    elif mark == "taint":
        await api.set_taint(TAINT, "")
    else:
        await api.apply_labels({})


def _sentences(nodes: dict[str, str], why: dict[str, str], applied: Applied) -> Iterator[str]:
    names = {"condition": f"the condition {CONDITION}", "taint": f"the taint {TAINT}", "labels": "the labels"}
    for mark, node in nodes.items():
        if not why[mark]:
            yield f"node {node}: {names[mark]}: taken back"
        else:
            yield f"node {node or 'NODE'}: {names[mark]}: not taken back: {why[mark]}; run: {_command(mark, node, applied)}"


def _command(mark: str, node: str, applied: Applied) -> str:
    name = shlex.quote(node or "NODE")
    if mark == "condition":
        patch = f'{{"status": {{"conditions": [{{"$patch": "delete", "type": "{CONDITION}"}}]}}}}'
        return f"kubectl patch node {name} --subresource=status -p '{patch}'"
    if mark == "taint":
        return f"kubectl taint node {name} {TAINT}-"
    return applied.removal
