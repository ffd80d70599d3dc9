"""The image in a container without writable files and capabilities, and all files of its layers."""

import dataclasses
import json
import os
import re
import subprocess
import tarfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from demo.stand_in_kubelet import StandInKubelet
from gpu_plugin import __version__
from tests.needed import found
from tests.node.daemon import healthy
from tests.real import image_build, wheels
from tests.short_paths import short_directory

pytestmark = pytest.mark.timeout(300)  # podman loads the image

TAG, SUCCESSOR, SUCCESSOR_VERSION = image_build.TAG, image_build.SUCCESSOR, image_build.SUCCESSOR_VERSION
HARDENED = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--pids-limit=256")

PARTS = {
    "base": 18,
    "gpu-plugin and its dependencies": 9,
    "bytecode of both and of the standard library": 9,
}
"""The layers of the image, and the largest size of their compressed form in MiB."""

FORBIDDEN = re.compile(
    r"(ba|da|a|z|k|c|tc)?sh|busybox|perl.*|pip.*|easy_install|apt.*|dpkg.*|rpm|yum"
    r"|(g?cc|[cg]\+\+|cpp|ld|as|make)(-.*)?|su|sudo|mount|curl|wget"
)
"""Programs outside of the directories of programs."""

INSTALLED = """
import importlib.metadata, json, sys
print(json.dumps([
    {"name": each.name, "version": each.version,
     "licensed": bool(each.metadata["License-Expression"] or each.metadata["License"]
        or [line for line in each.metadata.get_all("Classifier", []) if line.startswith("License ::")])}
    for each in importlib.metadata.distributions()
]))
"""

BYTECODE = """
import importlib.util, json, marshal, pathlib, sys
wrong = []
for top in sys.path:
    for source in pathlib.Path(top).rglob("*.py"):
        cached = pathlib.Path(importlib.util.cache_from_source(str(source)))
        if not cached.exists():
            wrong.append(f"{source}: none")
            continue
        content = cached.read_bytes()
        if content[:4] != importlib.util.MAGIC_NUMBER or content[4:8] != (1).to_bytes(4, "little"):
            wrong.append(f"{source}: of another Python, or judged by its source")
        elif content[8:16] != importlib.util.source_hash(source.read_bytes()):
            wrong.append(f"{source}: of another source")
        elif marshal.loads(content[16:]).co_filename != str(source):
            wrong.append(f"{source}: says it is {marshal.loads(content[16:]).co_filename}")
print(json.dumps(wrong))
"""


IMPORTED = """
import gpu_plugin, importlib, json, pkgutil
from lightkube.config.client_adapter import AsyncClient
names = [each.name for each in pkgutil.walk_packages(gpu_plugin.__path__, "gpu_plugin.")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
print(json.dumps(len(names)))
"""


@dataclasses.dataclass
class Containers:
    """Podman with the image."""

    command: list[str]

    def __call__(self, *arguments: str, options: tuple[str, ...] = ()) -> str:
        """Run the image's command as its default user with the options `HARDENED`, and return its output."""
        return image_build.run(
            [*self.command, "run", "--rm", *image_build.LIMITS, *HARDENED, *options, TAG, *arguments], timeout=60
        )

    def python(self, code: str) -> Any:
        return json.loads(self("-I", "-c", code, options=("--entrypoint=/opt/gpu-plugin/bin/python3",)))

    def podman(self, *arguments: str) -> str:
        return image_build.run([*self.command, *arguments], timeout=60)


@pytest.fixture(scope="session")
def image() -> Path:
    """The archive of the image."""
    return found(image_build.find)


@pytest.fixture(scope="session")
def containers(image: Path) -> Iterator[Containers]:
    with short_directory() as storage:
        made = Containers(image_build.podman(storage))
        try:
            made.podman("load", f"--input={image}")
            yield made
        finally:
            image_build.cleared(made.command, storage)


@pytest.fixture(scope="session")
def layers(image: Path) -> list[dict[str, tarfile.TarInfo]]:
    """The files of each layer by their paths without the first slash. The first layer is the base."""
    return [{_path(entry): entry for entry, _ in layer} for layer in _files(image)]


@pytest.fixture(scope="session")
def added(layers: list[dict[str, tarfile.TarInfo]]) -> dict[str, tarfile.TarInfo]:
    """The files that the Dockerfile adds to the base."""
    return {path: entry for layer in layers[1:] for path, entry in layer.items()}


def _path(entry: tarfile.TarInfo) -> str:
    return entry.name.removeprefix("./").rstrip("/")


def _files(image: Path) -> Iterator[list[tuple[tarfile.TarInfo, bytes]]]:
    """Return the entries of each layer with their contents."""
    for layer in _document(image)[0]["layers"]:
        with (
            tarfile.open(image) as whole,
            tarfile.open(fileobj=whole.extractfile(_blob(layer["digest"])), mode="r:*") as tar,
        ):
            yield [(entry, _content(tar, entry)) for entry in tar]


def _content(tar: tarfile.TarFile, entry: tarfile.TarInfo) -> bytes:
    content = tar.extractfile(entry) if entry.isreg() else None
    return content.read() if content is not None else b""


def _document(image: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the manifest and the configuration of an archive."""
    with tarfile.open(image) as whole:

        def read(name: str) -> Any:
            content = whole.extractfile(name)
            assert content is not None
            return json.load(content)

        (entry,) = read("index.json")["manifests"]
        manifest = read(_blob(entry["digest"]))
        return manifest, read(_blob(manifest["config"]["digest"]))


def _blob(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def test_it_says_what_it_is_and_runs_as_nobody_in_particular(image):
    _, configuration = _document(image)
    assert configuration["os"] == "linux"
    assert configuration["architecture"] == image_build.run(["dpkg", "--print-architecture"]).strip()
    config = configuration["config"]
    assert (config["User"], config["Entrypoint"], config["Cmd"]) == ("65532:65532", ["gpu-plugin"], ["run"])
    assert "Healthcheck" not in config
    assert {name: text for name, text in config["Labels"].items() if name.startswith("org.opencontainers.")} == {
        "org.opencontainers.image.title": "gpu-plugin",
        "org.opencontainers.image.description": "Async NVIDIA GPU device plugin for Kubernetes",
        "org.opencontainers.image.licenses": "Apache-2.0",
        "org.opencontainers.image.version": __version__,
        "org.opencontainers.image.revision": image_build.REVISION,
        "org.opencontainers.image.created": image_build.CREATED,
    }
    environment = dict(each.split("=", 1) for each in config["Env"])
    assert "NVIDIA_VISIBLE_DEVICES" not in environment  # a container of this image must not get all GPUs by default
    assert environment["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"


def test_nothing_is_setuid_and_the_added_files_are_roots_alone_to_write(layers, added):
    programs = {path: entry for layer in layers for path, entry in layer.items() if entry.isreg()}
    assert {path for path, entry in programs.items() if entry.mode & 0o6000} == set()
    for path, entry in added.items():
        if path != OF_THE_BASE:
            assert (entry.uid, entry.gid) == (0, 0), path
            assert entry.issym() or not entry.mode & 0o022, path


OF_THE_BASE = "home/nonroot"
"""The working directory of the base, which podman creates if an imported image lacks it."""


def test_there_is_no_shell_no_compiler_no_pip_and_no_cache(layers):
    files = {path: entry for layer in layers for path, entry in layer.items()}
    programs = {path for path, entry in files.items() if "bin" in Path(path).parts and not entry.isdir()}
    assert {path for path in programs if FORBIDDEN.fullmatch(Path(path).name)} == set()
    assert {"opt/gpu-plugin/bin/gpu-plugin", "usr/bin/python3"} <= programs
    packages = {Path(path).name.partition("-")[0] for path in files if Path(path).parent.name == "site-packages"}
    assert "gpu_plugin" in packages
    assert not packages & {"pip", "setuptools", "wheel", "hatchling", "cyclonedx_py", "pkg_resources"}
    assert {path for path in files if re.search(r"(^|/)(\.cache|direct_url\.json|pip\.conf)(/|$)", path)} == set()
    assert {path for path in files if path.startswith(("source", "wheels", "build"))} == set()


def test_nothing_of_how_it_was_built_is_in_it(image, added):
    manifest, configuration = _document(image)
    text = json.dumps([manifest, configuration])
    assert "PIP_" not in text
    assert "secret" not in text
    of_the_build = re.compile(
        rb"/run/secrets/(?:ca|pip)|[ '\"]/wheels|/opt/wheels|/source/(?:gpu_plugin|build|run)|pip\.conf"
    )
    _, *layers = _files(image)
    hits = {_path(entry): of_the_build.findall(content) for layer in layers for entry, content in layer}
    assert {path: each for path, each in hits.items() if each} == {}
    assert {entry.mtime for entry in added.values()} == {image_build.EPOCH}


def test_the_same_sources_and_bases_give_the_same_layers(image):
    again = found(partial(image_build.find, image_build.AGAIN))
    first, second = (_document(each)[0]["layers"] for each in (image, again))
    assert [each["digest"] for each in first] == [each["digest"] for each in second]


def test_every_module_has_bytecode_that_is_never_judged_again(containers):
    assert containers.python(BYTECODE) == []


def test_a_file_of_the_base_that_python_3_does_not_compile_stops_no_build(layers):
    base, *added = layers
    assert image_build.PYTHON_2 in base
    assert not [path for layer in added for path in layer if path.startswith("usr/share/")]


def test_the_base_has_all_that_our_modules_import(containers):
    assert containers.python(IMPORTED) > 150


def test_no_layer_is_larger_than_planned(layers, image):
    sizes = [each["size"] / 2**20 for each in _document(image)[0]["layers"]]
    unpacked = [sum(entry.size for entry in layer.values()) / 2**20 for layer in layers]
    for name, size, files in zip(PARTS, sizes, unpacked, strict=True):
        print(f"{name}: {files:.1f} MiB, to fetch: {size:.1f} MiB")
    assert {name: size for (name, most), size in zip(PARTS.items(), sizes, strict=True) if size > most} == {}


def test_the_bill_of_materials_has_every_distribution_that_is_installed(containers):
    bill = containers.python("print(open('/opt/gpu-plugin/sbom.cdx.json').read())")
    assert bill["bomFormat"] == "CycloneDX"
    components = {_normal(each["name"]): each for each in bill["components"]}
    installed = {_normal(each["name"]): each for each in containers.python(INSTALLED)}
    assert set(components) == set(installed)
    assert components["gpu-plugin"]["version"] == __version__
    for name, component in components.items():
        assert component["version"] == installed[name]["version"]
        assert component["purl"] == f"pkg:pypi/{name}@{component['version']}"
        assert bool(component.get("licenses")) == installed[name]["licensed"], name
    locked = re.findall(
        r"^([a-z0-9._-]+)==(\S+)", (image_build.ROOT / "requirements/run.lock").read_text(), re.MULTILINE
    )
    wheels = {(name, each["version"]) for name, each in components.items() if name != "gpu-plugin"}
    assert wheels <= {(_normal(name), version) for name, version in locked}


OF_NO_WHEEL = {
    r"opt/gpu-plugin/sbom\.cdx\.json": "the bill itself",
    r"opt/gpu-plugin/(pyvenv\.cfg|lib64|bin/(python.*|[Aa]ctivate.*))": "the virtual environment",
    r"usr/.*/__pycache__/.*": "bytecode of the standard library",
    r"etc/(hostname|hosts|resolv\.conf)": "empty files, on which a runtime mounts the files of the node",
}
"""Added files that do not belong to a wheel, and their origin."""

RECORDED = """
import importlib.metadata, json, os
print(json.dumps([os.path.normpath(str(file.locate())) for each in importlib.metadata.distributions() for file in each.files]))
"""


def test_every_added_file_is_of_a_wheel(added, containers):
    recorded = set(containers.python(RECORDED))
    strangers = []
    for path, entry in added.items():
        source = re.sub(r"__pycache__/([^/]+)\.cpython-\d+\.pyc$", r"\1.py", path)
        known = f"/{source}" in recorded or any(re.fullmatch(each, path) for each in OF_NO_WHEEL)
        if not entry.isdir() and not known:
            strangers.append(path)
    assert strangers == []


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_help_and_validate_need_nothing(containers, tmp_path):
    assert "gpu-plugin" in containers("--help")
    assert containers("--version").strip().endswith(__version__)
    config = tmp_path / "config.yaml"
    config.write_text("version: v1\nflags:\n  migStrategy: single\n")
    tmp_path.chmod(0o755)
    answer = containers("validate", "/config.yaml", options=(f"--volume={config}:/config.yaml:ro",))
    assert "single" in answer


@pytest.mark.parametrize("user", ["65532:65532", "0:0"], ids=["the image's user", "root as in the chart"])
async def test_the_daemon_serves_a_kubelet_and_ends_at_once(containers, user, directory, short_path):
    name = f"daemon-{user.partition(':')[0]}"
    try:
        state = short_path / "state"
        state.mkdir()
        for each in (directory, state):
            os.chown(each, int(user.partition(":")[0]), -1)
        short_path.chmod(0o755)
        async with StandInKubelet(directory) as kubelet:
            (directory / "kubelet.sock").chmod(0o777)  # the kubelet decides which users may connect
            options = (*image_build.LIMITS, *HARDENED, f"--name={name}", f"--user={user}", "--env=PYTHONVERBOSE=1")
            mounts = (f"--volume={directory}:/var/lib/kubelet/device-plugins", f"--volume={state}:/var/lib/gpu-plugin")
            flags = ("--simulate=hgx-h100", "--cdi-dir=/tmp/cdi")
            await _podman(containers, "run", "--detach", *options, *mounts, "--tmpfs=/tmp", TAG, "run", *flags)
            await kubelet.wait_for(healthy(kubelet, 8), 20)
            response = (await kubelet.admit("pod", {"nvidia.com/gpu": 2})).allocations[0].response
            assert len(response.envs["NVIDIA_VISIBLE_DEVICES"].split(",")) == 2
            assert "All 8 GPUs are Healthy" in await _podman(containers, "exec", name, "gpu-plugin", "status")
            pid = (await _podman(containers, "inspect", "--format={{.State.Pid}}", name)).strip()
            assert Path(f"/proc/{pid}/comm").read_text() == "gpu-plugin\n"
            began = time.perf_counter()
            await _podman(containers, "stop", "--time=10", name)
            assert time.perf_counter() - began < 2
            assert (await _podman(containers, "inspect", "--format={{.State.ExitCode}}", name)).strip() == "0"
        kubelet.check()
        text = await anyio.to_thread.run_sync(_log, containers, name)
        # The interpreter logs "code object from FILE.py" for a file that it compiled, and quotes the name if it read bytecode.
        assert "code object from '/opt/gpu-plugin/lib" in text
        assert re.findall(r"^# code object from (?!')\S+\.py$", text, re.MULTILINE) == []
        assert re.findall(r"^# (?:wrote|could not create) .*$", text, re.MULTILINE) == []
    finally:
        await _podman(containers, "rm", "--force", "--ignore", "--time=0", name)


async def _podman(containers: Containers, *arguments: str) -> str:
    return await anyio.to_thread.run_sync(lambda: containers.podman(*arguments))


def _log(containers: Containers, name: str) -> str:
    done = subprocess.run([*containers.command, "logs", name], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout + done.stderr


@pytest.mark.parametrize("processor", wheels.MACHINES)
@pytest.mark.parametrize("python", wheels.PYTHONS)
def test_there_are_wheels_by_hash_for_both_processors(python, processor):
    fetched = list(found(partial(wheels.find, python, processor)).iterdir())
    assert fetched
    assert {each.suffix for each in fetched} == {".whl"}


@pytest.fixture(scope="session")
def successor() -> Path:
    """The archive of an image of another version."""
    return found(partial(image_build.find, SUCCESSOR, SUCCESSOR_VERSION))


def test_an_image_to_upgrade_to_says_its_version_and_recompiles_nothing(containers, successor):
    _, configuration = _document(successor)
    config = configuration["config"]
    assert config["Labels"]["org.opencontainers.image.version"] == SUCCESSOR_VERSION
    assert (config["User"], config["Entrypoint"], config["Cmd"]) == ("65532:65532", ["gpu-plugin"], ["run"])
    containers.podman("load", f"--input={successor}")
    run = ("run", "--rm", *image_build.LIMITS, *HARDENED)
    assert containers.podman(*run, SUCCESSOR, "--version").strip().endswith(SUCCESSOR_VERSION)
    python = ("--entrypoint=/opt/gpu-plugin/bin/python3", SUCCESSOR, "-I", "-c")
    assert json.loads(containers.podman(*run, *python, BYTECODE)) == []
    assert containers("--version").strip().endswith(__version__)
