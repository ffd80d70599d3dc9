"""Makes the root directory of the image: of a base only what the interpreter loads, then gpu-plugin's virtual environment.

Runs while the image is built, with the interpreter of the build stage (see the Dockerfile); pyelftools is in the environment.
What is taken of the base: the interpreter, its standard library but for parts that need a terminal, a window or a database,
the shared libraries that these and the environment's own extension modules name, all of the C library, certificates, and the
copyright files and package records of whatever that is. What is left out so: shells, package managers, pip, setuid programs.
"""

import argparse
import compileall
import fnmatch
import json
import os
import py_compile
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import StringTableSection
from elftools.elf.segments import InterpSegment

INTERPRETERS = ("usr/local/bin/python3", "usr/bin/python3")
"""Where distributions and the official Python images have it."""

LEFT_OUT_OF_LIBRARY = (
    *("__pycache__", "config-*", "curses", "dbm", "dist-packages", "ensurepip", "idlelib", "lib2to3", "pydoc_data"),
    *("site-packages", "sqlite3", "test", "tests", "tkinter", "turtle.py", "turtledemo", "venv", "EXTERNALLY-MANAGED"),
)
LEFT_OUT_OF_EXTENSIONS = (
    *("*_test*", "_curses*", "_dbm*", "_gdbm*", "_sqlite3*", "_tkinter*", "_xxtest*", "nis*", "readline*", "xx*"),
)
"""File names below lib/pythonX.Y and its lib-dynload: nothing that gpu-plugin imports."""

ALWAYS = (
    *("libanl.so.1", "libc.so.6", "libdl.so.2", "libm.so.6", "libnss_dns.so.2", "libnss_files.so.2", "libpthread.so.0"),
    *("libresolv.so.2", "librt.so.1", "libutil.so.1", "libgcc_s.so.1"),
)
"""Libraries that no file here need name: the driver's libraries and programs do, or the C library loads them by itself."""

ETC = (
    *(
        "ca-certificates.conf",
        "debian_version",
        "host.conf",
        "ld.so.conf",
        "ld.so.conf.d",
        "localtime",
        "nsswitch.conf",
    ),
    *("os-release", "pki/tls/certs", "pki/ca-trust/extracted", "ssl/cert.pem", "ssl/certs", "ssl/openssl.cnf"),
)

STATE_DIRECTORY, USER = "var/lib/gpu-plugin", 65532
"""Where the daemon keeps its state, and who owns that and runs the image by default."""

_PASSWD = f"root:x:0:0:root:/:/sbin/nologin\ngpu-plugin:x:{USER}:{USER}:gpu-plugin:/{STATE_DIRECTORY}:/sbin/nologin\n"
_GROUP = f"root:x:0:\ngpu-plugin:x:{USER}:\n"
_NSSWITCH = "passwd: files\ngroup: files\nhosts: files dns\n"


class AssembleError(Exception):
    """The image cannot be made of this base; the text says why and what to do."""


class Root:
    """A root directory in the making, of files that lie below another one.

    Paths are absolute, as programs in the image see them. Symbolic links are kept: all on the way to a file are made anew.
    """

    def __init__(self, base: Path, image: Path) -> None:
        self._base, self._image = base, image
        self.taken: set[str] = set()

    def real(self, path: str) -> str | None:
        """What a path leads to in the base, with no link left in it, or None where that is nothing."""
        found, _ = self._walk(path)
        return found

    def take(self, path: str) -> str | None:
        """Has the file, or the directory without its content, and all links that lead to it. Returns what `real` does."""
        found, links = self._walk(path)
        if found is None:
            return None
        for link in links:
            self._directory(os.path.dirname(link))
            if not os.path.lexists(self.at(link)):
                os.symlink(os.readlink(self._below(link)), self.at(link))
            self.taken.add(link)
        if self._below(found).is_dir():
            self._directory(found)
        elif found not in self.taken:
            self._directory(os.path.dirname(found))
            shutil.copy2(self._below(found), self.at(found))
        self.taken.add(found)
        return found

    def take_below(self, path: str, without: tuple[str, ...] = ()) -> None:
        """Has the directory with its content, names that match `without` left out; does nothing where there is none."""
        top = self.take(path)
        if top is None or not self._below(top).is_dir():
            return
        for name in sorted(os.listdir(self._below(top))):
            if not any(fnmatch.fnmatch(name, pattern) for pattern in without):
                inner = f"{top}/{name}"
                if self._below(inner).is_dir() and not self._below(inner).is_symlink():
                    self.take_below(inner, without)
                else:
                    self.take(inner)

    def at(self, path: str) -> Path:
        """Where a path of the image is while it is made."""
        return self._image / path.lstrip("/")

    def read(self, path: str) -> str:
        """A text file of the base, or nothing where there is none."""
        found = self.real(path)
        return self._below(found).read_text(errors="replace") if found is not None else ""

    def names(self, path: str) -> list[str]:
        """What is in a directory of the base, in order; nothing where there is none."""
        found = self.real(path)
        return sorted(os.listdir(self._below(found))) if found is not None else []

    def _below(self, path: str) -> Path:
        return self._base / path.lstrip("/")

    def _directory(self, path: str) -> None:
        self.at(path).mkdir(parents=True, exist_ok=True)

    def _walk(self, path: str) -> tuple[str | None, list[str]]:
        """What a path leads to, and the links on the way, the first one first."""
        done, ahead, links = "", [part for part in path.split("/") if part], []
        while ahead:
            part = ahead.pop(0)
            if part in {"..", "."}:
                done = os.path.dirname(done) if part == ".." else done
                continue
            here = f"{done}/{part}"
            if self._below(here).is_symlink():
                links.append(here)
                if len(links) > 40:  # as the kernel counts them
                    return None, links
                target = os.readlink(self._below(here))
                done = "" if target.startswith("/") else done
                ahead = [part for part in target.split("/") if part] + ahead
            elif not self._below(here).exists():
                return None, links
            else:
                done = here
        return done.removesuffix("/") or "/", links


class Libraries:
    """The shared libraries that files name, as the loader of the base finds them."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._directories = [*_configured(root, "/etc/ld.so.conf"), "/usr/local/lib"]
        for top in ("/lib", "/usr/lib"):
            self._directories += [f"{top}/{name}" for name in root.names(top) if name.endswith("-linux-gnu")]
            self._directories += [f"{top}64", top]

    def take(self, file: Path, path: str) -> str | None:
        """Has all that a file needs to be loaded, recursively. Returns what of it is not there, or None.

        Args:
            file: where it can be read.
            path: where it is in the image.
        """
        named = _dynamic(file)
        if named is None:
            return None
        needed, searched, loader = named
        if loader and self._root.take(loader) is None:
            return loader
        inside = [
            each.replace("$ORIGIN", os.path.dirname(path)).replace("${ORIGIN}", os.path.dirname(path))
            for each in searched
        ]
        for name in needed:
            if missing := self._take_named(name, inside):
                return missing
        return None

    def always(self) -> None:
        """Has those of `ALWAYS` that the base has."""
        for name in ALWAYS:
            self._take_named(name, [])

    def _take_named(self, name: str, inside: list[str]) -> str | None:
        for directory in (*inside, *self._directories):
            place = os.path.normpath(f"{directory}/{name}")
            if (found := self._root.real(place)) is not None:
                known = found in self._root.taken
                self._root.take(place)
                return None if known else self.take(self._root.at(found), found)
            if directory in inside and self._root.at(place).is_file():
                return None  # the environment's own
        return name


def _configured(root: Root, path: str) -> Iterator[str]:
    for line in root.read(path).splitlines():
        words = line.partition("#")[0].split()
        if words[:1] == ["include"]:
            for pattern in words[1:]:
                directory, _, names = pattern.rpartition("/")
                for name in fnmatch.filter(root.names(directory), names):
                    yield from _configured(root, f"{directory}/{name}")
        else:
            yield from words


def _dynamic(file: Path) -> tuple[list[str], list[str], str | None] | None:
    """The libraries that an ELF file needs, where it has them searched, and its loader; None for any other file."""
    with file.open("rb") as content:
        if content.read(4) != b"\x7fELF":
            return None
        try:
            elf = ELFFile(content)
            section = elf.get_section_by_name(".dynamic")
            needed, searched = [], []
            if isinstance(section, DynamicSection):
                names = elf.get_section(section["sh_link"])
                assert isinstance(names, StringTableSection)  # the ELF specification: what a dynamic section links to
                for tag in section.iter_tags():
                    if tag.entry.d_tag == "DT_NEEDED":
                        needed.append(names.get_string(tag.entry.d_val))
                    elif tag.entry.d_tag in {"DT_RUNPATH", "DT_RPATH"}:
                        searched += [each for each in names.get_string(tag.entry.d_val).split(":") if each]
            loaders = [each.get_interp_name() for each in elf.iter_segments() if isinstance(each, InterpSegment)]
        except ELFError as error:
            raise AssembleError(f"{file} is a damaged ELF file: {error}") from None
        return needed, searched, next(iter(loaders), None)


def interpreter(root: Root) -> str:
    """Has the interpreter of the base. Returns its path, the one that the environment is to link to.

    Raises:
        AssembleError: there is none, or it is of another minor version than the one that built the environment.
    """
    for link in INTERPRETERS:
        found = root.real(f"/{link}")
        if found is not None:
            break
    else:
        raise AssembleError(f"RUN_BASE has no {' or '.join(f'/{each}' for each in INTERPRETERS)}: name another one")
    name, ours = os.path.basename(found), f"python3.{sys.version_info.minor}"
    if name != ours:
        raise AssembleError(f"BASE has {ours}, RUN_BASE has {name} ({found}): give both the same minor version")
    root.take(f"/{link}")
    return f"/{link}"


def standard_library(root: Root, libraries: Libraries, python: str) -> str:
    """Has the standard library of that interpreter and what its extension modules need. Returns its directory."""
    real = root.real(python)
    assert real is not None
    if missing := libraries.take(root.at(real), real):
        raise AssembleError(f"{python} needs {missing}, which RUN_BASE does not have")
    directory = f"{os.path.dirname(os.path.dirname(python))}/lib/{os.path.basename(real)}"
    root.take_below(directory, (*LEFT_OUT_OF_LIBRARY, *LEFT_OUT_OF_EXTENSIONS))
    if not root.at(f"{directory}/os.py").is_file():
        raise AssembleError(f"RUN_BASE has no standard library in {directory}")
    for extension in sorted(root.at(f"{directory}/lib-dynload").glob("*.so")):
        if missing := libraries.take(extension, f"{directory}/lib-dynload/{extension.name}"):
            print(f"{extension.name} is left out: it needs {missing}, which RUN_BASE does not have")
            extension.unlink()
    return directory


def environment(root: Root, libraries: Libraries, source: Path, python: str) -> str:
    """Has the virtual environment, at the same path, on that interpreter. Returns its path."""
    path = str(source.absolute())
    shutil.copytree(source, root.at(path), symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    programs = root.at(f"{path}/bin")
    for program in programs.iterdir():
        if program.name != "gpu-plugin":  # scripts for shells, and commands of libraries
            program.unlink()
    (programs / "python3").symlink_to(python)
    for alias in ("python", f"python3.{sys.version_info.minor}"):
        (programs / alias).symlink_to("python3")
    root.at(f"{path}/pyvenv.cfg").write_text(
        f"home = {os.path.dirname(python)}\ninclude-system-site-packages = false\n"
        f"version = 3.{sys.version_info.minor}\n"
    )
    for extension in sorted(root.at(path).rglob("*.so*")):
        if missing := libraries.take(extension, f"/{extension.relative_to(root.at('/'))}"):
            raise AssembleError(f"{extension.name} needs {missing}, which RUN_BASE does not have")
    return path


def settle(root: Root) -> None:
    """Users, certificates, names, and the directories that a container's mounts and the daemon need."""
    for name in ETC:
        root.take_below(f"/etc/{name}")
    root.take_below("/usr/lib/ssl", ("misc", "private"))
    etc = root.at("/etc")
    etc.mkdir(exist_ok=True)
    (etc / "passwd").write_text(_PASSWD)
    (etc / "group").write_text(_GROUP)
    if not (etc / "nsswitch.conf").exists():
        (etc / "nsswitch.conf").write_text(_NSSWITCH)
    if not (etc / "ld.so.conf").exists():
        (etc / "ld.so.conf").touch()
    for directory in ("dev", "proc", "run", "sys", "tmp", STATE_DIRECTORY):
        root.at(directory).mkdir(parents=True, exist_ok=True)
    if not os.path.lexists(root.at("/var/run")):
        root.at("/var/run").symlink_to("/run")


def package_records(root: Root) -> list[str]:
    """What scanners and licences ask for: Debian's record and copyright file of each package that something was taken of.

    In var/lib/dpkg/status.d, one file a package, which is how images without dpkg have it; a base that has them so keeps all,
    since it lists no files. Returns the records (deb-control(5)), none where the base is no Debian.
    """
    status = root.read("/var/lib/dpkg/status")
    records = {_field(record, "Package"): record.strip() + "\n" for record in status.split("\n\n") if record.strip()}
    # Links too, but for those to directories, such as /lib: most packages list these.
    taken = {path.removeprefix("/usr") for path in root.taken if root.at(root.real(path) or path).is_file()}
    directory = root.at("/var/lib/dpkg/status.d")
    for name in root.names("/var/lib/dpkg/info"):
        package = name.removesuffix(".list").partition(":")[0]
        if name.endswith(".list") and package in records:
            listed = root.read(f"/var/lib/dpkg/info/{name}").splitlines()
            if taken.intersection(path.removeprefix("/usr") for path in listed):
                directory.mkdir(parents=True, exist_ok=True)
                (directory / package).write_text(records[package])
                root.take(f"/usr/share/doc/{package}/copyright")
    root.take_below("/var/lib/dpkg/status.d")
    if not status:  # no record says which are meant: all, as in a base that is small already
        for name in root.names("/usr/share/doc"):
            root.take(f"/usr/share/doc/{name}/copyright")
    kept = [file.read_text() for file in sorted(directory.iterdir())] if directory.is_dir() else []
    return [record for record in kept if _field(record, "Package")]  # not lists of checksums


def _field(record: str, name: str) -> str:
    return next((line.partition(":")[2].strip() for line in record.splitlines() if line.startswith(f"{name}:")), "")


def base_components(root: Root, records: list[str]) -> list[dict[str, Any]]:
    """What the image has of its base, as components of a CycloneDX bill: distribution, packages, and Python if it is in none.

    Package URLs as the purl specification has them for `deb` and `generic`; `upstream` is the source package, by which Debian
    counts vulnerabilities.
    """
    system = {
        name: value.strip("\"'")
        for name, _, value in (line.partition("=") for line in root.read("/etc/os-release").splitlines())
    }
    distribution, release = system.get("ID", ""), system.get("VERSION_ID", "")
    components: list[dict[str, Any]] = []
    if distribution:
        components.append({"type": "operating-system", "name": distribution, "version": release})
    for record in records:
        name, version = _field(record, "Package"), _field(record, "Version")
        qualifiers = {
            "arch": _field(record, "Architecture"),
            "distro": f"{distribution}-{release}" if release else "",
            "upstream": _field(record, "Source").partition(" ")[0],
        }
        said = "&".join(f"{key}={quote(value, safe='')}" for key, value in qualifiers.items() if value)
        purl = f"pkg:deb/{distribution or 'debian'}/{quote(name, safe='')}@{quote(version, safe=':')}?{said}"
        components.append({"type": "library", "name": name, "version": version, "purl": purl})
    minor = f"python3.{sys.version_info.minor}"
    if not any(_field(record, "Package").removeprefix("lib").startswith(minor) for record in records):
        version = _python_version(root)
        purl = f"pkg:generic/python@{version}"
        components.append({"type": "application", "name": "python", "version": version, "purl": purl})
    return [{"bom-ref": each.get("purl", each["name"]), **each} for each in components]


def _python_version(root: Root) -> str:
    """The base's, such as 3.13.9, from its header or from the program, which need not run on this processor.

    Where neither says it, 3.13.
    """
    minor = f"3.{sys.version_info.minor}"
    number = rf"{re.escape(minor)}\.\d+(?:(?:a|b|rc)\d+)?"
    programs = [path for path in root.taken if os.path.basename(path) == f"python{minor}"]
    for program in programs:
        header = root.read(f"{os.path.dirname(os.path.dirname(program))}/include/python{minor}/patchlevel.h")
        if said := re.search(rf'#define PY_VERSION\s+"({number})', header):
            return said[1]
    texts = [root.at(path).read_bytes() for path in programs if not root.at(path).is_symlink()]
    found = {said.decode() for text in texts for said in re.findall(rb"\0(%b)\+?\0" % number.encode(), text)}
    return found.pop() if len(found) == 1 else minor


def bill_of_materials(root: Root, source: Path, version: str, base: list[dict[str, Any]]) -> None:
    """Has the bill of materials, with the components of the base.

    The version of gpu-plugin itself is added, which the bill's maker does not read out of the code.
    """
    bill = json.loads(source.read_text())
    bill["metadata"]["component"]["version"] = version
    bill["components"] += base
    bill.setdefault("dependencies", []).extend({"ref": each["bom-ref"]} for each in base)
    place = root.at("/usr/share/gpu-plugin/sbom.cdx.json")
    place.parent.mkdir(parents=True)
    place.write_text(json.dumps(bill, indent=1) + "\n")


def compile_all(root: Root, *directories: str) -> None:
    """Bytecode beside each module, never judged by its source's time: a root that cannot be written needs no other."""
    for directory in directories:
        done = compileall.compile_dir(
            root.at(directory),
            quiet=2,
            force=True,
            stripdir=str(root.at("/")),
            prependdir="/",
            maxlevels=30,
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )
        if not done:
            print(f"some modules below {directory} are of another version of Python and have no bytecode")


def cache_libraries(root: Root) -> None:
    """Has the loader know the directories of /etc/ld.so.conf, and runtimes a cache to add the driver's libraries to."""
    program = shutil.which("ldconfig", path="/sbin:/usr/sbin")
    if program is None:
        raise AssembleError("BASE has no ldconfig: name one with a complete C library")
    subprocess.run([program, "-r", str(root.at("/"))], check=True)  # noqa: S603


def own(root: Root, time: int) -> None:
    """All root's, not for others to write, no setuid, and of one time; but for /tmp and the state directory."""
    for place in sorted(root.at("/").rglob("*"), reverse=True):
        if not place.is_symlink():
            mode = 0o755 if place.is_dir() or place.stat().st_mode & stat.S_IXUSR else 0o644
            place.chmod(mode)
        os.chown(place, 0, 0, follow_symlinks=False)
    root.at("/tmp").chmod(0o1777)  # noqa: S108 - of the image
    root.at(STATE_DIRECTORY).chmod(0o700)
    os.chown(root.at(STATE_DIRECTORY), USER, USER)
    for place in sorted(root.at("/").rglob("*"), reverse=True):
        os.utime(place, (time, time), follow_symlinks=False)


def main() -> None:
    """The command. Raises AssembleError."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--base", type=Path, required=True, help="the root directory that the interpreter is taken from"
    )
    parser.add_argument("--environment", type=Path, required=True, help="the virtual environment that has gpu-plugin")
    parser.add_argument("--sbom", type=Path, required=True, help="its bill of materials")
    parser.add_argument("--version", default="", help="the version that the image is to be of, if that is known")
    parser.add_argument("image", type=Path, help="the directory to make")
    asked = parser.parse_args()
    installed = metadata.version("gpu-plugin")
    if asked.version not in {"", installed}:
        raise AssembleError(f"VERSION is {asked.version}, and what was built is gpu-plugin {installed}")
    asked.image.mkdir()
    root = Root(asked.base, asked.image)
    libraries = Libraries(root)
    python = interpreter(root)
    standard = standard_library(root, libraries, python)
    installed_at = environment(root, libraries, asked.environment, python)
    libraries.always()
    settle(root)
    records = package_records(root)
    if not records:
        print(
            "RUN_BASE has no records of Debian packages: the bill of materials has Python, and no C library or OpenSSL"
        )
    bill_of_materials(root, asked.sbom, installed, base_components(root, records))
    compile_all(root, standard, installed_at)
    cache_libraries(root)
    own(root, int(os.environ.get("SOURCE_DATE_EPOCH") or 1577836800))  # 2020, where nothing else is asked for


if __name__ == "__main__":
    try:
        main()
    except AssembleError as error:
        sys.exit(f"image/assemble.py: {error}")
