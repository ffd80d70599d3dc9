"""A program that reports a container's GPUs and libraries, and the simulated node for it."""

NODE = """\
name: real-driver
driver_version: {version}
count: 3
gpu: {{name: NVIDIA A100-SXM4-40GB, architecture: 7, memory_bytes: 42949672960, mig_mode: [0, 0], mig_profiles: a100-40gb}}
gpus: [{{}}, {{mig: [3g.20gb, 2g.10gb]}}]
dev: [/dev/nvidiactl, /dev/nvidia-uvm, /dev/nvidia-uvm-tools, /dev/nvidia-modeset]
"""

NO_DEVICE, DRIVER_NOT_LOADED = 100, 9
"""CUDA_ERROR_NO_DEVICE and NVML_ERROR_DRIVER_NOT_LOADED: the user space is complete, and only the kernel driver is missing."""

LOOK = """\
import ctypes, json, os, stat
cuda, nvml = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libnvidia-ml.so.1")
version = ctypes.c_int()
cuda.cuDriverGetVersion(ctypes.byref(version))
ctypes.CDLL("libcuda.so"), ctypes.CDLL("libnvidia-ptxjitcompiler.so.1")
numbers = {}
for place, _, names in os.walk("/dev"):
    for name in names:
        if name.startswith("nvidia"):
            status = os.stat(f"{place}/{name}")
            if stat.S_ISCHR(status.st_mode):
                numbers[f"{place}/{name}"] = [os.major(status.st_rdev), os.minor(status.st_rdev), oct(status.st_mode & 0o777)]
loaded = sorted({line.split()[-1] for line in open("/proc/self/maps") if "libcuda" in line})
print(json.dumps({
    "cuda": cuda.cuInit(0), "nvml": nvml.nvmlInit_v2(), "version": version.value, "nodes": numbers, "loaded": loaded,
    "variables": {name: value for name, value in os.environ.items() if "NVIDIA" in name or name.startswith("LD_")},
    "cache": os.path.exists("/etc/ld.so.cache"), "program": os.access("/usr/bin/nvidia-smi", os.X_OK),
}))
"""
