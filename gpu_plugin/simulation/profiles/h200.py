"""One NVIDIA H200 passed through to a virtual machine, recorded there from NVML, /sys and /dev."""

from gpu_plugin.simulation.gpu_models import H200, MIG_CAPABILITIES, placed
from gpu_plugin.simulation.profile import NodeDescription

NODE = NodeDescription(
    gpus=placed(H200, ("GPU-92e1c9b6-dd9b-778f-6e34-6f0d728ad189", "00000000:00:06.0", -1)),
    dev=(*MIG_CAPABILITIES, "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidiactl"),
)
