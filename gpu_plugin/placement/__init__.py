"""The choice of the best devices for a pod. Pure: it works on the results of probes, never on the hardware."""
