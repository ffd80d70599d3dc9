"""The Kubernetes API, through lightkube (extra `kube`). Only code that connects to the API imports lightkube."""
