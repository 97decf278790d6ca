"""``slackwater publish``: a model folder becomes the next version of a run."""

from pathlib import Path

from slackwater.bucket.open import open_bucket
from slackwater.publish.delta import Progress
from slackwater.publish.publisher import Published, Publisher
from slackwater.weights.source import FolderSource


def publish_folder(
    folder: Path,
    bucket_url: str,
    run: str,
    *,
    step: int,
    anchor: bool = False,
    progress: Progress | None = None,
) -> Published:
    """Publish a Hugging Face folder: an anchor where the run is new or ``anchor`` is set, else a delta.

    Args:
        folder: safetensors in the serving dtype, with config and tokenizer.
        bucket_url: As `open_bucket` takes it; a local folder is made where it is missing.
        run: The run's name.
        step: The trainer's step, for people.
        anchor: Publish everything again.
        progress: Told how far it is.

    Raises:
        InvalidInputError: The folder, the URL or the run's name is wrong, or the folder doesn't fit the run.
        LostRaceError: Another publisher was faster.
    """
    source = FolderSource(folder)
    bucket = open_bucket(bucket_url, create=True)
    return Publisher(bucket, run, progress=progress).publish(source, step=step, anchor=anchor)
