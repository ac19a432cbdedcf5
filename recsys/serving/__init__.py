"""Answers requests over HTTP with a package: `recsys.serve` starts it.

A request passes `guard` (token, metrics, log line), `application` (routes), `schema` (validation) and
`batcher`, whose one thread has `model` convert and score the rows of concurrent users together. `server` owns
socket and signals.
"""
