"""Requests in, tokens out: decides which rows run, step by step."""
