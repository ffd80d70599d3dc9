"""The versions of Kubernetes that judge the manifests. Apart from `openapi.py`, whose content is in the key of the cache."""

from tests.cluster.harness import binaries

KUBERNETES_VERSIONS = (
    "v1.29.6",
    "v1.30.14",
    "v1.31.14",
    "v1.32.13",
    "v1.33.13",
    "v1.34.4",
    "v1.35.4",
    *(f"v{version}" for version in reversed(binaries.KUBERNETES_VERSIONS)),
)
"""The newest patch release of each minor version that is available, from the oldest that the chart's kubeVersion allows."""
