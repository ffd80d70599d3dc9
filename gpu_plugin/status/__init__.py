"""The status of a node: one typed value with all that operators see, its problems, and their remedies."""
