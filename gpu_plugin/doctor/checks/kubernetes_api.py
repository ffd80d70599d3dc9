"""Check that the Kubernetes API can be reached, and grants the rights that the enabled options need."""

from gpu_plugin.doctor.check import Finding, check, failed, ok, seen, skipped
from gpu_plugin.doctor.facts import Facts


@check("kubernetes-api")
def kubernetes_api(facts: Facts) -> Finding | list[Finding]:
    """Fail if the API is needed and does not answer, and with each option whose rights are missing."""
    known = seen(facts.api, "the Kubernetes API", needed=True)
    if not known.asked:
        return skipped("no enabled option needs it")
    if known.trouble:
        options = ", ".join(dict.fromkeys(right.needed_by for right in known.asked))
        return failed(
            f"needed by {options}: {known.trouble}",
            "is the API server's address reachable from here (network policies, DNS)? Is the service account mounted, or "
            "--kubeconfig right?",
        )
    if known.missing:
        by_option: dict[str, list[str]] = {}
        for right in known.missing:
            by_option.setdefault(right.needed_by, []).append(str(right))
        return [
            failed(
                f"{option}: our account may not {', '.join(rights)}",
                "bind it to a ClusterRole that allows it: docs/security.md has the rights of each feature, the chart makes them",
            )
            for option, rights in by_option.items()
        ]
    return ok(f"{known.server} answers in {known.seconds * 1000:.0f} ms, and allows what is needed")
