"""Recipes that measure, keep and show the acceptance and speed of a pair of models."""
