"""The DaemonSet whose pods clean up after another DaemonSet."""

import copy

import pytest

from gpu_plugin.cli.uninstall.template import (
    ForeignDaemonSetError,
    cleanup_daemonset,
    cleanup_name,
    made_here,
    progress,
    restored,
)

STATE = {"name": "state", "hostPath": {"path": "/var/lib/gpu-plugin", "type": "DirectoryOrCreate"}}
SOCKETS = {"name": "device-plugins", "hostPath": {"path": "/var/lib/kubelet/device-plugins"}}

SELECTED = {"app.kubernetes.io/component": "device-plugin"}


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
    metadata = {"name": "plugin", "namespace": "gpus", "labels": {**SELECTED, "app.kubernetes.io/instance": "release"}}
    dressed = {"labels": {**SELECTED, "team": "a"}, "annotations": {"inject": "false"}}
    return {
        "metadata": metadata | {"uid": "1", "resourceVersion": "2", "annotations": {"helm": "x"}},
        "spec": {"selector": {"matchLabels": SELECTED}, "template": {"metadata": dressed, "spec": pod}},
    }


def patched(found):
    return cleanup_daemonset(found)["spec"]["template"]["spec"]


def test_the_daemon_becomes_an_init_container_that_cleans_up_as_it_was_told_to_run():
    found = daemonset()
    before = copy.deepcopy(found)
    pod = patched(found)
    (cleaning,) = pod["initContainers"]
    assert cleaning["args"] == ["cleanup", "--log-level=debug", "--wait", "--state-dir=/gpu-plugin-parent/gpu-plugin"]
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


def test_it_runs_where_the_other_ran_and_selects_pods_of_its_own():
    found = daemonset()
    found["spec"]["template"]["spec"] |= {"nodeSelector": {"a": "b"}, "tolerations": [{"operator": "Exists"}]}
    found["spec"]["template"]["spec"] |= {"hostNetwork": True, "hostPID": True, "serviceAccountName": "plugin"}
    made = cleanup_daemonset(found, {"kind": "Job", "name": "job", "uid": "1"})
    assert (made["apiVersion"], made["kind"]) == ("apps/v1", "DaemonSet")
    assert made["metadata"] == {
        "name": "plugin-cleanup",
        "namespace": "gpus",
        "labels": {**SELECTED, "app.kubernetes.io/instance": "release", "gpu-plugin/cleanup": "plugin-cleanup"},
        "ownerReferences": [{"kind": "Job", "name": "job", "uid": "1"}],
    }
    template = made["spec"]["template"]
    assert made["spec"]["selector"]["matchLabels"] == {"gpu-plugin/cleanup": "plugin-cleanup"}
    assert template["metadata"] == {
        "labels": {
            "team": "a",
            "gpu-plugin/cleanup": "plugin-cleanup",
        },  # not those by which the other's pods are found
        "annotations": {"inject": "false"},
    }
    assert made_here(made)
    assert not made_here(found)
    pod = template["spec"]
    assert (pod["nodeSelector"], pod["tolerations"]) == ({"a": "b"}, [{"operator": "Exists"}])
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("plugin", False)
    assert not {"hostNetwork", "hostPID"} & pod.keys()
    found["spec"]["template"]["spec"]["automountServiceAccountToken"] = True
    assert patched(found)["automountServiceAccountToken"], "the reports to the cluster by it can be taken back"
    assert "ownerReferences" not in cleanup_daemonset(found)["metadata"]


def test_names_fit_into_a_label():
    assert cleanup_name("a" * 80) == f"{'a' * 55}-cleanup"
    assert cleanup_name("a" * 54 + "-b") == f"{'a' * 54}-cleanup"


def test_it_can_be_made_again_as_it_was():
    found = daemonset() | {"status": {"numberReady": 1}}
    again = restored(found)
    assert again["metadata"] == {
        "name": "plugin",
        "namespace": "gpus",
        "labels": {**SELECTED, "app.kubernetes.io/instance": "release"},
        "annotations": {"helm": "x"},
    }
    assert again["spec"] == found["spec"]
    assert "status" not in again


def test_a_command_that_says_run_is_changed_where_it_stands():
    pod = patched(daemonset(command=["python3", "-m", "gpu_plugin", "run"], args=["--cdi-dir=/x"]))
    assert (pod["initContainers"][0]["command"], pod["initContainers"][0]["args"]) == (
        ["python3", "-m", "gpu_plugin", "cleanup"],
        ["--cdi-dir=/x", "--wait", "--state-dir=/gpu-plugin-parent/gpu-plugin"],
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
        ({"hostPath": {"path": "/srv/elsewhere"}}, "/elsewhere", {}),  # not the state directory
    ],
)
def test_otherwise_its_content_alone_is_removed(volume, path, more):
    found = daemonset(volumeMounts=[{"name": "state", "mountPath": path, **more}])
    found["spec"]["template"]["spec"]["volumes"] = [{"name": "state", **volume}]
    pod = patched(found)
    assert pod["volumes"] == [{"name": "state", **volume}]
    assert pod["initContainers"][0]["volumeMounts"] == [{"name": "state", "mountPath": path, **more}]


FOREIGN = {"app.kubernetes.io/component": "agent"}


def foreign(**container):
    found = daemonset(**container)
    found["metadata"]["labels"] = FOREIGN
    return found


@pytest.mark.parametrize(
    "found",
    [
        {"metadata": {}},
        daemonset(args=["serve"]),
        daemonset(args=["status"]),
        daemonset(args=["--verbose", "run"]),
        foreign(),
        foreign(command=["agent", "run"]),
        daemonset(command=["agent", "run"], args=[]),
    ],
)
def test_what_does_not_run_gpu_plugin_is_not_touched(found):
    with pytest.raises(ForeignDaemonSetError, match="run"):
        cleanup_daemonset(found)


def test_a_command_that_names_gpu_plugin_needs_no_label():
    found = foreign(command=["/opt/gpu-plugin/bin/gpu-plugin", "run"], args=[])
    assert patched(found)["initContainers"][0]["command"] == ["/opt/gpu-plugin/bin/gpu-plugin", "cleanup"]


def test_the_last_of_two_variables_of_one_name_counts_and_sources_of_others_are_kept():
    env = [{"name": "STATE_DIR", "value": "/old"}, {"name": "STATE_DIR", "value": "/var/lib/gpu-plugin"}]
    pod = patched(daemonset(env=env, envFrom=[{"configMapRef": {"name": "more"}}]))
    assert pod["initContainers"][0]["args"][-1] == "--state-dir=/gpu-plugin-parent/gpu-plugin"
    assert pod["initContainers"][0]["envFrom"] == [{"configMapRef": {"name": "more"}}]


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({}, None),  # its controller has not seen it
        ({"observedGeneration": 1, "desiredNumberScheduled": 2}, (0, 2)),
        ({"observedGeneration": 1, "desiredNumberScheduled": 2, "numberReady": 1}, (1, 2)),
        ({"observedGeneration": 1}, (0, 0)),
    ],
)
def test_a_node_is_clean_once_its_pod_is_ready(status, expected):
    assert progress({"metadata": {"generation": 1}, "status": status}) == expected


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
    assert cleaning["args"] == ["cleanup", "--mps", "--wait", "--mps-root=/gpu-plugin-parent/mps"]
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
