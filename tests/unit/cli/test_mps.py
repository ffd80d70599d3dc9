import os
from pathlib import Path

import pytest

from gpu_plugin.cli import main
from gpu_plugin.mps import directories


@pytest.mark.parametrize("mounted", [False, True])
def test_shared_memory_is_mounted_in_the_root_that_the_daemons_use(tmp_path, monkeypatch, capsys, mounted):
    host, mount = tmp_path / "host", tmp_path / "mount"
    monkeypatch.setattr(directories, "MOUNT", mount)
    monkeypatch.setattr(os.path, "ismount", lambda path: mounted and Path(path) == mount)
    monkeypatch.setattr(directories, "mount_shm", lambda shm, _: [shm])
    assert main(["mps", "--mps-root", str(host), "--mount-shm"]) == 0
    assert capsys.readouterr().out.startswith(f"{mount if mounted else host}/shm: a tmpfs of ")
