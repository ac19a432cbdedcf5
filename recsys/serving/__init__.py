"""Answers requests over HTTP with a package: `recsys.serve` starts it.

A request passes through `guard` (token, metrics, log line), `application` (routes), `schema` (validation) and
`batcher`, whose single thread lets `model` convert and score the rows of concurrent requests together.
`server` owns the socket and handles signals.
"""
