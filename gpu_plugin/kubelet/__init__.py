"""The kubelet: its device plugin API served, our registration with it, and the life of the sockets between."""
