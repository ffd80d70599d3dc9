"""The built-in simulated nodes, a module for each. The name of a module with hyphens is the name of its profile."""
