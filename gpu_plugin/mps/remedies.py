"""Remedies for MPS daemons that cannot be used. Each is the end of a message, after `status.remedies.TO_DO`."""

START = "start gpu-plugin mps on this node (the chart's value mps.enabled, or systemctl start gpu-plugin-mps)"

SAME_ROOT = (
    f"{START}; if it runs, give it and this plugin the same --mps-root, mounted from the same directory of the node"
)

SAME_CONFIGURATION = (
    "wait some seconds; if it stays so, give gpu-plugin mps the same configuration as this plugin, and look in its log"
)

STUCK = (
    "look in the log of gpu-plugin mps and at the free space of the disk of --mps-root; if neither helps, restart gpu-plugin "
    "mps, which ends the work of all clients of its daemons"
)

RESTART_OTHER = (
    "restart the program that runs the daemon, such as the pod of NVIDIA's mps-control-daemon on this node; or end that program "
    "and run gpu-plugin mps in its place (the chart's value mps.enabled)"
)

WAIT_FOR_OTHER = f"wait some seconds; if it stays so, {RESTART_OTHER}"

ASK_OTHER = (
    "have nvidia-cuda-mps-control where this plugin can run it: install the driver's compute utilities on the node, and mount "
    "the driver's root at --driver-root-ctr-path; or end the program that runs the daemon and run gpu-plugin mps instead (the "
    "chart's value mps.enabled)"
)
