"""What the image's root directory is made of, on small bases: links, libraries' places, package records, and refusals."""

import json
import os
import sys
from pathlib import Path

import pytest

from image.assemble import (
    AssembleError,
    Libraries,
    Root,
    base_components,
    bill_of_materials,
    interpreter,
    package_records,
    settle,
)

PYTHON = f"python3.{sys.version_info.minor}"


@pytest.fixture
def base(tmp_path) -> Path:
    """A base as distributions have it since /usr was merged: bin and lib are links, and so is the interpreter."""
    made: Path = tmp_path / "base"
    for directory in ("usr/bin", "usr/lib/x86_64-linux-gnu", "etc/alternatives"):
        (made / directory).mkdir(parents=True)
    for name in ("bin", "lib"):
        (made / name).symlink_to(f"usr/{name}")
    (made / "usr/bin" / PYTHON).write_text("interpreter")
    (made / "usr/bin" / PYTHON).chmod(0o755)
    (made / "etc/alternatives/python3").symlink_to(f"/usr/bin/{PYTHON}")
    (made / "usr/bin/python3").symlink_to("/etc/alternatives/python3")
    return made


@pytest.fixture
def root(base, tmp_path) -> Root:
    (tmp_path / "image").mkdir()
    return Root(base, tmp_path / "image")


def test_a_file_comes_with_every_link_on_the_way_to_it(root):
    assert root.take("/bin/python3") == f"/usr/bin/{PYTHON}"
    assert str(root.at("/bin").readlink()) == "usr/bin"
    assert str(root.at("/usr/bin/python3").readlink()) == "/etc/alternatives/python3"
    assert str(root.at("/etc/alternatives/python3").readlink()) == f"/usr/bin/{PYTHON}"
    assert root.at(f"/usr/bin/{PYTHON}").read_text() == "interpreter"
    assert root.taken == {"/bin", "/usr/bin/python3", "/etc/alternatives/python3", f"/usr/bin/{PYTHON}"}


def test_links_lead_nowhere_outside_the_base(root, base):
    (base / "up").symlink_to("../../../../etc/passwd")
    (base / "round").symlink_to("about")
    (base / "about").symlink_to("round")
    assert root.real("/up") is None
    assert root.take("/round") is None
    assert root.take("/bin/nothing") is None
    assert list(root.at("/").iterdir()) == []


def test_what_is_below_a_directory_comes_but_for_names_left_out(root, base):
    for path in ("os.py", "test/one.py", "json/__init__.py", "json/__pycache__/x.pyc", "_tkinter.so"):
        file = base / "usr/lib" / PYTHON / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    root.take_below(f"/lib/{PYTHON}", ("test", "__pycache__", "_tk*"))
    kept = {
        str(each.relative_to(root.at(f"/usr/lib/{PYTHON}")))
        for each in root.at("/usr/lib").rglob("*.*")
        if each.is_file()
    }
    assert kept == {"os.py", "json/__init__.py"}


def test_the_interpreter_must_be_of_the_version_that_the_environment_is_made_with(root, base):
    assert interpreter(root) == "/usr/bin/python3"
    (base / "usr/local/bin").mkdir(parents=True)
    (base / "usr/local/bin/python3.6").touch()
    (base / "usr/local/bin/python3").symlink_to("python3.6")
    with pytest.raises(AssembleError, match=rf"BASE has {PYTHON}, RUN_BASE has python3.6 \(/usr/local/bin/python3.6\)"):
        interpreter(root)


def test_a_base_without_an_interpreter_is_refused(root, base):
    (base / "usr/bin/python3").unlink()
    with pytest.raises(AssembleError, match="RUN_BASE has no /usr/local/bin/python3 or /usr/bin/python3"):
        interpreter(root)


def test_a_file_comes_with_the_libraries_that_it_names_and_theirs(root):
    """This machine is the base: an interpreter's own extension modules and their libraries are at hand."""
    whole = Root(Path("/"), root.at("/"))
    libraries = Libraries(whole)
    program = os.path.realpath(sys.executable)
    whole.take(program)
    assert libraries.take(whole.at(program), program) is None
    taken = {Path(path).name for path in whole.taken}
    assert "libc.so.6" in taken
    assert {name for name in taken if name.startswith("ld-linux")}


def test_a_library_that_is_not_there_is_named(root, tmp_path):
    whole = Root(tmp_path / "base", root.at("/"))
    assert Libraries(whole).take(Path(os.path.realpath(sys.executable)), "/usr/bin/python3") is not None
    assert Libraries(whole).take(Path(__file__), "/usr/bin/script") is None  # no ELF file needs nothing


def test_packages_of_which_something_was_taken_keep_their_record_and_their_licence(root, base):
    dpkg = base / "var/lib/dpkg"
    (dpkg / "info").mkdir(parents=True)
    (dpkg / "status").write_text("Package: libc6\nVersion: 2.41\n\nPackage: dash\nVersion: 0.5\n")
    (dpkg / "info/libc6:amd64.list").write_text("/.\n/lib\n/lib/x86_64-linux-gnu/libc.so.6\n")
    (dpkg / "info/dash.list").write_text("/.\n/usr\n/usr/bin\n/usr/bin/dash\n")
    (base / "usr/lib/x86_64-linux-gnu/libc.so.6").touch()
    for package in ("libc6", "dash"):
        (base / "usr/share/doc" / package).mkdir(parents=True)
        (base / "usr/share/doc" / package / "copyright").write_text("LGPL")
    root.take("/lib/x86_64-linux-gnu/libc.so.6")
    assert package_records(root) == ["Package: libc6\nVersion: 2.41\n"]
    assert [each.name for each in root.at("/var/lib/dpkg/status.d").iterdir()] == ["libc6"]
    assert root.at("/var/lib/dpkg/status.d/libc6").read_text() == "Package: libc6\nVersion: 2.41\n"
    assert [each.name for each in root.at("/usr/share/doc").iterdir()] == ["libc6"]


def test_a_base_that_is_small_already_keeps_all_its_records(root, base):
    (base / "var/lib/dpkg/status.d").mkdir(parents=True)
    (base / "var/lib/dpkg/status.d/libc6").write_text("Package: libc6\n")
    (base / "var/lib/dpkg/status.d/libc6.md5sums").write_text("d41d8cd98f00b204e9800998ecf8427e  lib/libc.so.6\n")
    (base / "usr/share/doc/libc6").mkdir(parents=True)
    (base / "usr/share/doc/libc6/copyright").touch()
    assert package_records(root) == ["Package: libc6\n"]
    assert root.at("/var/lib/dpkg/status.d/libc6").exists()
    assert root.at("/usr/share/doc/libc6/copyright").exists()


def test_there_are_users_and_the_directories_that_a_read_only_root_needs(root):
    settle(root)
    assert "gpu-plugin:x:65532:65532:" in root.at("/etc/passwd").read_text()
    assert "hosts: files dns" in root.at("/etc/nsswitch.conf").read_text()
    assert root.at("/var/lib/gpu-plugin").is_dir()
    assert str(root.at("/var/run").readlink()) == "/run"


def test_a_package_of_which_a_link_alone_was_taken_is_recorded_but_for_one_to_a_directory(root, base):
    (base / "var/lib/dpkg/info").mkdir(parents=True)
    (base / "var/lib/dpkg/status").write_text("Package: python3-minimal\nVersion: 3\n\nPackage: dash\nVersion: 0.5\n")
    (base / "var/lib/dpkg/info/dash.list").write_text("/.\n/bin\n/bin/dash\n")
    (base / "var/lib/dpkg/info/python3-minimal.list").write_text("/.\n/usr\n/usr/bin\n/usr/bin/python3\n")
    root.take("/bin/python3")
    assert package_records(root) == ["Package: python3-minimal\nVersion: 3\n"]


def test_the_bill_of_materials_says_which_gpu_plugin_it_is_of_and_what_the_base_gave(root, tmp_path):
    (tmp_path / "bill.json").write_text(
        '{"metadata": {"component": {"name": "gpu-plugin"}}, "components": [{"name": "anyio"}]}'
    )
    python = {"bom-ref": "pkg:generic/python@3.13.1", "name": "python"}
    bill_of_materials(root, tmp_path / "bill.json", "1.2.3", [python])
    bill = json.loads(root.at("/usr/share/gpu-plugin/sbom.cdx.json").read_text())
    assert bill["metadata"]["component"] == {"name": "gpu-plugin", "version": "1.2.3"}
    assert bill["components"] == [{"name": "anyio"}, python]
    assert bill["dependencies"] == [{"ref": "pkg:generic/python@3.13.1"}]


def test_packages_are_components_by_their_url_with_their_source(root, base):
    (base / "etc/os-release").write_text('ID=debian\nVERSION_ID="12"\n')
    records = [
        "Package: libc6\nSource: glibc (2.36-9)\nVersion: 2.36-9+deb12u13\nArchitecture: amd64\n",
        f"Package: lib{PYTHON}-minimal\nSource: {PYTHON}\nVersion: 1:3.11~rc2-6\nArchitecture: amd64\n",
        "Package: libstdc++6\nVersion: 12.2.0-14\n",
    ]
    components = base_components(root, records)
    assert components[0] == {"bom-ref": "debian", "type": "operating-system", "name": "debian", "version": "12"}
    assert [each["purl"] for each in components[1:]] == [
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u13?arch=amd64&distro=debian-12&upstream=glibc",
        f"pkg:deb/debian/lib{PYTHON}-minimal@1:3.11~rc2-6?arch=amd64&distro=debian-12&upstream={PYTHON}",
        "pkg:deb/debian/libstdc%2B%2B6@12.2.0-14?distro=debian-12",
    ]
    assert (components[1]["name"], components[1]["version"]) == ("libc6", "2.36-9+deb12u13")


def test_a_python_of_no_package_is_a_component_by_the_version_in_its_program(root, base):
    version = f"3.{sys.version_info.minor}.42"
    (base / "usr/bin" / PYTHON).write_bytes(b"\x7fELF\0" + version.encode() + b"+\0" + PYTHON.encode() + b"\0")
    interpreter(root)
    assert base_components(root, []) == [
        {
            "bom-ref": f"pkg:generic/python@{version}",
            "type": "application",
            "name": "python",
            "version": version,
            "purl": f"pkg:generic/python@{version}",
        }
    ]
    root.at(f"/usr/bin/{PYTHON}").write_bytes(b"nothing of it")
    (component,) = base_components(root, [])
    assert component["version"] == f"3.{sys.version_info.minor}"
    (base / "usr/include" / PYTHON).mkdir(parents=True)
    (base / "usr/include" / PYTHON / "patchlevel.h").write_text(f'#define PY_VERSION      \t"{version}+"\n')
    (component,) = base_components(root, [])
    assert component["version"] == version
