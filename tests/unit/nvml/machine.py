"""A simulated node with an open driver, for tests without a monitor."""

from gpu_plugin.nvml import links, traits
from gpu_plugin.simulation import profile
from gpu_plugin.simulation.driver import SimulatedDriver
from gpu_plugin.simulation.hardware import SimulatedNode
from gpu_plugin.simulation.host import SimulatedHost


class Machine:
    """A node of this profile, or with one GPU of these traits."""

    def __init__(self, name="dgx1-v100", **gpu):
        content = profile.parse({"count": 1, "gpu": {"name": "NVIDIA Test", **gpu}}) if gpu else profile.load(name)
        self.node = SimulatedNode(content)
        self.driver = SimulatedDriver(self.node)
        self.driver.open()
        self.host = SimulatedHost(self.node)
        self.uuids = [gpu.uuid for gpu in content.gpus]

    def probe(self, index=0, known="", **how):
        return traits.probe_gpu(self.driver, self.host, index, known, **how)

    def found(self):
        """Return the present description of every GPU, and a handle of each by uuid."""
        probed = [self.probe(index) for index in range(len(self.uuids))]
        return [gpu for _, gpu in probed], {gpu.uuid: handle for handle, gpu in probed}

    def links(self, driver=None):
        """Return a function that reads the links of the GPUs, of this driver or another one."""
        gpus, handles = self.found()
        return lambda: links.probe_links(driver or self.driver, self.host, handles, gpus)
