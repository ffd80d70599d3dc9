"""Taking gpu-plugin off a cluster: what it left on a node, and the DaemonSet whose pods take that away."""
