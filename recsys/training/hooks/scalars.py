"""Names the numbers of a record as TensorBoard and tracking services show them, such as `train/loss`."""

from recsys.training.hooks.base import Evaluated, Trained


def train_scalars(record: Trained) -> dict[str, float]:
    """Returns losses, learning rates, gradient norm, speed and memory of a training record by name."""
    rates = record.rates
    scalars = {"train/loss": record.loss, "train/grad_norm": record.grad_norm}
    scalars |= {f"train/loss/{name}": value for name, value in record.losses.items()}
    scalars |= {f"lr/{name}": value for name, value in record.lr.items()}
    scalars |= {
        "speed/samples_per_s": rates.samples_per_s,
        "speed/tokens_per_s": rates.tokens_per_s,
        "speed/tflop_per_s": rates.flop_per_s / 1e12,
        "speed/data_wait": rates.data_wait,
        "memory/peak_mib": record.memory / 2**20,
    }
    return scalars if rates.mfu is None else scalars | {"speed/mfu": rates.mfu}


def validation_scalars(record: Evaluated) -> dict[str, float]:
    """Returns all metrics of an evaluation by name."""
    return {f"validation/{name}": value for name, value in record.metrics.items()}
