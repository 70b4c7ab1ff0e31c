"""The documentation's own tools: what they write is what is there."""
