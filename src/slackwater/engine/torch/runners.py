"""The runner that fits a model."""

from slackwater.engine.torch.architectures import Memory
from slackwater.engine.torch.model import LoadedModel
from slackwater.engine.torch.rerun_runner import RerunRunner
from slackwater.engine.torch.runner import Runner
from slackwater.engine.torch.slot_runner import SlotRunner
from slackwater.engine.torch.state_runner import StateRunner


def runner_of(model: LoadedModel, *, slots: int, window: int, threads: int = 1, invariant: bool = False) -> Runner:
    """Make it.

    Args:
        model: What runs.
        slots: Answers at once.
        window: Most positions of one.
        threads: That our attention may use.
        invariant: Whether no bit may depend on what else is in a pass of the same shape.
    """
    match model.memory:
        case Memory.ROWS:
            return SlotRunner(model, slots=slots, window=window, threads=threads, invariant=invariant)
        case Memory.STATES:
            return StateRunner(model, slots=slots, window=window)
        case Memory.NOTHING:
            return RerunRunner(model, slots=slots, window=window)
