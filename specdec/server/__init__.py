"""Serves the protocols of OpenAI and Anthropic over HTTP, with one engine.

A protocol reads a body into a :class:`~specdec.server.job.Job` and renders its events.
What a job needs (a place, tokens, a time limit, tool calls) is the same for all
protocols.
"""
