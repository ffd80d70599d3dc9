"""Files of the host: the driver's installation, the kernel's files about GPUs, the kubelet's and runtimes' files, and CDI's."""
