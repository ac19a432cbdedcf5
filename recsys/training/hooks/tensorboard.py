"""The run in TensorBoard: `tensorboard --logdir <run folder>/tensorboard`."""

from torch.utils.tensorboard import SummaryWriter

from recsys.training.hooks.base import Evaluated, Hook, Run, Trained


class TensorBoard(Hook):
    """Scalars of every record, and the resolved config as text."""

    def __init__(self) -> None:
        self._writer: SummaryWriter | None = None

    def started(self, run: Run) -> None:
        """Opens the event file; what an interrupted run wrote about later steps is hidden."""
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.first_step + 1)
        self._writer.add_text("config", "```\n" + run.config_text + "\n```", run.first_step + 1)

    def trained(self, record: Trained) -> None:
        """Losses, learning rates, gradient norm and speed."""
        rates = record.rates
        scalars = {"train/loss": record.loss, "train/grad_norm": record.grad_norm}
        scalars |= {f"train/loss/{name}": value for name, value in record.losses.items()}
        scalars |= {f"lr/{name}": value for name, value in record.lr.items()}
        scalars |= {
            "speed/samples_per_s": rates.samples_per_s,
            "speed/tokens_per_s": rates.tokens_per_s,
            "speed/data_wait": rates.data_wait,
        }
        self._write(scalars, record.step)

    def evaluated(self, record: Evaluated) -> None:
        """All metrics."""
        self._write({f"validation/{name}": value for name, value in record.metrics.items()}, record.step)

    def close(self) -> None:
        """Writes what is still in memory."""
        if self._writer is not None:
            self._writer.close()

    def _write(self, scalars: dict[str, float], step: int) -> None:
        if self._writer is None:
            raise ValueError("TensorBoard.started has not been called")
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
