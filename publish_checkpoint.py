#!/usr/bin/env python3
"""Publish a Hugging Face folder as the next version of a run: the whole of a trainer's side in one file.

    python publish_checkpoint.py ./model --bucket s3://bucket/prefix --run my-run --step 100

The first version is the whole folder; later ones hold the bits that changed, and now and then one is whole again. A
version is visible once this ends with status 0, and never in part. Ended anywhere, even killed, it is simply called
again. It needs the ``slackwater`` package; take this file as a start for your own.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from slackwater.bucket.open import open_bucket
from slackwater.cli.canary import read_canary
from slackwater.errors import SlackwaterError
from slackwater.publish.key_files import read_signer
from slackwater.publish.publisher import Publisher
from slackwater.weights.source import FolderSource


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Publish a Hugging Face folder as the next version of a run.")
    parser.add_argument("folder", type=Path, help="safetensors in the serving dtype, config.json and the tokenizer")
    parser.add_argument("--bucket", required=True, help="a directory, s3://bucket/prefix, gs://... or az://...")
    parser.add_argument("--run", required=True, help="the run's name, never used for another run")
    parser.add_argument("--step", type=int, default=0, help="the trainer's step, for people")
    parser.add_argument("--anchor", action="store_true", help="publish the whole folder, where a delta would do")
    parser.add_argument("--files", type=Path, help="take config and tokenizer from this folder: the run's first one")
    parser.add_argument("--canary", type=Path, help="a JSON file with what replicas have to compute with these weights")
    parser.add_argument("--level", choices=["fast", "wan"], default="fast", help="wan: fewer bytes, more work")
    parser.add_argument("--baseline-dir", type=Path, help="keep the last version here, to read none from the bucket")
    parser.add_argument("--sign-with", type=Path, help="an Ed25519 private key in PEM, which signs the version")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Publish once; returns the process's status: 0 committed, 1 not, 2 wrong options.

    Args:
        argv: The options; None takes the process's own.
    """
    options = _arguments(argv)
    try:
        signer = None if options.sign_with is None else read_signer(options.sign_with)
        canary = None if options.canary is None else read_canary(options.canary, options.files or options.folder)
        bucket = open_bucket(options.bucket, create=True)
        with Publisher(
            bucket, options.run, level=options.level, baseline_dir=options.baseline_dir, signer=signer
        ) as publisher:
            published = publisher.publish(
                FolderSource(options.folder),
                step=options.step,
                folder_files=options.files,
                anchor=options.anchor,
                canary=canary,
            )
    except SlackwaterError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(
        f"{published.run}/{published.version} {published.kind} {published.uploaded_bytes} bytes, "
        f"{published.ratio:.2%} of a full copy, state {published.state[:12]}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
