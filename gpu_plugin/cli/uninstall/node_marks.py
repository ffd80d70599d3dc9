"""The marks of the plugin on its Node, which outlive the plugin: condition, taint, labels; and their removal."""

import shlex
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import anyio
import msgspec

from gpu_plugin.cluster.connection import UnreachableError, require_client
from gpu_plugin.cluster.labels.keeper import LABELS_FILE, Applied
from gpu_plugin.cluster.node_api import NodeApi
from gpu_plugin.cluster.node_condition import CONDITION, TAINT
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.state.directory import StateDirectory
from gpu_plugin.state.records import OWN_MARKS_FILE, OwnMarks

PATIENCE = 15.0  # seconds for the removal of all marks


class _Mark(msgspec.Struct, frozen=True):
    """A mark on a Node (empty if its name is not known), the command that removes it, and the request to the API."""

    node: str
    name: str
    command: str
    remove: Callable[[NodeApi], Awaitable[object]]


def take_back(state_dir: Path, node_name: str, kubeconfig: str) -> list[str]:
    """Remove the marks that the state directory lists. Return a sentence for each mark, removed or not. Blocks."""
    state = StateDirectory(state_dir)
    written = state.read(OWN_MARKS_FILE, OwnMarks) or OwnMarks()
    applied = state.read(LABELS_FILE, Applied) or Applied()
    named = shlex.quote(node_name or "NODE")
    marks = []
    if written.condition:
        patch = f'{{"status": {{"conditions": [{{"$patch": "delete", "type": "{CONDITION}"}}]}}}}'
        command = f"kubectl patch node {named} --subresource=status -p '{patch}'"
        marks.append(_Mark(node_name, f"the condition {CONDITION}", command, lambda api: api.apply_condition(None)))
    if written.taint:
        command = f"kubectl taint node {named} {TAINT}-"
        marks.append(_Mark(node_name, f"the taint {TAINT}", command, lambda api: api.set_taint(TAINT, "")))
    if applied.labels:
        marks.append(_Mark(applied.node, "the labels", applied.removal, lambda api: api.apply_labels({})))
    return anyio.run(_remove, marks, kubeconfig) if marks else []


async def _remove(marks: Sequence[_Mark], kubeconfig: str) -> list[str]:
    why = [f"the Kubernetes API did not answer within {PATIENCE:g} s"] * len(marks)
    with anyio.move_on_after(PATIENCE):
        for at, mark in enumerate(marks):
            try:
                require_client("reporting to the cluster", "")
                if not mark.node:
                    raise ConfigError("the Node's name is not known: set --node-name (NODE_NAME)")
                await mark.remove(NodeApi(mark.node, kubeconfig))
            except (UnreachableError, ConfigError) as error:
                why[at] = str(error)
            else:
                why[at] = ""
    return [
        f"node {mark.node or 'NODE'}: {mark.name}: not taken back: {each}; run: {mark.command}"
        if each
        else f"node {mark.node}: {mark.name}: taken back"
        for mark, each in zip(marks, why, strict=True)
    ]
