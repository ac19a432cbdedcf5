"""Several averages along one run, evaluated on the validation rows: averages.py CONFIG [PATH=VALUE ...]

Averaging leaves the weights of a run alone, so runs of one seed that differ in `train.weight_averaging` only
are one run, looked at in several ways. Prints a line for each evaluation and average.
"""

import json
import sys
import tempfile
from pathlib import Path

from recsys import config, environment
from recsys import protos as pb

environment.import_torchrec_quietly()

from recsys.training.averaging import WeightAverage  # noqa: E402
from recsys.training.distributed import Processes, process_group  # noqa: E402
from recsys.training.evaluator import evaluate  # noqa: E402
from recsys.training.session import open_session  # noqa: E402

EVERY = 84


def swa(start: int, every: int = 21) -> pb.WeightAveraging:
    return pb.WeightAveraging(swa=pb.Swa(start_step=start, every_steps=every))


AVERAGES = {
    "ema .9": pb.WeightAveraging(ema=pb.Ema(decay=0.9, every_steps=1)),
    "ema .99": pb.WeightAveraging(ema=pb.Ema(decay=0.99, every_steps=1)),
    "ema .999": pb.WeightAveraging(ema=pb.Ema(decay=0.999, every_steps=1)),
    "swa from 420": swa(420),
    "swa from 630": swa(630),
}


def run(arguments: list[str], processes: Processes) -> None:
    """Trains to the end and evaluates on the way."""
    pipeline = config.prepare(arguments[0], arguments[1:]).pipeline
    session = open_session(pipeline, Path(tempfile.mkdtemp()), processes)
    weights = session.wrapped.state_dict()
    averages = {name: WeightAverage(weights, (), one) for name, one in AVERAGES.items()}
    for batch in session.batches():
        session.optimizer.zero_grad()
        loss, result = session.wrapped(batch.to(processes.device))
        loss.backward()
        session.optimizer.step()
        session.advance(result.position)
        session.moved()
        step = session.progress.step
        for average in averages.values():
            average.update(step)
        if step % EVERY == 0:
            say(step, "weights", evaluate(session.model, session.validation, processes.device))
            for name, average in averages.items():
                if average.updates(step):
                    with average.in_place(step):
                        say(step, name, evaluate(session.model, session.validation, processes.device))
        if step == session.total_steps:
            return


def say(step: int, name: str, metrics: dict[str, float]) -> None:
    """One line of JSON."""
    print(json.dumps({"step": step, "average": name, **metrics}), flush=True)


if __name__ == "__main__":
    with process_group() as group:
        run(sys.argv[1:], group)
