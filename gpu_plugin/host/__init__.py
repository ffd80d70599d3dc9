"""Files of the host: the driver's installation, what the kernel says of GPUs, the kubelet's and runtimes', and CDI's."""
