"""Generates `gpu_plugin/kubelet/_api` from the .proto files beside this script, or with --check compares it.

The compiler plugin truncates the `__init__.py` of its output folder, so it never writes into the package itself: the
code is made in a temporary folder, formatted by the locked black, and only then laid in place. Services are left out: the
daemon serves raw handlers (docs/architecture.md, "Why so").
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
    """Returns the generated text by package name."""
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
    """Writes the generated code, or with --check says whether it is what the .proto files give."""
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
        print(f"not what the .proto files give: {', '.join(stale)}. Run `make proto` and commit the result.")
        return 1
    if shutil.which("protoc-gen-python_betterproto") is None:
        print("protoc-gen-python_betterproto is not on PATH")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
