"""Names that Kubernetes has rules for."""

import re

_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")

DOMAIN = "nvidia.com"
"""Of every resource name that the operator gives no domain of its own."""

PRESENT = f"{DOMAIN}/gpu.present"
"""The label that there is a GPU. GPU Feature Discovery leaves this one to NVIDIA's operator and to people."""

TIMESTAMP = f"{DOMAIN}/gfd.timestamp"
"""The label that is Unix time in whole seconds when the others came to be what they are."""


def whole_name(name: str) -> str:
    """A resource name with its domain."""
    return name if "/" in name else f"{DOMAIN}/{name}"


def resource_name_fault(name: str) -> str:
    """Why the kubelet would refuse this resource name; empty if it would not.

    The rule is Kubernetes' own for extended resources (pkg/apis/core/v1/helper, IsExtendedResourceName): with "requests."
    put before it, the name must still be a qualified name.
    """
    if "/" not in name:
        return f"{name!r} has no domain: write it as in nvidia.com/gpu"
    if "kubernetes.io/" in name:
        return f"{name!r} lies in kubernetes.io, which Kubernetes keeps for itself"
    if name.startswith("requests."):
        return f"{name!r} starts with 'requests.', which quotas keep for themselves"
    domain, _, rest = name.partition("/")
    if "/" in rest:
        return f"{name!r} has more than one '/'"
    if len(domain) > 244 or not all(_LABEL.fullmatch(label) for label in domain.split(".")):
        return f"{name!r}: the domain {domain!r} is not a lower-case DNS name of at most 244 characters"
    if len(rest) > 63 or not _NAME.fullmatch(rest):
        return f"{name!r}: {rest!r} is not 1 to 63 letters, digits, '-', '_' or '.', starting and ending with a letter or digit"
    return ""


def label_key_fault(key: str) -> str:
    """Why no node can have a label of this key; empty if one can (apimachinery, util/validation, IsQualifiedName)."""
    domain, slash, rest = key.rpartition("/")
    if slash and (len(domain) > 253 or not all(_LABEL.fullmatch(label) for label in domain.split("."))):
        return f"{key!r}: {domain!r} is not a lower-case DNS name of at most 253 characters"
    if len(rest) > 63 or not _NAME.fullmatch(rest):
        return f"{key!r}: {rest!r} is not 1 to 63 letters, digits, '-', '_' or '.', starting and ending with a letter or digit"
    return ""
