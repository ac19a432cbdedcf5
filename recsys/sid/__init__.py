"""Makes semantic ids, short codes for items, once before training: `python -m recsys.sid TOOL`.

`catalogue` reads a data folder of `recsys prepare`, `sources` turn items into vectors, and `embeddings`
stores these with the transform that made them. `quantizers` turns vectors into codes, `collisions` tells
items of one code apart, and `bundle` stores all of it. `statistics` and `page` report how good the codes are.
"""
