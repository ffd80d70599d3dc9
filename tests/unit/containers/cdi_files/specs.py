"""Small specifications for tests."""

from gpu_plugin.containers import cdi_names
from gpu_plugin.containers.cdi.spec import DeviceNode, Edits, Mount, SpecDevice, made

GPU_FILE = cdi_names.file_name(cdi_names.GPU)
IMEX_FILE = cdi_names.file_name(cdi_names.IMEX)
MOFED_FILE = cdi_names.file_name(cdi_names.MOFED)


def spec(device_class=cdi_names.GPU, mount="/usr/lib64/libcuda.so.550", **devices):
    """A specification in which each device has these nodes: GPU_a=("/dev/nvidia0",) makes GPU-a."""
    made_of = tuple(
        SpecDevice(
            name=name.replace("_", "-").removeprefix("-"),
            container_edits=Edits(device_nodes=tuple(DeviceNode(path=node) for node in nodes)),
        )
        for name, nodes in devices.items()
    )
    mounts = (Mount(host_path=mount, container_path=mount, options=("ro", "rbind")),)
    return made(cdi_names.kind(device_class), made_of, Edits(mounts=mounts))


JSON = '{"cdiVersion": "0.7.0", "kind": "v.com/c", "devices": [{"name": %s, "containerEdits": {"env": ["A=b"]}}]}'

VALID = JSON % '"a"'

NO_YAML = {
    "escaped slash": VALID.replace("v.com/c", r"v.com\/c"),
    "escaped slash after a backslash": VALID.replace("A=b", r"A=\\\/"),
    "two escapes for one character": VALID.replace("A=b", r"A=\ud83d\uDE00"),
    "half of a character": VALID.replace("A=b", r"A=\ud83d"),
    "delete character": VALID.replace("A=b", "A=\x7f"),
    "control character": VALID.replace("A=b", "A=\x9f"),
    "no character": VALID.replace("A=b", "A=\uffff"),
    "tab before": f"\t{VALID}",
    "tab before, on a later line": f"\n \t{VALID}",
    "tab after, on a later line": f"{VALID}\n\t\n",
    "line break before a colon": VALID.replace('"kind":', '"kind"\n:'),
    "escaped slash, and more text": VALID.replace("v.com/c", r"v.com\/c") + "\ntext",
}
"""JSON that the YAML library of runtimes refuses."""

READ_AS_YAML = {
    "plain": VALID,
    "backslash": VALID.replace("A=b", r"A=\\/"),
    "other escapes": VALID.replace("A=b", r"A=\u0041\b\f\n\r\t\"\\"),
    "characters": VALID.replace("A=b", "A=\x85\xa0\u2028\ufffd\U0001f600"),
    "tabs inside": VALID.replace(" ", "\n\t"),
    "tab at the end": f"{VALID}\t",
    "tab before a colon": VALID.replace(":", "\t:"),
}
"""JSON that this library reads as JSON."""
