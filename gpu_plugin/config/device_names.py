"""Check the names that operators give for GPUs and MIG devices, and return them in one spelling."""

import re

from gpu_plugin.config.names import resource_name_fault, whole_name
from gpu_plugin.config.values import read_items, reading, text

_HEX = "[0-9a-fA-F]"
_UUID = f"{_HEX}{{8}}(-{_HEX}{{4}}){{3}}-{_HEX}{{12}}"
_INDEX = re.compile(r"\d{1,9}", re.ASCII)
_MIG_INDEX = re.compile(r"(\d{1,9}):(\d{1,9})", re.ASCII)
_GPU_UUID = re.compile(f"GPU-{_UUID}", re.IGNORECASE)
_MIG_UUID = re.compile(rf"MIG-{_UUID}|MIG-GPU-{_UUID}/\d{{1,9}}/\d{{1,9}}", re.IGNORECASE | re.ASCII)
_BUS_ID = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.IGNORECASE)

# The longest pattern of models or profiles. NVML's names have 95 characters at most (NVML_DEVICE_NAME_V2_BUFFER_SIZE).
MAX_PATTERN = 255

_INDICES = {"type": "integer", "minimum": 0, "maximum": 999_999_999}
# JSON Schema of the values that `listed_device` accepts
LISTED = {
    "anyOf": [
        _INDICES,
        {
            "type": "string",
            "pattern": rf"^(\d{{1,9}}|\d{{1,9}}:\d{{1,9}}|(GPU|MIG)-{_UUID}|MIG-GPU-{_UUID}/\d{{1,9}}/\d{{1,9}})$",
        },
    ]
}
# JSON Schema of the values that `selected_gpu` accepts, and of some other texts
SELECTED = {"anyOf": [_INDICES, {"type": "string", "minLength": 1}]}


def listed_device(written: object) -> str:
    """Read a device of a sharing entry: GPU index, MIG index ("0:1"), GPU-<uuid>, MIG-<uuid> or MIG-GPU-<uuid>/<gi>/<ci>.

    NVIDIA's plugin has the same forms (api/config/v1/replicas.go). Raises ValueError for another form.
    """
    item = _index(written)
    if item is not None:
        return item
    if isinstance(written, str):
        pair = _MIG_INDEX.fullmatch(written)
        if pair:
            return f"{int(pair[1])}:{int(pair[2])}"
        if _GPU_UUID.fullmatch(written) or _MIG_UUID.fullmatch(written):
            return _nvml_spelling(written)
    raise ValueError(
        f"unsupported type for device in devices list: {written!r} is not a GPU index, MIG index such as '0:1', GPU-<uuid>, "
        "MIG-<uuid> or MIG-GPU-<uuid>/<gi>/<ci>"
    )


def selected_gpu(written: object) -> str:
    """Read a GPU to include or exclude: index, GPU-<uuid>, PCI bus id (NVML's or sysfs's spelling) or model pattern.

    Raises ValueError if the value is empty, begins like an index, a uuid or a bus id and is not valid, or names a MIG device.
    """
    item = _index(written)
    if item is not None:
        return item
    if not isinstance(written, str) or not text(written).strip():
        raise ValueError(f"{written!r} is not a GPU index, GPU-<uuid>, PCI bus id or model pattern")
    item = written.strip()
    if item.upper().startswith("GPU-"):
        if not _GPU_UUID.fullmatch(item):
            raise ValueError(f"{item!r} is not GPU- and a uuid, as nvidia-smi -L prints it")
        return _nvml_spelling(item)
    if item.upper().startswith("MIG-"):
        raise ValueError(f"{item!r} is a MIG device: name the GPU that it is on")
    if ":" in item:
        if not _BUS_ID.fullmatch(item):
            raise ValueError(f"{item!r} is not a PCI bus id such as 00000000:3B:00.0 or 0000:3b:00.0")
        return item.lower()
    if re.fullmatch(r"[-+.\d]+", item):
        raise ValueError(f"{item!r} is not a GPU index: GPU indices count from 0")
    return model_pattern(item)


@reading({"anyOf": [{"type": "string"}, _INDICES, {"type": "array", "items": SELECTED}]})
def selected_gpus(written: object) -> tuple[str, ...]:
    """Read GPUs to include or exclude: text split at commas, or a list; in order, each once. See `selected_gpu`."""
    if isinstance(written, list | tuple):
        return tuple(dict.fromkeys(read_items(selected_gpu, written)))
    items = [item for item in text(written).split(",") if item.strip()] if isinstance(written, str) else [written]
    return tuple(dict.fromkeys(selected_gpu(item) for item in items))


@reading({"type": "string", "pattern": rf"^[^\n\u0000]{{1,{MAX_PATTERN}}}$"})
def model_pattern(written: object) -> str:
    """Read a pattern of GPU models or MIG profiles."""
    item = text(written)
    if not item:
        raise ValueError("no pattern specified")
    if len(item) > MAX_PATTERN:
        raise ValueError(f"{item[:32]!r}... is a pattern of {len(item)} characters; at most {MAX_PATTERN} are allowed")
    return item


@reading({"type": "string", "minLength": 1})
def resource_name(written: object) -> str:
    """Read the name of a resource. A name without a domain gets nvidia.com/."""
    name = whole_name(text(written))
    fault = resource_name_fault(name)
    if fault:
        hint = "; the + of a MIG profile is written . in names" if "+" in name else ""
        raise ValueError(f"incorrect format for resource name {fault}{hint}")
    return name


def _index(written: object) -> str | None:
    """Return an index without leading zeros; None if the value is not an index."""
    if isinstance(written, int) and not isinstance(written, bool):
        written = str(written)
    if isinstance(written, str) and _INDEX.fullmatch(written.strip()):
        return str(int(written))
    return None


def _nvml_spelling(name: str) -> str:
    """Return a uuid in NVML's spelling: the prefix in upper case, the digits in lower case."""
    kinds, digits = re.fullmatch(r"((?:[A-Za-z]{3}-)+)(.*)", name, re.DOTALL).groups()  # type: ignore[union-attr]
    return f"{kinds.upper()}{digits.lower()}"
