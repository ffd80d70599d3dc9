"""What the node's own files say of its kubelet and its container runtime. Reads them, decides nothing."""
