"""GPUs and the devices made of them, with the resource names and ids for the kubelet. Pure: no I/O, no clock."""
