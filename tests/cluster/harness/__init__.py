"""A real Kubernetes cluster with one node for tests, made of processes of this machine.

`Cluster` is the whole cluster. Each of its processes (`etcd`, `apiserver`, `controller_manager`, `scheduler`, `containerd`,
`kubelet`, `plugin`) can be started, stopped, killed and restarted separately. `Cluster.api` is a client of the API server.
"""
