"""Health policies with the table of Xids that ships with the package, as the daemon has them."""

from collections.abc import Mapping

from gpu_plugin.config.resolve import resolve
from gpu_plugin.health.policy import HealthPolicy, policy
from gpu_plugin.health.xid_table import XID_TABLE

UNGUARDED = {"flags": {"flapGuard": "0s"}}
"""A config file without a flap guard, which would hold back what recovered."""


def shipped(environ: Mapping[str, str] | None = None, **sections: object) -> HealthPolicy:
    """The policy of these environment variables and sections of a config file, without a flap guard."""
    return policy(resolve({}, environ or {}, {**UNGUARDED, **sections}), XID_TABLE)


SHIPPED = shipped()
