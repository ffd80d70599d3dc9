"""The image as a container runtime meets it: started with nothing to write to and no capabilities, and searched file by file."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from gpu_plugin import __version__
from gpu_plugin.simulation.stand_in_kubelet import StandInKubelet
from tests.node.daemon import healthy
from tests.real import archive, image_build
from tests.short_paths import short_directory

pytestmark = pytest.mark.timeout(600)  # one of them builds the image, which a busy machine does in minutes

TAG, SUCCESSOR = image_build.TAG, "localhost/gpu-plugin-test/gpu-plugin:2"
HARDENED = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--pids-limit=256")

PARTS = {
    "bytecode of the standard library": (r"usr/.*/__pycache__/.*", 13),
    "bytecode of dependencies": (r"opt/.*/site-packages/(?!gpu_plugin/).*__pycache__/.*", 12),
    "bytecode of gpu-plugin": (r"opt/.*/site-packages/gpu_plugin/.*__pycache__/.*", 5),
    "interpreter": (r"usr/(local/)?bin/python3[.0-9]*|usr/(local/)?lib/libpython.*", 8),
    "standard library": (r"usr/(local/)?lib/python3[.0-9]*/.*", 13),
    "C library, TLS, others": (r"(usr/)?lib(64)?/.*\.so.*", 11),
    "dependencies": (r"opt/.*/site-packages/(?!gpu_plugin/).*", 15),
    "gpu-plugin": (r"opt/.*/site-packages/gpu_plugin/.*", 3),
    "the rest": (r".*", 3),
}
"""What is in the image, the first pattern that matches a file, and how many MiB it may take."""

FORBIDDEN = re.compile(
    r"(ba|da|a|z|k|c|tc)?sh|busybox|perl.*|pip.*|easy_install|apt.*|dpkg.*|rpm|yum"
    r"|(g?cc|[cg]\+\+|cpp|ld|as|make)(-.*)?|su|sudo|mount|curl|wget"
)
"""Programs that are in no directory of programs."""

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
    """Podman with the one image."""

    command: list[str]

    def __call__(self, *arguments: str, options: tuple[str, ...] = ()) -> str:
        """What the image's command prints, run as its default user under `HARDENED`."""
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
    try:
        return image_build.built(TAG)
    except image_build.NoImageError as error:
        if os.environ.get("E2E") == "required":
            pytest.fail(f"no test of the image: {error}")
        pytest.skip(f"no test of the image: {error}")


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
def files(image: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tarfile.TarInfo]:
    """Everything in the image, by its path without the first slash: it is one layer."""
    (layer,) = _document(image)[0]["layers"]
    with tarfile.open(image) as whole:
        content = whole.extractfile(_blob(layer["digest"]))
        assert content is not None
        with tarfile.open(fileobj=content, mode="r:*") as tar:
            return {entry.name.removeprefix("./").rstrip("/"): entry for entry in tar}


def _contents(image: Path) -> Iterator[tuple[str, bytes]]:
    (layer,) = _document(image)[0]["layers"]
    with (
        tarfile.open(image) as whole,
        tarfile.open(fileobj=whole.extractfile(_blob(layer["digest"])), mode="r:*") as tar,
    ):
        for entry in tar:
            if entry.isreg():
                content = tar.extractfile(entry)
                assert content is not None
                yield entry.name, content.read()


def _document(image: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The manifest and the configuration of an archive."""
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
    assert "NVIDIA_VISIBLE_DEVICES" not in environment  # not every container of this image is to have every GPU
    assert environment["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"


def test_nothing_is_setuid_or_for_others_to_write_and_all_is_roots(files):
    assert {path for path, entry in files.items() if entry.mode & 0o6000} == set()
    for path, entry in files.items():
        if path == "tmp":
            assert entry.mode & 0o7777 == 0o1777
        elif path == "var/lib/gpu-plugin":
            assert (entry.uid, entry.gid, entry.mode & 0o7777) == (65532, 65532, 0o700)
        else:
            assert (entry.uid, entry.gid) == (0, 0), path
            assert entry.issym() or not entry.mode & 0o022, path


def test_there_is_no_shell_no_compiler_no_pip_and_no_cache(files):
    programs = {path for path, entry in files.items() if "bin" in Path(path).parts and not entry.isdir()}
    assert {path for path in programs if FORBIDDEN.fullmatch(Path(path).name)} == set()
    own = {f"opt/gpu-plugin/bin/{name}" for name in ("gpu-plugin", "python", "python3")}
    assert {path for path in programs if not re.search(r"/python3\.\d+$", path)} == own | {"usr/bin/python3"}
    packages = {Path(path).name.partition("-")[0] for path in files if Path(path).parent.name == "site-packages"}
    assert not packages & {"pip", "setuptools", "wheel", "hatchling", "cyclonedx_py", "pkg_resources"}
    assert {
        path for path in files if re.search(r"(^|/)(\.cache|ensurepip|direct_url\.json|pip\.conf)(/|$)", path)
    } == set()
    assert {path for path in files if path.startswith(("source", "wheels", "build", "root", "run-base"))} == set()


def test_nothing_of_how_it_was_built_is_in_it(image, files):
    manifest, configuration = _document(image)
    said = json.dumps([manifest, configuration])
    assert "PIP_" not in said
    assert "secret" not in said
    of_the_build = re.compile(
        rb"/run/secrets/(?:ca|pip)|/run-base|[ '\"]/wheels|/opt/wheels|/source/(?:gpu_plugin|requirements)|pip\.conf"
    )
    found = {path: of_the_build.findall(content) for path, content in _contents(image)}
    assert {path: hits for path, hits in found.items() if hits} == {}
    assert {entry.mtime for path, entry in files.items() if path} == {1577836800}


def test_every_module_has_bytecode_that_is_never_judged_again(containers):
    assert containers.python(BYTECODE) == []


def test_what_was_left_out_is_imported_by_nothing_of_ours(containers):
    assert containers.python(IMPORTED) > 150


def test_no_part_is_larger_than_it_was_meant_to_be(files, image):
    sizes = dict.fromkeys(PARTS, 0)
    for path, entry in files.items():
        sizes[next(name for name, (pattern, _) in PARTS.items() if re.fullmatch(pattern, path))] += entry.size
    table = {name: round(size / 2**20, 1) for name, size in sizes.items()}
    print(
        json.dumps(table),
        f"all: {sum(sizes.values()) / 2**20:.1f} MiB, to fetch: {image.stat().st_size / 2**20:.1f} MiB",
    )
    assert {name: size for name, size in table.items() if size > PARTS[name][1]} == {}
    assert image.stat().st_size < 26 * 2**20


def test_the_bill_of_materials_has_every_distribution_that_is_installed(containers):
    bill = containers.python("print(open('/usr/share/gpu-plugin/sbom.cdx.json').read())")
    assert bill["bomFormat"] == "CycloneDX"
    (main,) = [bill["metadata"]["component"]]
    wheels = [each for each in bill["components"] if each.get("purl", "").startswith("pkg:pypi/")]
    components = {_normal(each["name"]): each for each in wheels}
    installed = {_normal(each["name"]): each for each in containers.python(INSTALLED)}
    assert set(components) == set(installed) - {"gpu-plugin"}
    assert (main["name"], main["version"]) == ("gpu-plugin", __version__)
    for name, component in components.items():
        assert component["version"] == installed[name]["version"]
        assert component["purl"] == f"pkg:pypi/{name}@{component['version']}"
        assert bool(component.get("licenses")) == installed[name]["licensed"], name
    locked = re.findall(
        r"^([a-z0-9._-]+)==(\S+)", (image_build.ROOT / "requirements/run.lock").read_text(), re.MULTILINE
    )
    assert {(name, each["version"]) for name, each in components.items()} <= {(_normal(name), v) for name, v in locked}


OF_NO_PACKAGE = {
    r"etc/(passwd|group|nsswitch\.conf|ld\.so\.conf)": "the image's own, made by image/assemble.py",
    r"etc/ld\.so\.cache": "made by ldconfig of the libraries in the image",
    r"usr/share/gpu-plugin/sbom\.cdx\.json": "the bill itself",
    r"var/lib/dpkg/status\.d/[^/]+": "the records of the packages",
    r"var/run": "a link to /run, which each system makes",
    r"opt/gpu-plugin/(pyvenv\.cfg|lib64|bin/python[.\d]*)": "the virtual environment: a text of image/assemble.py, links",
    r"usr/share/doc/[^/]+/copyright": "licences; some packages have theirs in another one, of which nothing else is taken",
}
"""Files that are of no package and no wheel, and what they are."""

RECORDED = """
import importlib.metadata, json, os
print(json.dumps([os.path.normpath(str(file.locate())) for each in importlib.metadata.distributions() for file in each.files]))
"""


def test_every_file_is_of_a_component_of_the_bill(files, containers):
    bill = containers.python("print(open('/usr/share/gpu-plugin/sbom.cdx.json').read())")
    listed = {each["purl"].partition("?")[0] for each in bill["components"] if "purl" in each}
    owners = _owners(archive.debian_system(archive.RUN_SYSTEM))
    recorded = set(containers.python(RECORDED))
    strangers = []
    for path, entry in files.items():
        source = re.sub(r"__pycache__/([^/]+)\.cpython-\d+\.pyc$", r"\1.py", path)
        purl = owners.get(f"/{source}".removeprefix("/usr"))
        known = purl in listed or f"/{source}" in recorded
        if not entry.isdir() and not known and not any(re.fullmatch(each, path) for each in OF_NO_PACKAGE):
            strangers.append(f"{path}: {purl or 'of no package'}")
    assert strangers == []
    assert "operating-system" in {each["type"] for each in bill["components"]}
    names = " ".join(sorted(re.split("[/@]", each)[2] for each in listed if each.startswith("pkg:deb/")))
    for package in ("base-files", "libc6", "libexpat1", r"libssl3\w*", r"python3\.\d+-minimal", "zlib1g"):
        assert re.search(rf"\b{package}\b", names), names
    assert not re.search(r"libpcre2|dpkg|dash", names), names  # nothing of these is in the image


def _owners(system: Path) -> dict[str, str]:
    """By path without /usr: the package URL of the package of a Debian system that has the file, by dpkg's own records."""
    owners: dict[str, str] = {}
    for record in (system / "var/lib/dpkg/status").read_text().split("\n\n"):
        fields = dict(re.findall(r"^(Package|Version): (.+)$", record, re.MULTILINE))
        for listed in (system / "var/lib/dpkg/info").glob(f"{fields.get('Package')}[.:]*list"):
            if listed.name.removesuffix(".list").partition(":")[0] == fields["Package"]:
                purl = f"pkg:deb/debian/{fields['Package']}@{fields['Version']}".replace("+", "%2B")
                owners |= dict.fromkeys((path.removeprefix("/usr") for path in listed.read_text().splitlines()), purl)
    return owners


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
            (directory / "kubelet.sock").chmod(0o777)  # whom it lets in is the kubelet's affair
            options = (*image_build.LIMITS, *HARDENED, f"--name={name}", f"--user={user}", "--env=PYTHONVERBOSE=1")
            mounts = (f"--volume={directory}:/var/lib/kubelet/device-plugins", f"--volume={state}:/var/lib/gpu-plugin")
            flags = ("--simulate=hgx-h100", "--cdi-dir=/tmp/cdi")
            await _podman(containers, "run", "--detach", *options, *mounts, "--tmpfs=/tmp", TAG, "run", *flags)
            await kubelet.wait_for(healthy(kubelet, 8), 20)
            response = (await kubelet.admit("pod", {"nvidia.com/gpu": 2})).allocations[0].response
            assert len(response.envs["NVIDIA_VISIBLE_DEVICES"].split(",")) == 2
            assert "8 of 8 devices Healthy" in await _podman(containers, "exec", name, "gpu-plugin", "status")
            pid = (await _podman(containers, "inspect", "--format={{.State.Pid}}", name)).strip()
            assert Path(f"/proc/{pid}/comm").read_text() == "gpu-plugin\n"
            began = time.perf_counter()
            await _podman(containers, "stop", "--time=10", name)
            assert time.perf_counter() - began < 2
            assert (await _podman(containers, "inspect", "--format={{.State.ExitCode}}", name)).strip() == "0"
        kubelet.check()
        said = await anyio.to_thread.run_sync(_log, containers, name)
        # The interpreter says "code object from FILE.py" of what it compiled, and quotes the name of bytecode that it read.
        assert "code object from '/opt/gpu-plugin/lib" in said
        assert re.findall(r"^# code object from (?!')\S+\.py$", said, re.MULTILINE) == []
        assert re.findall(r"^# (?:wrote|could not create) .*$", said, re.MULTILINE) == []
    finally:
        await _podman(containers, "rm", "--force", "--ignore", "--time=0", name)


async def _podman(containers: Containers, *arguments: str) -> str:
    return await anyio.to_thread.run_sync(lambda: containers.podman(*arguments))


def _log(containers: Containers, name: str) -> str:
    done = subprocess.run([*containers.command, "logs", name], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout + done.stderr


@pytest.mark.parametrize("processor", sorted(archive.MULTIARCH))
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
def test_there_are_wheels_by_hash_for_both_processors(image, python, processor, tmp_path):
    del image  # where it could be built, the package index is there
    machine = {"amd64": "x86_64", "arm64": "aarch64"}[processor]
    platforms = [f"--platform=manylinux{each}_{machine}" for each in ("2014", "_2_28", "_2_34")]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--require-hashes",
        "--only-binary=:all:",
        "--no-deps",
    ]
    lock = image_build.ROOT / "requirements/run.lock"
    image_build.run([*command, *platforms, f"--python-version={python}", f"--dest={tmp_path}", f"--requirement={lock}"])
    assert {each.suffix for each in tmp_path.iterdir()} == {".whl"}


@pytest.fixture(scope="session")
def successor(image: Path) -> Path:
    """The archive of an image of another version."""
    del image  # where it could be built, so can this
    return image_build.built(SUCCESSOR, version="7.8.9")


def test_an_image_to_upgrade_to_says_its_version_and_recompiles_nothing(containers, successor):
    _, configuration = _document(successor)
    config = configuration["config"]
    assert config["Labels"]["org.opencontainers.image.version"] == "7.8.9"
    assert (config["User"], config["Entrypoint"], config["Cmd"]) == ("65532:65532", ["gpu-plugin"], ["run"])
    containers.podman("load", f"--input={successor}")
    run = ("run", "--rm", *image_build.LIMITS, *HARDENED)
    assert containers.podman(*run, SUCCESSOR, "--version").strip().endswith("7.8.9")
    python = ("--entrypoint=/opt/gpu-plugin/bin/python3", SUCCESSOR, "-I", "-c")
    assert json.loads(containers.podman(*run, *python, BYTECODE)) == []
    assert containers("--version").strip().endswith(__version__)
