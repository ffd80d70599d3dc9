"""The built-in simulated nodes, a module for each. The name of a profile is that of its module, with hyphens."""
