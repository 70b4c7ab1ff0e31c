"""Make a draft for a target: train some of its layers, or a head, on its own text."""
