"""Small helpers for every package; they do not know of models."""
