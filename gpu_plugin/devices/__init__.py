"""GPUs and the devices made of them: what the kubelet counts, under which name and id. Pure: no I/O, no clock."""
