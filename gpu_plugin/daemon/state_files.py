"""The names of a daemon's files in the state directory. The daemon removes their leftovers, and uninstalling removes them."""

from gpu_plugin.cluster.labels.features_file import FEATURES_FILE
from gpu_plugin.cluster.labels.keeper import LABELS_FILE
from gpu_plugin.daemon.config_source import CHOICE_FILE
from gpu_plugin.state.event_store import FILE as EVENTS_FILE
from gpu_plugin.state.records import (
    DEVICES_FILE,
    GPUS_FILE,
    HANDOVER_FILE,
    HEALTH_FILE,
    JOURNAL_FILE,
    OWN_MARKS_FILE,
)

FILES = (
    HEALTH_FILE,
    JOURNAL_FILE,
    GPUS_FILE,
    DEVICES_FILE,
    CHOICE_FILE,
    EVENTS_FILE,
    OWN_MARKS_FILE,
    HANDOVER_FILE,
    LABELS_FILE,
    FEATURES_FILE,
)
"""All files except the lock, which only `node_lock` handles, and the control socket."""
