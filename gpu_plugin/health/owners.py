"""Whose a pod is, by its name: PodResources tells no owner, but controllers make the names of their pods by fixed rules."""

import re

_RANDOM = "[bcdfghjklmnpqrstvwxz2456789]"
"""Characters of generated names (k8s.io/apimachinery, util/rand): neither vowels, nor what is mistaken for another."""

_GENERATED = re.compile(
    rf"""
    ^(?P<owner>.+?)
    (?:
        -{_RANDOM}{{7,10}}-{_RANDOM}{{5}}  # Deployment: its ReplicaSet's hash, a number of up to ten digits, and the pod's own
      | (?:-\d+)*-{_RANDOM}{{5}}          # Job; Indexed Job with the index; CronJob with the minute; JobSet with two indices
      | (?:-\d+)+                         # StatefulSet: the ordinal
    )$
    """,
    re.VERBOSE,
)


def owner(pod: str) -> str:
    """What made a pod, as namespace/name, of the pod's own namespace/name; that itself where it follows no such rule.

    Retries of a Job and replicas of a Deployment are of one owner. Names tell less than references to owners would: pods that
    were named like generated ones by hand are taken for one owner's, which blames an application rather than a GPU.
    """
    namespace, slash, name = pod.rpartition("/")
    found = _GENERATED.match(name)
    return f"{namespace}{slash}{found['owner'] if found else name}"
