"""Config files as Hypothesis makes them: the content of valid ones, with everything of the schema in it somewhere."""

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from gpu_plugin.config import values
from gpu_plugin.config.choices import HEALTH_SIGNALS
from gpu_plugin.config.schema_v1 import MAX_XID, SIGNAL_VERDICTS, XID_CLASSES, XID_VERDICTS
from gpu_plugin.config.settings import OPTIONS, Option

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
texts = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), max_size=8).filter(lambda t: "\n" not in t)

# Values of options that neither an enumeration nor a common form describes. The first two are different texts.
SPECIAL: dict[str, list[Any]] = {
    "device_list_strategy": [
        "cdi-cri",
        "volume-mounts,envvar",
        ["volume-mounts"],
        ["cdi-cri", "envvar"],
        "auto",
        ["auto"],
    ],
    "imex_channel_ids": ["0", "auto", [], [0], "", 0, ["0"]],
    "fallback_strategies": ["empty", "single,named"],
    "http_address": ["10.0.0.7:9480", "[::1]:9481", "", "fd00::7:9480", "node.example.com:80", ":9480"],
    "status_page_hosts": ["gpus.example.com", "a.b,*.c.d", "", ["*.example.com", "node-7"], []],
    "include_gpus": [f"0,GPU-{UUID}", "*H100*", 2, [3, "*H100*"], ["NVIDIA T4"], []],
    "exclude_gpus": ["7", "00000000:3B:00.0", [8, "0000:3b:00.0"], "*A100*", ""],
}
COMMON: list[tuple[Mapping[str, Any], list[Any]]] = [
    (values.boolean.schema, ["true", "false", True, False, "F", "1"]),
    (values.boolean_or_auto.schema, ["true", "false", True, "F", "auto"]),
    (values.text.schema, ["one", "other", ""]),
    (values.texts.schema, ["one", "two,three", ["four"]]),
    (values.path.schema, ["/a/b", "/run/nvidia", "/"]),
    (values.optional_path.schema, ["/a/b", "/run/nvidia", "/"]),
    (values.duration(0, 1).schema, ["1m0.5s", "2m", "1.125m", "0.5h", "60000ms"]),
]


def forms(option: Option) -> list[Any]:
    """Return valid values of an option in a file. The first two are different texts; at most the second is the default."""
    schema = option.parse.schema
    found = SPECIAL.get(option.name) or next((known for common, known in COMMON if common == schema), None)
    if found is None and "enum" in schema:
        found = schema["enum"][::-1]
    if found is None:
        raise LookupError(f"the option {option.name!r} is read by a rule of its own: add values of it to SPECIAL here")
    return found


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
                st.sampled_from([name for name, about in HEALTH_SIGNALS.items() if about]),
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
        holder[last] = draw(st.sampled_from(forms(option)))
    if content["imex"].get("channelIDs") == "auto":
        content["imex"].pop("required", None)  # a required channel needs a number
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
            # Entries may have the same offered name, which one daemon serves with the same limits.
            row["replicas"] = replicas
            row.pop("limits", None)
            if limits is not None:
                row["limits"] = dict(limits)
    return content
