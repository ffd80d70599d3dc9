"""What becomes of a DaemonSet so that its pods clean up."""

import copy

import pytest

from gpu_plugin.uninstall.template import ForeignDaemonSetError, cleanup_patch, progress

STATE = {"name": "state", "hostPath": {"path": "/var/lib/gpu-plugin", "type": "DirectoryOrCreate"}}
SOCKETS = {"name": "device-plugins", "hostPath": {"path": "/var/lib/kubelet/device-plugins"}}


def daemonset(**container):
    daemon = {
        "name": "gpu-plugin",
        "image": "gpu-plugin:1",
        "imagePullPolicy": "Never",
        "args": ["run", "--log-level=debug"],
        "env": [{"name": "CDI_DIR", "value": "/run/cdi"}],
        "securityContext": {"runAsUser": 0},
        "livenessProbe": {"httpGet": {"path": "/livez", "port": "http"}},
        "ports": [{"name": "http", "containerPort": 9480}],
        "volumeMounts": [
            {"name": "state", "mountPath": "/var/lib/gpu-plugin"},
            {"name": "device-plugins", "mountPath": "/var/lib/kubelet/device-plugins"},
        ],
    }
    pod = {"containers": [daemon | container], "volumes": [STATE, SOCKETS], "priorityClassName": "high"}
    return {"metadata": {"generation": 3}, "spec": {"template": {"spec": pod}}}


def patched(found):
    return cleanup_patch(found)["spec"]["template"]["spec"]


def test_the_daemon_becomes_an_init_container_that_cleans_up_as_it_was_told_to_run():
    found = daemonset()
    before = copy.deepcopy(found)
    pod = patched(found)
    (cleaning,) = pod["initContainers"]
    assert cleaning["args"] == ["cleanup", "--log-level=debug", "--state-dir=/gpu-plugin-parent/gpu-plugin"]
    assert cleaning["env"] == [{"name": "CDI_DIR", "value": "/run/cdi"}]
    assert cleaning["securityContext"] == {"runAsUser": 0}
    assert {"livenessProbe", "ports"} & cleaning.keys() == set()
    (staying,) = pod["containers"]
    assert staying == {
        "name": "gpu-plugin",
        "image": "gpu-plugin:1",
        "imagePullPolicy": "Never",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "args": ["cleanup", "--stay"],
    }
    assert found == before


def test_all_nodes_at_once_and_never_two_pods_on_one():
    assert cleanup_patch(daemonset())["spec"]["updateStrategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxUnavailable": "100%", "maxSurge": 0},
    }


def test_a_command_that_says_run_is_changed_where_it_stands():
    pod = patched(daemonset(command=["python3", "-m", "gpu_plugin", "run"], args=["--cdi-dir=/x"]))
    assert (pod["initContainers"][0]["command"], pod["initContainers"][0]["args"]) == (
        ["python3", "-m", "gpu_plugin", "cleanup"],
        ["--cdi-dir=/x", "--state-dir=/gpu-plugin-parent/gpu-plugin"],
    )
    assert pod["containers"][0]["command"] == ["python3", "-m", "gpu_plugin", "cleanup", "--stay"]
    assert "args" not in pod["containers"][0]
    pod = patched(daemonset(command=["gpu-plugin"]))
    assert pod["containers"][0]["command"] == ["gpu-plugin"]
    assert pod["containers"][0]["args"] == ["cleanup", "--stay"]


@pytest.mark.parametrize(
    "container",
    [
        {},
        {"args": ["run", "--state-dir=/var/lib/gpu-plugin/"]},
        {"args": ["run", "--state-dir", "/var/lib/gpu-plugin"]},
        {"env": [{"name": "STATE_DIR", "value": "/var/lib/gpu-plugin"}]},
        {"env": [{"name": "STATE_DIR", "valueFrom": {}}]},
    ],
)
def test_the_directory_that_holds_the_state_directory_is_mounted_so_that_it_can_be_removed(container):
    pod = patched(daemonset(**container))
    assert pod["volumes"] == [{"name": "state", "hostPath": {"path": "/var/lib", "type": "Directory"}}, SOCKETS]
    assert {"name": "state", "mountPath": "/gpu-plugin-parent"} in pod["initContainers"][0]["volumeMounts"]
    assert pod["initContainers"][0]["args"][-1] == "--state-dir=/gpu-plugin-parent/gpu-plugin"
    assert {"name": "device-plugins", "mountPath": "/var/lib/kubelet/device-plugins"} in pod["initContainers"][0][
        "volumeMounts"
    ]


@pytest.mark.parametrize(
    ("volume", "path", "more"),
    [
        ({"hostPath": {"path": "/state"}}, "/var/lib/gpu-plugin", {}),  # the host's root would be mounted
        ({"emptyDir": {}}, "/var/lib/gpu-plugin", {}),
        ({"hostPath": {"path": "/srv/gpu-plugin"}}, "/var/lib/gpu-plugin", {"subPath": "a"}),
        ({"hostPath": {"path": "/srv/elsewhere"}}, "/elsewhere", {}),  # none of ours is mounted
    ],
)
def test_otherwise_its_content_alone_is_removed(volume, path, more):
    found = daemonset(volumeMounts=[{"name": "state", "mountPath": path, **more}])
    found["spec"]["template"]["spec"]["volumes"] = [{"name": "state", **volume}]
    pod = patched(found)
    assert pod["volumes"] == [{"name": "state", **volume}]
    assert pod["initContainers"][0]["volumeMounts"] == [{"name": "state", "mountPath": path, **more}]


@pytest.mark.parametrize("found", [{}, daemonset(args=["serve"]), daemonset(args=["status"])])
def test_what_does_not_run_the_daemon_is_not_touched(found):
    with pytest.raises(ForeignDaemonSetError, match="run"):
        cleanup_patch(found)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({"observedGeneration": 2, "desiredNumberScheduled": 2, "numberReady": 2, "updatedNumberScheduled": 2}, None),
        (
            {"observedGeneration": 3, "desiredNumberScheduled": 2, "numberReady": 2},
            (0, 2),
        ),  # all of the former template
        ({"observedGeneration": 3, "desiredNumberScheduled": 2, "numberReady": 2, "updatedNumberScheduled": 1}, (1, 2)),
        ({"observedGeneration": 3, "desiredNumberScheduled": 2, "numberReady": 1, "updatedNumberScheduled": 2}, (1, 2)),
        ({"observedGeneration": 3, "desiredNumberScheduled": 2, "numberReady": 2, "updatedNumberScheduled": 2}, (2, 2)),
        ({"observedGeneration": 3}, (0, 0)),
    ],
)
def test_a_node_is_clean_once_its_new_pod_is_ready(status, expected):
    assert progress({"metadata": {"generation": 3}, "status": status}) == expected


def test_the_host_path_may_have_another_name_than_its_mount():
    found = daemonset()
    found["spec"]["template"]["spec"]["volumes"] = [{"name": "state", "hostPath": {"path": "/srv/state/"}}]
    pod = patched(found)
    assert pod["volumes"] == [{"name": "state", "hostPath": {"path": "/srv", "type": "Directory"}}]
    assert pod["initContainers"][0]["args"][-1] == "--state-dir=/gpu-plugin-parent/state"


def test_mps_daemons_have_their_root_removed_and_the_shared_memory_unmounted_on_the_node():
    found = daemonset(
        args=["mps"],
        env=[{"name": "MPS_ROOT", "value": "/run/nvidia/mps"}],
        volumeMounts=[{"name": "mps-root", "mountPath": "/mps"}, {"name": "shm", "mountPath": "/dev/shm"}],
    )
    volumes = [
        {"name": "mps-root", "hostPath": {"path": "/run/nvidia/mps"}},
        {"name": "shm", "hostPath": {"path": "/x"}},
    ]
    found["spec"]["template"]["spec"]["volumes"] = volumes
    (cleaning,) = patched(found)["initContainers"]
    assert cleaning["args"] == ["cleanup", "--mps", "--mps-root=/gpu-plugin-parent/mps"]
    parent = {"name": "mps-root", "mountPath": "/gpu-plugin-parent", "mountPropagation": "Bidirectional"}
    assert parent in cleaning["volumeMounts"]
    assert patched(found)["volumes"][0] == {
        "name": "mps-root",
        "hostPath": {"path": "/run/nvidia", "type": "Directory"},
    }
    assert patched(found)["containers"][0]["args"] == ["cleanup", "--stay"]


def test_no_volume_makes_what_the_other_daemonset_removes_again():
    found = daemonset()
    pod = found["spec"]["template"]["spec"]
    pod["volumes"].append({"name": "mps-root", "hostPath": {"path": "/run/nvidia/mps", "type": "DirectoryOrCreate"}})
    pod["containers"][0]["volumeMounts"].append({"name": "mps-root", "mountPath": "/mps"})
    assert [volume["name"] for volume in patched(found)["volumes"]] == ["state", "device-plugins"]
    pod["containers"][0]["args"] = ["mps"]
    (cleaning,) = patched(found)["initContainers"]
    assert [mount["name"] for mount in cleaning["volumeMounts"]] == ["device-plugins", "mps-root"]
    assert [volume["name"] for volume in patched(found)["volumes"]] == ["device-plugins", "mps-root"]
