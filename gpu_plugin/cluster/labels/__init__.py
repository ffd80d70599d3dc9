"""Labels of the Node with the keys and values of NVIDIA's GPU Feature Discovery: `values` computes them, `keeper` writes them."""
