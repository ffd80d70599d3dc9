"""What the door to asyncinotify is for, and the names that are looked up on the way to a file."""

import ctypes.util
import subprocess
import sys
from pathlib import Path

from gpu_plugin.runtime import inotify

PROGRAM = """
import sys

RUN = {"subprocess.Popen", "os.posix_spawn", "os.fork", "os.exec", "os.system"}
sys.addaudithook(lambda event, arguments: print(event, arguments) if event in RUN else None)
import gpu_plugin.daemon.process
import gpu_plugin.runtime.inotify

with gpu_plugin.runtime.inotify.Inotify() as watching:
    watching.add_watch("/", gpu_plugin.runtime.inotify.Mask.CREATE)
"""


def test_the_daemon_runs_no_program_while_it_is_imported():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout == ""


def test_whoever_looks_for_a_library_later_finds_it():
    assert "Inotify" in vars(inotify)
    assert ctypes.util.find_library("c")


def test_a_route_names_every_look_up(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real/../real")
    whole = inotify.route(tmp_path / "link" / "absent" / "config.yaml")
    here = {(place.directory, place.name) for place in whole if place.directory.startswith(str(tmp_path))}
    assert here == {(str(tmp_path), "link"), (str(tmp_path), "real"), (f"{tmp_path}/real", "absent")}
    assert inotify.Place("/", tmp_path.parts[1]) in whole


def test_a_route_through_links_without_end_ends(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    names = {place.name for place in inotify.route(tmp_path / "a" / "config.yaml")}
    assert {"a", "b"} <= names
    assert "config.yaml" not in names


def test_a_relative_path_begins_where_we_are(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text("version: v1")
    monkeypatch.chdir(tmp_path)
    place = inotify.Place(str(tmp_path), "config.yaml", content=True)
    assert place in inotify.route(Path("config.yaml"))
