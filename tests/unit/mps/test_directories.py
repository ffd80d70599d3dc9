import ctypes
import errno
import os
import stat
from contextlib import nullcontext
from pathlib import Path

import pytest

from gpu_plugin.mps import directories
from gpu_plugin.mps.errors import MpsError


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def made(root):
    below = root / "nvidia.com/gpu"
    directories.make(root, below / "pipe", below / "log", root / "shm")
    return below


@pytest.fixture
def umask():
    before = os.umask(0o077)
    yield
    os.umask(before)


def test_containers_of_any_user_may_enter_and_none_may_put_another_daemon_there(tmp_path, umask):
    below = made(tmp_path / "mps")
    for directory in (tmp_path / "mps", below.parent, below, below / "pipe", below / "log"):
        assert mode(directory) == 0o755
    assert mode(tmp_path / "mps/shm") == 0o1777


def test_modes_that_somebody_changed_are_mended_and_content_stays(tmp_path):
    below = made(tmp_path)
    (below / "pipe/control").touch()
    (below / "pipe").chmod(0o700)
    made(tmp_path)
    assert mode(below / "pipe") == 0o755
    assert (below / "pipe/control").exists()


def test_nothing_above_the_root_is_touched(tmp_path, umask):
    above = tmp_path / "above"
    above.mkdir(mode=0o700)
    made(above / "mps")
    assert mode(above) == 0o700


def test_a_file_in_the_way_is_told(tmp_path):
    (tmp_path / "nvidia.com").touch()
    with pytest.raises(MpsError, match=r"nvidia\.com cannot be made"):
        made(tmp_path)


@pytest.mark.parametrize(
    ("on", "refusal", "fault"),
    [(True, None, ""), (True, "ENOTSUP", ""), (True, "EINVAL", ""), (True, "EPERM", "SELinux"), (False, None, "")],
)
def test_the_pipe_directory_is_labelled_where_selinux_is_on(tmp_path, monkeypatch, on, refusal, fault):
    labels = []

    def setxattr(*label):
        labels.append(label)
        if refusal:
            raise OSError(getattr(errno, refusal), refusal)

    monkeypatch.setattr(os, "setxattr", setxattr)
    monkeypatch.setattr(directories, "_SELINUX_FILESYSTEM", tmp_path if on else tmp_path / "absent")
    with pytest.raises(MpsError, match=fault) if fault else nullcontext():
        made(tmp_path / "mps")
    pipe = tmp_path / "mps/nvidia.com/gpu/pipe"
    assert labels == [(pipe, "security.selinux", b"system_u:object_r:container_file_t:s0\0")] * on


def test_a_log_that_has_grown_too_long_is_emptied_and_others_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(directories, "MAX_LOG_BYTES", 64 * 1024)
    (tmp_path / "control.log").write_bytes(b"x" * 100_000)
    (tmp_path / "server.log").write_bytes(b"x" * 1000)
    (tmp_path / "other").write_bytes(b"x" * 100_000)
    (tmp_path / "gone.log").symlink_to(tmp_path / "nowhere")
    directories.trim_logs(tmp_path)
    sizes = {file.name: file.stat().st_size for file in tmp_path.iterdir() if file.exists()}
    assert sizes == {"control.log": 0, "server.log": 1000, "other": 100_000}


def test_shared_memory_is_mounted_once(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root mounts")
    shm = tmp_path / "mps/shm"
    try:
        if not directories.mount_shm(shm, 4096 * 16):
            pytest.fail("it was mounted already")
    except MpsError as error:
        pytest.skip(f"mounts are not allowed here: {error}")
    try:
        assert os.path.ismount(shm)
        assert mode(shm) == 0o1777
        assert os.statvfs(shm).f_blocks * os.statvfs(shm).f_frsize == 4096 * 16
        assert os.statvfs(shm).f_flag & os.ST_NOEXEC
        assert not directories.mount_shm(shm, 4096)
        made(tmp_path / "mps")
        assert os.statvfs(shm).f_blocks * os.statvfs(shm).f_frsize == 4096 * 16
    finally:
        assert ctypes.CDLL(None).umount(os.fsencode(shm)) == 0


def test_a_mount_that_is_refused_is_told_in_one_sentence(tmp_path, monkeypatch):
    class Libc:
        @staticmethod
        def mount(*_):
            return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Libc)
    monkeypatch.setattr(ctypes, "get_errno", lambda: 1)
    with pytest.raises(
        MpsError, match=r"shm: a tmpfs cannot be mounted there: Operation not permitted; run it as root"
    ):
        directories.mount_shm(tmp_path / "shm", 4096)


def test_the_root_is_at_its_host_path_or_else_at_the_mount_of_nvidias_manifests(tmp_path, monkeypatch):
    assert str(directories.MOUNT) == "/mps"
    mounted, configured = Path("/proc"), tmp_path / "mps"
    (tmp_path / "somebodys").mkdir()
    # A directory with nothing mounted is not the root.
    for place, found in ((mounted, mounted), (tmp_path / "somebodys", configured), (tmp_path / "absent", configured)):
        monkeypatch.setattr(directories, "MOUNT", place)
        assert directories.root_here(str(configured)) == found
    configured.mkdir()
    monkeypatch.setattr(directories, "MOUNT", mounted)
    assert directories.root_here(str(configured)) == configured


def test_shared_memory_that_is_not_the_roots_is_told_with_what_to_do(tmp_path):
    shm, mine = tmp_path / "mps/shm", tmp_path / "dev/shm"
    shm.mkdir(parents=True)
    mine.parent.mkdir()
    assert "(No such file or directory)" in directories.shm_fault(shm, mine)
    mine.mkdir()
    fault = directories.shm_fault(shm, mine)
    assert fault.startswith(f"{mine} of this process is not {shm}, ")
    assert f"mount --bind /dev/shm {shm}" in fault
    mine.rmdir()
    mine.symlink_to(shm)
    assert directories.shm_fault(shm, mine) == ""


def test_shared_memory_is_mounted_in_no_directory_that_a_user_can_change(tmp_path, monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    root = tmp_path / "mps"
    root.mkdir()
    (root / "shm").symlink_to(tmp_path)  # the tmpfs would hide that directory
    os.chown(root, 1000, 1000)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: pytest.fail("mounted"))
    with pytest.raises(MpsError, match="belongs to uid 1000"):
        directories.mount_shm(root / "shm", 4096)
