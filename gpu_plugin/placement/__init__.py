"""Which devices suit a pod best. Pure: works on what was probed, never on the hardware."""
