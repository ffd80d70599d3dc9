"""The shapes of config file that NVIDIA's plugin documents, each to the settings that it documents for them."""

from typing import Any

import pytest

from gpu_plugin.config.document import parse
from gpu_plugin.config.resolve import resolve
from gpu_plugin.config.sharing import MPS, TIME_SLICING, DeviceChoice, NamePattern, SharedResource

GPU = "GPU-01234567-89ab-4cde-8f01-23456789abcd"
MIG = "MIG-76543210-89ab-4cde-8f01-23456789abcd"

EXAMPLES: dict[str, tuple[str, dict[str, Any]]] = {
    "flags": (
        """
version: v1
flags:
  migStrategy: "none"
  failOnInitError: false
  nvidiaDriverRoot: /run/nvidia/driver
  nvidiaDevRoot: /
  gdrcopyEnabled: true
  gdsEnabled: true
  mofedEnabled: true
  mpsRoot: /run/nvidia/mps
  useNodeFeatureAPI: true
  deviceDiscoveryStrategy: nvml
  plugin:
    passDeviceSpecs: true
    deviceListStrategy: envvar
    deviceIDStrategy: index
    cdiAnnotationPrefix: example.com/
    nvidiaCTKPath: /opt/nvidia-ctk
    containerDriverRoot: /driver
    sharedDevicesAllocationPolicy: packed
  gfd:
    oneshot: false
    noTimestamp: false
    sleepInterval: 60s
    outputFile: /etc/kubernetes/node-feature-discovery/features.d/gfd
    machineTypeFile: /sys/class/dmi/id/product_name
""",
        {
            "mig_strategy": "none",
            "fail_on_init_error": False,
            "driver_root": "/run/nvidia/driver",
            "dev_root": "/",
            "gdrcopy_enabled": True,
            "gds_enabled": True,
            "mofed_enabled": True,
            "mps_root": "/run/nvidia/mps",
            "device_discovery_strategy": "nvml",
            "pass_device_specs": True,
            "device_list_strategy": ("envvar",),
            "device_id_strategy": "index",
            "cdi_annotation_prefix": "example.com/",
            "nvidia_cdi_hook_path": "/opt/nvidia-ctk",
            "driver_root_ctr_path": "/driver",
            "shared_devices_allocation_policy": "packed",
            "sharing": (),
        },
    ),
    "device list strategy as a list": (
        "version: v1\nflags:\n  plugin:\n    deviceListStrategy:\n    - cdi-annotations\n    - envvar\n",
        {"device_list_strategy": ("cdi-annotations", "envvar")},
    ),
    "device list strategy as text": (
        "version: v1\nflags:\n  plugin:\n    deviceListStrategy: cdi-cri,envvar\n",
        {"device_list_strategy": ("cdi-cri", "envvar")},
    ),
    "an empty version": ('version: ""\nflags: {migStrategy: mixed}\n', {"mig_strategy": "mixed"}),
    "no version": ("flags: {migStrategy: single}\n", {"mig_strategy": "single"}),
    "JSON": (
        '{"version": "v1", "flags": {"migStrategy": "single", "plugin": {"deviceListStrategy": ["envvar"]}}}',
        {"mig_strategy": "single", "device_list_strategy": ("envvar",)},
    ),
    "ten shares of every GPU": (
        """
version: v1
sharing:
  timeSlicing:
    resources:
    - name: nvidia.com/gpu
      replicas: 10
""",
        {"sharing": (SharedResource("nvidia.com/gpu", "nvidia.com/gpu", 10, TIME_SLICING),)},
    ),
    "renamed by default": (
        """
version: v1
sharing:
  timeSlicing:
    renameByDefault: true
    failRequestsGreaterThanOne: true
    resources:
    - name: nvidia.com/gpu
      replicas: 10
""",
        {
            "sharing": (
                SharedResource("nvidia.com/gpu", "nvidia.com/gpu.shared", 10, TIME_SLICING, single_requests=True),
            )
        },
    ),
    "MIG resources, each its own way": (
        """
version: v1
flags:
  migStrategy: mixed
sharing:
  timeSlicing:
    resources:
    - name: nvidia.com/gpu
      replicas: 4
    - name: nvidia.com/mig-1g.5gb
      replicas: 2
    - name: nvidia.com/mig-1g.10gb.me
      replicas: 3
""",
        {
            "mig_strategy": "mixed",
            "sharing": (
                SharedResource("nvidia.com/gpu", "nvidia.com/gpu", 4),
                SharedResource("nvidia.com/mig-1g.5gb", "nvidia.com/mig-1g.5gb", 2),
                SharedResource("nvidia.com/mig-1g.10gb.me", "nvidia.com/mig-1g.10gb.me", 3),
            ),
        },
    ),
    "MPS": (
        """
version: v1
flags: {mpsRoot: /run/nvidia/mps}
sharing:
  mps:
    resources:
    - name: nvidia.com/gpu
      replicas: 10
""",
        {
            "mps_root": "/run/nvidia/mps",
            "sharing": (SharedResource("nvidia.com/gpu", "nvidia.com/gpu", 10, MPS, single_requests=True),),
        },
    ),
    "MPS, several at once": (
        """
version: v1
flags: {mpsRoot: /run/nvidia/mps}
sharing:
  mps:
    failRequestsGreaterThanOne: false
    renameByDefault: true
    resources:
    - name: gpu
      replicas: 2
""",
        {"sharing": (SharedResource("nvidia.com/gpu", "nvidia.com/gpu.shared", 2, MPS),)},
    ),
    "devices": (
        f"""
version: v1
sharing:
  timeSlicing:
    resources:
    - name: nvidia.com/gpu
      rename: gpu.twice
      devices: [0, "1", {GPU}]
      replicas: 2
    - name: nvidia.com/gpu
      rename: gpu.thrice
      devices: 2
      replicas: 3
    - name: nvidia.com/mig-1g.5gb
      devices: ["3:0", {MIG}, MIG-{GPU}/9/0]
      replicas: 4
    - name: nvidia.com/mig-2g.10gb
      devices: all
      replicas: 5
""",
        {
            "sharing": (
                SharedResource(
                    "nvidia.com/gpu", "nvidia.com/gpu.twice", 2, devices=DeviceChoice(listed=("0", "1", GPU))
                ),
                SharedResource("nvidia.com/gpu", "nvidia.com/gpu.thrice", 3, devices=DeviceChoice(count=2)),
                SharedResource(
                    "nvidia.com/mig-1g.5gb",
                    "nvidia.com/mig-1g.5gb",
                    4,
                    devices=DeviceChoice(listed=("3:0", MIG, f"MIG-{GPU}/9/0")),
                ),
                SharedResource("nvidia.com/mig-2g.10gb", "nvidia.com/mig-2g.10gb", 5),
            )
        },
    ),
    "names by pattern": (
        """
version: v1
resources:
  gpus:
  - pattern: "A100-SXM4-40GB"
    name: a100-40gb
  - pattern: "*"
    name: example.com/gpu
  mig:
  - pattern: "1g.5gb"
    name: mig-small
  - pattern: "*"
    name: mig-any
""",
        {
            "gpu_names": (
                NamePattern("A100-SXM4-40GB", "nvidia.com/a100-40gb"),
                NamePattern("*", "example.com/gpu"),
            ),
            "mig_names": (NamePattern("1g.5gb", "nvidia.com/mig-small"), NamePattern("*", "nvidia.com/mig-any")),
        },
    ),
    "IMEX": (
        "version: v1\nimex:\n  channelIDs: [0]\n  required: true\n",
        {"imex_channel_ids": (0,), "imex_required": True},
    ),
    "no IMEX": ("imex:\n  channelIDs: []\n  required: false\n", {"imex_channel_ids": (), "imex_required": False}),
    "selection": (
        "selection:\n  include: [0, 1, 00000000:3B:00.0]\n  exclude: '*T4*'\n",
        {"include_gpus": ("0", "1", "00000000:3b:00.0"), "exclude_gpus": ("*T4*",)},
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_documented_file_asks_for_what_it_documents(name):
    text, expected = EXAMPLES[name]
    settings = resolve({}, {}, parse(text.encode(), "config.yaml"))
    assert {key: getattr(settings, key) for key in expected} == expected


def test_a_flag_and_the_environment_win_over_the_file():
    text, _ = EXAMPLES["flags"]
    settings = resolve({"mps_root": "/flag"}, {"MIG_STRATEGY": "single"}, parse(text.encode(), "config.yaml"))
    assert (settings.mps_root, settings.mig_strategy, settings.driver_root) == (
        "/flag",
        "single",
        "/run/nvidia/driver",
    )
