"""The device lists for the kubelet: offers, health and devices that pods hold, combined into one immutable snapshot."""
