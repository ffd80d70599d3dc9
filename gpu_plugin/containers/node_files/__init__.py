"""Reads facts about the kubelet and the container runtime from the node's files. `access.strategy_choice` decides by them."""
