"""Generate `gpu_plugin/kubelet/_api` from the .proto files of this directory. With --check, compare instead of writing.

The compiler plugin truncates the `__init__.py` of its output folder. It therefore writes to a temporary folder, where it
formats the code with the locked version of black, and this script copies the result into the package. Services are not
generated: the daemon serves raw handlers (docs/architecture.md, "Why so").
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PROTO = Path(__file__).resolve().parent
TARGET = PROTO.parent / "gpu_plugin" / "kubelet" / "_api"
SOURCES = {"v1beta1": "deviceplugin/v1beta1/api.proto", "v1": "podresources/v1/api.proto"}

SERVICE = re.compile(r"^service .*?^}", re.DOTALL | re.MULTILINE)


def generate(out: Path) -> dict[str, str]:
    """Return the generated code by package name."""
    generated = {}
    for package, source in SOURCES.items():
        folder, messages = out / package, out / "proto" / source
        folder.mkdir()
        messages.parent.mkdir(parents=True)
        messages.write_text(SERVICE.sub("", (PROTO / source).read_text()))
        command = [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"-I{out / 'proto'}",
            "--python_betterproto_opt=typing.310",
        ]
        subprocess.run([*command, f"--python_betterproto_out={folder}", source], check=True, stderr=subprocess.DEVNULL)
        generated[package] = (folder / package / "__init__.py").read_text()
    return generated


def main() -> int:
    """Write the generated code. With --check, print the outdated files instead. Return 1 if files are outdated, else 0."""
    with tempfile.TemporaryDirectory() as temporary:
        generated = generate(Path(temporary))
    stale = []
    for package, text in generated.items():
        target = TARGET / f"{package}.py"
        if target.exists() and target.read_text() == text:
            continue
        stale.append(str(target))
        if "--check" not in sys.argv:
            target.parent.mkdir(exist_ok=True)
            target.write_text(text)
    if stale and "--check" in sys.argv:
        print(f"these files differ from the code of the .proto files: {', '.join(stale)}. Run `make proto` and commit.")
        return 1
    if shutil.which("protoc-gen-python_betterproto") is None:
        print("protoc-gen-python_betterproto is not on PATH")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
