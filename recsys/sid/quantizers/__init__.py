"""Quantizers turn vectors into codes; `base.Quantizer` is their interface."""

from recsys.sid.quantizers.base import Fitted, Quantizer
from recsys.sid.quantizers.opq import Opq
from recsys.sid.quantizers.rq_kmeans import RqKmeans
from recsys.sid.quantizers.rq_vae import RqVae

QUANTIZERS: dict[str, type[Quantizer]] = {"rq_kmeans": RqKmeans, "rq_vae": RqVae, "opq": Opq}
"""Quantizers by the name that --quantizer gives."""

__all__ = ["QUANTIZERS", "Fitted", "Opq", "Quantizer", "RqKmeans", "RqVae"]
