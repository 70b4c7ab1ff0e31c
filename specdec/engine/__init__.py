"""Requests in, tokens out: which rows run, one step after another."""
