"""Semantic ids: short codes for items, made once before training: `python -m recsys.sid TOOL`.

`catalogue` reads a data folder of `recsys prepare`, `sources` turns items into vectors, and `embeddings`
stores these with the transform that made them. `quantizers` turns vectors into codes, `collisions` tells
items of one code apart, and `bundle` stores it all. `statistics` and `page` say how good the codes are.
"""
