"""Small helpers for every package. They know nothing of models."""
