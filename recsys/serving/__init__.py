"""Answers requests over HTTP with a package: `recsys.serve` starts it.

A request passes `guard` (token, metrics, log line), `application` (routes), `schema` (validation), `model`
(rows to a block) and `batcher` (rows of concurrent users scored together by one thread). `server` owns socket
and signals.
"""
