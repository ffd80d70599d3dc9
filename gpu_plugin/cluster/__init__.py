"""The Kubernetes API, through lightkube (extra `kube`), which is imported only by what talks to it."""
