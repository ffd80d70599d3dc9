"""The versions of Kubernetes that judge the manifests. Apart from `openapi.py`, whose content is in the key of the cache."""

KUBERNETES_VERSIONS = (
    "v1.29.6",
    "v1.30.14",
    "v1.31.14",
    "v1.32.13",
    "v1.33.13",
    "v1.34.4",
    "v1.35.4",
    "v1.36.3",
    "v1.37.2",
)
"""The newest patch release of each minor version that is available, from the oldest that the chart's kubeVersion allows."""
