import string

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpu_plugin.config.names import resource_name_fault
from gpu_plugin.devices.plan import GPU_RESOURCE

LABEL = set(string.ascii_lowercase + string.digits + "-")
NAME = set(string.ascii_letters + string.digits + "-_.")
ENDS = set(string.ascii_letters + string.digits)


def kubelet_takes(name: str) -> bool:
    """Kubernetes' rule for the names of extended resources, stated letter by letter."""
    if "/" not in name or "kubernetes.io/" in name or name.startswith("requests."):
        return False
    qualified = f"requests.{name}".split("/")
    if len(qualified) != 2:
        return False
    domain, rest = qualified
    if len(domain) > 253 or not 1 <= len(rest) <= 63:
        return False
    for label in domain.split("."):
        if not label or not LABEL.issuperset(label) or label.startswith("-") or label.endswith("-"):
            return False
    return NAME.issuperset(rest) and {rest[0], rest[-1]} <= ENDS


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gpu", "has no domain"),
        ("", "has no domain"),
        ("hugepages-2Mi", "has no domain"),
        ("nvidia.com/gpu/x", "has more than one '/'"),
        ("kubernetes.io/gpu", "is in the domain kubernetes.io"),
        ("x.kubernetes.io/gpu", "is in the domain kubernetes.io"),
        ("requests.nvidia.com/gpu", "starts with 'requests.'"),
        ("NVIDIA.com/gpu", "is not a lower-case DNS name"),
        ("-nvidia.com/gpu", "is not a lower-case DNS name"),
        ("nvidia..com/gpu", "is not a lower-case DNS name"),
        ("d" * 245 + "/gpu", "is not a lower-case DNS name"),
        ("/gpu", "is not a lower-case DNS name"),
        ("nvidia.com/" + "g" * 64, "is not 1 to 63 letters"),
        ("nvidia.com/-a", "is not 1 to 63 letters"),
        ("nvidia.com/a.", "is not 1 to 63 letters"),
        ("nvidia.com/", "is not 1 to 63 letters"),
        ("nvidia.com/mig-1g.10gb+me", "is not 1 to 63 letters"),
        ("nvidia.com/gpu\n", "is not 1 to 63 letters"),
        ("nvidia.com/gpü", "is not 1 to 63 letters"),
    ],
)
def test_names_that_a_kubelet_refuses(name, why):
    assert resource_name_fault(name).startswith(f"{name!r}")
    assert why in resource_name_fault(name)
    assert not kubelet_takes(name)


PIECES = ["nvidia", "com", ".", "/", "-", "_", "G", "7", "+", "é", "\n", " ", "requests.", "kubernetes.io"]
pieces = st.sampled_from([*PIECES, "x" * 62, "y" * 120])


@settings(max_examples=300, deadline=None)
@given(st.lists(pieces, max_size=9).map("".join) | st.text(max_size=6).map("nvidia.com/{}".format))
@example(GPU_RESOURCE)
@example("nvidia.com/" + "g" * 63)
@example("d" * 244 + "/gpu")
@example("requests/gpu")
@example("requests.a/b")
@example("a/kubernetes.io/b")
def test_the_verdict_on_any_name_is_kubernetes_own(name):
    assert (resource_name_fault(name) == "") is kubelet_takes(name)
