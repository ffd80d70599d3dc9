"""A real one-node Kubernetes cluster on this machine, made of host processes, for tests to drive and to break.

`Cluster` is the whole; each of its pieces (`etcd`, `apiserver`, `controller_manager`, `scheduler`, `containerd`,
`kubelet`, `plugin`) can be started, stopped, killed and restarted by itself; `Cluster.api` asks the API server.
"""
