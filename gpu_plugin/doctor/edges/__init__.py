"""The probes that gather the facts. Every blocking function here may hang; `gathering` limits its time."""
