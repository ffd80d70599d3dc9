"""Kubernetes' rules for names of resources and labels."""

import re

_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")

DOMAIN = "nvidia.com"  # of every resource name that the operator gives without a domain
PRESENT = f"{DOMAIN}/gpu.present"  # the label of nodes with a GPU, which NVIDIA's operator and people set
TIMESTAMP = (
    f"{DOMAIN}/gfd.timestamp"  # the label with the time of the last change of the others: Unix time, whole seconds
)


def whole_name(name: str) -> str:
    """Return a resource name with its domain."""
    return name if "/" in name else f"{DOMAIN}/{name}"


def resource_name_fault(name: str) -> str:
    """Return why the kubelet would refuse this resource name; empty if the name is valid.

    This is Kubernetes' rule for extended resources (pkg/apis/core/v1/helper, IsExtendedResourceName): with the prefix
    "requests.", the name must still be a qualified name.
    """
    if "/" not in name:
        return f"{name!r} has no domain: write it as in nvidia.com/gpu"
    if "kubernetes.io/" in name:
        return f"{name!r} is in the domain kubernetes.io, which is reserved for Kubernetes"
    if name.startswith("requests."):
        return f"{name!r} starts with 'requests.', which is reserved for quotas"
    domain, _, rest = name.partition("/")
    if "/" in rest:
        return f"{name!r} has more than one '/'"
    if len(domain) > 244 or not all(_LABEL.fullmatch(label) for label in domain.split(".")):
        return f"{name!r}: the domain {domain!r} is not a lower-case DNS name of at most 244 characters"
    if len(rest) > 63 or not _NAME.fullmatch(rest):
        return f"{name!r}: {rest!r} is not 1 to 63 letters, digits, '-', '_' or '.', starting and ending with a letter or digit"
    return ""


def label_key_fault(key: str) -> str:
    """Return why a label key is invalid; empty if it is valid (apimachinery, util/validation, IsQualifiedName)."""
    domain, slash, rest = key.rpartition("/")
    if slash and (len(domain) > 253 or not all(_LABEL.fullmatch(label) for label in domain.split("."))):
        return f"{key!r}: {domain!r} is not a lower-case DNS name of at most 253 characters"
    if len(rest) > 63 or not _NAME.fullmatch(rest):
        return f"{key!r}: {rest!r} is not 1 to 63 letters, digits, '-', '_' or '.', starting and ending with a letter or digit"
    return ""
