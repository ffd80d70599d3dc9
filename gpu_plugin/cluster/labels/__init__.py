"""Labels of the Node, as NVIDIA's GPU Feature Discovery writes them: what they say (pure), and the ways they get there."""
