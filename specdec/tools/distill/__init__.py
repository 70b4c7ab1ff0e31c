"""A draft made for a target: text that it writes, layers of its own, a divergence."""
