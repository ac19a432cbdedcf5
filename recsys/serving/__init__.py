"""Answers requests over HTTP with a package: `recsys.serve` starts it.

A request passes through `guard` (token, metrics, log line), `application` (routes), `schema` (validation) and
`batcher`, whose single thread lets `model` send the rows of concurrent requests to a `scoring_process`, where
`batch_scorer` converts and scores them together. `server` owns the socket and handles signals.
"""
