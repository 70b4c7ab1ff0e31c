"""Small things that every package may use; they know nothing of models."""
