"""The kubelet: the server of its device plugin API, the registration with it, and the sockets."""
