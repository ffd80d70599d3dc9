"""The names of a daemon's files in the state directory. The daemon removes their leftovers, and uninstalling removes them."""

from gpu_plugin.cluster.labels.features_file import FEATURES_FILE
from gpu_plugin.cluster.labels.keeper import LABELS_FILE
from gpu_plugin.daemon.config_source import CHOICE_FILE
from gpu_plugin.state.log import FILES as LOG_FILES
from gpu_plugin.state.records import HANDOVER_FILE, OWN_MARKS_FILE

FILES = (*LOG_FILES, CHOICE_FILE, OWN_MARKS_FILE, HANDOVER_FILE, LABELS_FILE, FEATURES_FILE)
"""All files except the lock, which only `node_lock` handles, and the control socket."""
