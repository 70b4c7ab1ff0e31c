"""Recipes: acceptance and speed of a pair, measured, kept and shown."""
