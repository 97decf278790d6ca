"""The runner that fits a model."""

from slackwater.engine.torch.architectures import Memory
from slackwater.engine.torch.model import LoadedModel
from slackwater.engine.torch.runner import Runner
from slackwater.engine.torch.slot_runner import SlotRunner
from slackwater.errors import UnsupportedError


def runner_of(model: LoadedModel, *, slots: int, window: int, threads: int = 1) -> Runner:
    """Make it.

    Args:
        model: What runs.
        slots: Answers at once.
        window: Most positions of one.
        threads: That attention may use.

    Raises:
        UnsupportedError: There is none.
    """
    if model.memory is Memory.ROWS:
        return SlotRunner(model, slots=slots, window=window, threads=threads)
    raise UnsupportedError(f"{model.architecture} is not served yet", hint="serve another model")
