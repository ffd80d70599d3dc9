"""Config files as Hypothesis makes them: the content of valid ones, with everything of the schema in it somewhere."""

from typing import Any

from hypothesis import strategies as st

from gpu_plugin.config import values
from gpu_plugin.config.choices import HEALTH_SIGNALS
from gpu_plugin.config.schema_v1 import MAX_XID, SIGNAL_VERDICTS, XID_CLASSES, XID_VERDICTS
from gpu_plugin.config.settings import OPTIONS

UUID = "01234567-89ab-4cde-8f01-23456789abcd"
NAMES = ["gpu", "nvidia.com/gpu", "example.com/gpu", "mig-1g.5gb.me", "nvidia.com/mig-2g.10gb", "GPU_x.9"]
FOREIGN = {"oneshot": True, "noTimestamp": False, "sleepInterval": "60s", "outputFile": "/a", "machineTypeFile": "/b"}

booleans = st.booleans() | st.sampled_from(["true", "F", "1"])
names = st.sampled_from(NAMES)
devices = (
    st.just("all")
    | st.integers(1, 16)
    | st.lists(
        st.integers(0, 15) | st.sampled_from(["0:1", "16", f"GPU-{UUID}", f"MIG-{UUID}", f"MIG-GPU-{UUID}/1/0"]),
        min_size=1,
        max_size=4,
        unique=True,
    )
)
durations = st.integers(100, 3_000_000).map(lambda ms: f"{ms}ms") | st.sampled_from(["1h", "1m0.5s", ".25s", "1.125m"])
paths = st.sampled_from(["/a", "/run/nvidia", "/"])
texts = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), max_size=8).filter(lambda t: "\n" not in t)

# What a file may hold for an option, where neither its enumeration nor its being a switch says so.
WRITTEN: dict[str, st.SearchStrategy[Any]] = {
    "device_list_strategy": st.sampled_from(
        ["envvar", "cdi-cri,envvar", ["volume-mounts"], ["cdi-cri", "envvar"], "auto", ["auto"]]
    ),
    "cdi_annotation_prefix": texts,
    "driver_root": paths,
    "dev_root": paths | st.just(""),
    "nvidia_cdi_hook_path": paths | st.just(""),
    "cdi_dir": paths,
    "driver_root_ctr_path": paths,
    "mps_root": paths,
    "imex_channel_ids": st.sampled_from([[], [0], "", "0", 0, ["0"], "auto"]),
    "device_plugin_dir": paths,
    "pod_resources_socket": paths,
    "state_dir": paths,
    "features_dir": paths,
    "http_address": st.sampled_from(
        ["", "127.0.0.1:9480", "[::1]:9480", "fd00::7:9480", "node.example.com:80", ":9480"]
    ),
    "status_page_hosts": st.sampled_from(["", "gpus.example.com", ["*.example.com", "node-7"], "a.b,c.d", []]),
    "health_poll_interval": durations,
    "temperature_recovery": durations,
    "nvml_timeout": durations,
    "flap_guard": durations,
    "vanished_gpu_retention": st.integers(1000, 3_000_000).map(lambda ms: f"{ms}ms") | st.sampled_from(["1h", "720h"]),
    "include_gpus": st.sampled_from(["0,1", 2, [3, "*H100*"], f"GPU-{UUID}", ["NVIDIA T4"], []]),
    "exclude_gpus": st.sampled_from(["7", [8, "0000:3b:00.0"], "00000000:3B:00.0", "*A100*", ""]),
}

_JUDGED = [name for name, about in HEALTH_SIGNALS.items() if about]


def _option(name: str, schema: Any) -> st.SearchStrategy[Any]:
    if name in WRITTEN:
        return WRITTEN[name]
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if schema == values.text.schema:
        return texts
    raise LookupError(
        f"the option {name!r} is read by a rule of its own: add what a file may hold for it to WRITTEN here"
    )


@st.composite
def rows(draw: st.DrawFn, limits: bool) -> dict[str, Any]:
    """One entry of a sharing section."""
    row: dict[str, Any] = {"name": draw(names), "replicas": draw(st.integers(2, 48))}
    for key, value in (("rename", names), ("devices", devices | st.none())):
        if draw(st.booleans()):
            row[key] = draw(value)
    if limits and draw(st.booleans()):
        amounts = st.integers(1, 10**6) | st.sampled_from(["8Gi", "8192Mi"])
        row["limits"] = {"activeThreadPercentage": draw(st.floats(1, 100)), "pinnedMemory": draw(amounts)}
    return row


@st.composite
def sections(draw: st.DrawFn, limits: bool) -> dict[str, Any]:
    """A sharing section, one entry for each resource."""
    whole = {"gpu": "nvidia.com/gpu"}
    several = st.lists(rows(limits), min_size=1, max_size=3, unique_by=lambda row: whole.get(row["name"], row["name"]))
    section: dict[str, Any] = {"resources": draw(several)}
    for key in ("renameByDefault", "failRequestsGreaterThanOne"):
        if draw(st.booleans()):
            section[key] = draw(booleans)
    return section


def healths() -> st.SearchStrategy[dict[str, Any]]:
    """A health section."""
    xids = st.integers(0, MAX_XID).map(str)
    return st.fixed_dictionaries(
        {
            "xid": st.dictionaries(xids, st.sampled_from(XID_VERDICTS), max_size=3),
            "xidClass": st.dictionaries(st.sampled_from([*XID_CLASSES]), st.sampled_from(XID_VERDICTS), max_size=2),
            "signals": st.dictionaries(
                st.sampled_from(_JUDGED),
                st.sampled_from(SIGNAL_VERDICTS),
                max_size=3,
            ),
        }
    )


@st.composite
def contents(draw: st.DrawFn) -> dict[str, Any]:
    """The content of a file that resolves, every mapping of the schema in it but for the sections under sharing."""
    content: dict[str, Any] = {"flags": {"plugin": {}, "gfd": {}}, "imex": {}, "selection": {}, "resources": {}}
    content["health"] = draw(healths())
    for option in draw(st.lists(st.sampled_from([option for option in OPTIONS if option.file]), unique=True)):
        *above, last = option.file.split(".")
        holder = content
        for part in above:
            holder = holder[part]
        holder[last] = draw(_option(option.name, option.parse.schema))
    if content["imex"].get("channelIDs") == "auto":
        content["imex"].pop("required", None)  # what is required is named
    content["flags"]["gfd"] = {key: FOREIGN[key] for key in draw(st.lists(st.sampled_from([*FOREIGN]), unique=True))}
    if draw(st.booleans()):
        content["version"] = draw(st.sampled_from(["v1", ""]))
    for key in draw(st.lists(st.sampled_from(["gpus", "mig"]), unique=True)):
        patterns = st.lists(texts.filter(bool), max_size=3, unique=True)
        content["resources"][key] = [{"pattern": pattern, "name": draw(names)} for pattern in draw(patterns)]
    strategy = draw(st.sampled_from([None, "timeSlicing", "mps"]))
    if strategy:
        content["sharing"] = {strategy: draw(sections(strategy == "mps"))}
    if strategy == "mps":
        content["flags"]["mpsRoot"] = "/run/nvidia/mps"
        content["flags"]["migStrategy"] = draw(st.sampled_from(["none", "single"]))
        content["resources"].pop("mig", None)
        rows_of = content["sharing"]["mps"]["resources"]
        replicas, limits = rows_of[0]["replicas"], rows_of[0].get("limits")
        for row in rows_of:
            row["name"] = row["name"].replace("mig-", "")
            # Entries may come to one offered name, and one daemon serves all of it alike.
            row["replicas"] = replicas
            row.pop("limits", None)
            if limits is not None:
                row["limits"] = dict(limits)
    return content
