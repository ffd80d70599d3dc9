"""Compare the verdicts of container runtimes' CDI library and of this project's reader on the same specifications."""

import copy
import json
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpu_plugin.containers.cdi import spec
from gpu_plugin.containers.cdi.build import build
from gpu_plugin.containers.cdi.host_files import DeviceFile, HostDevices
from gpu_plugin.containers.cdi.options import CdiOptions
from gpu_plugin.containers.cdi_files.files import judge_content
from gpu_plugin.containers.cdi_names import GDRCOPY, GDS, MOFED
from gpu_plugin.containers.driver_root.search import Search
from gpu_plugin.devices.node import Gpu
from gpu_plugin.nvml.traits import probe_gpu
from gpu_plugin.simulation import driver_files
from gpu_plugin.simulation.driver import SimulatedDriver
from gpu_plugin.simulation.hardware import SimulatedNode
from gpu_plugin.simulation.host import SimulatedHost
from gpu_plugin.simulation.profile import load, names
from tests.needed import found
from tests.real import cdi_library
from tests.unit.containers.cdi_files.specs import NO_YAML, READ_AS_YAML


@pytest.fixture(scope="module")
def judge() -> Path:
    """The path of the program in `cdi_judge`."""
    return found(cdi_library.find)


def judged(judge: Path, directory: Path, documents: Mapping[str, bytes]) -> dict[str, dict[str, str]]:
    """Return the errors in each document according to the library, its JSON Schema and this project's readers; empty if valid."""
    files = {}
    for at, (name, content) in enumerate(documents.items()):
        file = directory / f"{at}.json"
        file.write_bytes(content)
        files[str(file)] = name
    command = [str(judge), *files]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    assert len(lines) == len(documents)
    verdicts: dict[str, dict[str, str]] = {}
    for verdict in map(json.loads, lines):
        name = files[verdict.pop("file")]
        verdicts[name] = verdict | {"ours": ours(spec.from_json, documents[name]), "lax": ours(laxly, documents[name])}
    return verdicts


def laxly(content: bytes) -> spec.Spec:
    return spec.as_runtimes_read(json.loads(content))


def ours(read: Callable[[bytes], spec.Spec], content: bytes) -> str:
    try:
        return "; ".join(spec.faults(read(content)))
    except ValueError as error:
        return str(error)


def drm(gpus: tuple[Gpu, ...], host: HostDevices) -> HostDevices:
    """The host, with DRM nodes of its GPUs that only a group may open, and with nodes of all other classes."""
    nodes, of_gpus = dict(host.nodes), {}
    for at, gpu in enumerate(gpus):
        node = DeviceFile(226, at, 0o660, 44)
        nodes |= dict.fromkeys((f"/dev/dri/card{at}", f"/dev/dri/by-path/pci-{gpu.pci_bus_id[4:].lower()}-card"), node)
        of_gpus[gpu.pci_bus_id] = (f"/dev/dri/card{at}",)
    others = ("gdrdrv", "nvidia-fs0", "infiniband/uverbs0", "nvidia-caps-imex-channels/channel0")
    nodes |= {f"/dev/{name}": DeviceFile(508, at) for at, name in enumerate(others)}
    return HostDevices(nodes, of_gpus)


def with_graphics(gpu: Gpu) -> Gpu:
    return replace(gpu, mig_devices=tuple(replace(mig, profile=f"{mig.profile}+gfx") for mig in gpu.mig_devices))


def generated(directory: Path) -> Iterator[tuple[str, bytes]]:
    """Yield every specification of every simulated node, with a name."""
    wanted = {
        "plain": CdiOptions(),
        "hook": CdiOptions(hook="/usr/bin/nvidia-ctk", classes=(GDRCOPY, GDS, MOFED), imex_channels=(0,)),
        "elsewhere": CdiOptions(driver_root="/run/nvidia/driver", dev_root="/run/nvidia/driver"),
    }
    for profile in names():
        node = SimulatedNode(load(profile), directory / profile)
        host = SimulatedHost(node)
        root = driver_files.make(directory / profile / "root", node.profile.driver_version)
        files = Search([(str(root), "")]).files(node.profile.driver_version)
        driver = SimulatedDriver(node)
        driver.open()
        gpus = tuple(probe_gpu(driver, host, index)[1] for index in range(driver.device_count()))
        driver.close()
        for title, options in wanted.items():
            for drawing in (False, True):
                devices = drm(gpus, host.devices(())) if drawing else host.devices(())
                given = tuple(map(with_graphics, gpus)) if drawing else gpus
                made = build(given, devices, files, options)
                assert made.trouble == ""
                for file, document in made.specs.items():
                    yield f"{profile}, {title}, {drawing=}: {file}", spec.to_json(document)


def test_every_specification_of_every_simulated_node_is_valid(judge, tmp_path):
    documents = dict(generated(tmp_path))
    assert {name.partition(": ")[2].removeprefix("k8s.device-plugin.nvidia.com-") for name in documents} == {
        "gpu.json", "imex-channel.json", "gdrcopy.json", "gds.json", "mofed.json",
    }  # fmt: skip
    versions = {json.loads(content)["cdiVersion"] for content in documents.values()}
    assert versions == {"0.3.0", "0.5.0", "0.7.0"}
    (tmp_path / "documents").mkdir()
    verdicts = judged(judge, tmp_path / "documents", documents)
    assert {name: verdict for name, verdict in verdicts.items() if any(verdict.values())} == {}


DOCUMENT: dict[str, Any] = {
    "cdiVersion": "1.1.0",
    "kind": "vendor.com/class",
    "annotations": {"example.com/a": "b"},
    "containerEdits": {
        "env": ["A=b"],
        "hooks": [{"hookName": "createContainer", "path": "/x", "args": ["x"], "env": ["A=b"], "timeout": 3}],
    },
    "devices": [
        {
            "name": "0",
            "annotations": {"example.com/a": "b"},
            "containerEdits": {
                "env": ["A=b"],
                "deviceNodes": [
                    {
                        "path": "/dev/x",
                        "hostPath": "/y",
                        "type": "c",
                        "major": 1,
                        "minor": 2,
                        "fileMode": 438,
                        "permissions": "rw",
                        "uid": 1,
                        "gid": 2,
                    }
                ],
                "netDevices": [{"hostInterfaceName": "eth0", "name": "eth1"}],
                "mounts": [{"hostPath": "/a", "containerPath": "/b", "options": ["ro"], "type": "bind"}],
                "intelRdt": {
                    "closID": "a",
                    "l3CacheSchema": "x",
                    "memBwSchema": "y",
                    "schemata": ["L3"],
                    "enableMonitoring": True,
                },
                "additionalGids": [5],
            },
        }
    ],
}
"""A specification with all fields."""

VALUES: tuple[Any, ...] = (
    *(None, "", "x", "A=b", "=b", "/", "..", "a/b", "a\nb", "é", "none", "rwm", "b", "createRuntime", "v1.1.0"),
    *(0, -1, 1.0, 1.5, True, 1 << 31, 1 << 32, 1 << 63, [], {}, [None], ["x"], {"a": "b"}, "0.6.0", "9.9.9", "-a"),
)


def places(content: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if place:
        yield place
    steps = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for step, inner in steps:
        yield from places(inner, (*place, step))


def at(content: Any, place: tuple[Any, ...]) -> Any:
    for step in place:
        content = content[step]
    return content


def changed() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield variants of DOCUMENT with one part removed, doubled, added or replaced. The name describes the change."""
    for place in places(DOCUMENT):
        title = ".".join(map(str, place))
        for value in VALUES:
            document = copy.deepcopy(DOCUMENT)
            at(document, place[:-1])[place[-1]] = value
            yield f"{title} = {value!r}", document
        document = copy.deepcopy(DOCUMENT)
        gone = at(document, place[:-1]).pop(place[-1])
        yield f"{title} left out", document
        if isinstance(gone, dict):
            document = copy.deepcopy(DOCUMENT)
            at(document, place)["unknown"] = "x"
            yield f"{title} with a key more", document
        if isinstance(place[-1], int):
            document = copy.deepcopy(DOCUMENT)
            at(document, place[:-1]).append(gone)
            yield f"{title} twice", document


STRICTER = {
    "expected 'str', got 'null'": "the library takes null among texts for an empty one, which no container can use",
    "expected 'str', got 'int'": "the library reads YAML, in which a number stands for a text as well; other readers do not",
    "expected 'str', got 'float'": "as above",
    "expected 'str', got 'bool'": "as above",
    "got 'float'": "the library rounds, or takes 1.0 for 1, in which readers of JSON differ",
    "expected 'int' >= 0": "no device has a number below 0",
    "expected 'int' <= 4095": "file modes beyond the permission bits are Go's own",
    "got 'null'": "the library takes null for a field that is left out, and its own schema refuses it",
}
"""Documents that this project refuses and the library accepts: the error, and the reason."""

STRICTER_THAN_RUNTIMES = {"got 'float'", "expected 'int' >= 0"}
"""The same for the reader that follows the library."""

ONLY_THE_SCHEMA = ("deviceNodes.0.uid = None", "deviceNodes.0.gid = None", "intelRdt = None")
"""Null in place of a missing field: the library accepts it and its schema refuses it. This project follows the library."""


def test_one_change_of_a_document_with_every_field_has_the_same_verdict(judge, tmp_path):
    documents = {"as it is": DOCUMENT, **dict(changed())}
    verdicts = judged(judge, tmp_path, {name: json.dumps(each).encode() for name, each in documents.items()})
    assert not any(verdicts["as it is"].values())
    valid = [name for name, verdict in verdicts.items() if not verdict["library"] and not verdict["schema"]]
    assert min(len(valid), len(verdicts) - len(valid)) > 200  # there are many valid and many invalid documents
    taken = [name for name, verdict in verdicts.items() if verdict["library"] and not verdict["ours"]]
    assert taken == [], "we take what no runtime would"
    assert [name for name, verdict in verdicts.items() if verdict["library"] and not verdict["lax"]] == []
    refused = [verdict["lax"] for verdict in verdicts.values() if verdict["lax"] and not verdict["library"]]
    assert [why for why in refused if not any(sentence in why for sentence in STRICTER_THAN_RUNTIMES)] == []
    by_us = {name: verdict["ours"] for name, verdict in verdicts.items() if verdict["ours"] and not verdict["library"]}
    assert {name: why for name, why in by_us.items() if not any(sentence in why for sentence in STRICTER)} == {}
    assert {sentence for sentence in STRICTER if not any(sentence in why for why in by_us.values())} == set()
    schema = [
        name
        for name, verdict in verdicts.items()
        if verdict["schema"] and not verdict["library"] and not verdict["ours"]
    ]
    assert [name.removeprefix("devices.0.containerEdits.") for name in schema] == list(ONLY_THE_SCHEMA)


def test_cache_monitoring_by_its_former_names_is_taken_though_the_newest_library_forgot_them(judge, tmp_path):
    """Libraries before 1.1 have enableCMT and enableMBM, and a node may have specifications with these fields."""
    document = copy.deepcopy(DOCUMENT)
    document["devices"][0]["containerEdits"]["intelRdt"] = {"enableCMT": True, "enableMBM": True}
    (verdict,) = judged(judge, tmp_path, {"": json.dumps(document).encode()}).values()
    assert "enableCMT not found" in verdict["library"]
    assert verdict["schema"] == verdict["ours"] == ""


@pytest.mark.parametrize(
    "mode",
    [
        "0o666",
        "0O6_66",
        "+0o666",
        "-0o666",
        "'0o666'",
        "0666",
        "0x1b6",
        "1e2",
        "4096",
        "4294967295",
        "4294967296",
        "true",
    ],
)
@pytest.mark.parametrize("rest", ["", "---\nkind: other\n", "---\n: [\n", "@@\n"])
def test_a_yaml_file_is_read_as_the_library_reads_it(judge, tmp_path, mode, rest):
    device = f"{{name: a, containerEdits: {{deviceNodes: [{{path: /x, fileMode: {mode}}}]}}}}"
    content = f"cdiVersion: 0.7.0\nkind: v.com/c\ndevices: [{device}]\n"
    (verdict,) = judged(judge, tmp_path, {"": (content + rest).encode()}).values()
    _, _, refused = judge_content((content + rest).encode())
    assert bool(verdict["library"]) == bool(refused)


@pytest.mark.parametrize(
    "content", [b"", b"null", b"[]", b"{", b'"text"', b"\xff", b"{} {}", b'{"cdiVersion": "0.3.0"'], ids=repr
)
def test_what_is_no_document_at_all_is_none_for_anyone(judge, tmp_path, content):
    (verdict,) = judged(judge, tmp_path, {"": content}).values()
    assert verdict["library"]
    assert verdict["ours"]


def test_json_that_is_no_yaml_has_the_same_verdict(judge, tmp_path):
    texts = {name: text.encode() for name, text in {**NO_YAML, **READ_AS_YAML}.items()}
    verdicts = judged(judge, tmp_path, texts)
    assert {name for name, verdict in verdicts.items() if verdict["library"]} == set(NO_YAML)
    assert {name for name, text in texts.items() if judge_content(text)[2]} == set(NO_YAML)
