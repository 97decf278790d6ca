"""What the next version is, and whether a source fits it."""

from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from slackwater.checkpoint.tensor import TensorSpec
from slackwater.errors import InvalidInputError

BLOB_BYTES: Final = 64 * 1024 * 1024
"""Most bytes in a pack of bodies, where a batch of them fits."""

_HEAD: Final = "lm_head.weight"
_DTYPES: Final = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""safetensors' names by those of config.json."""


class _Config(msgspec.Struct, frozen=True):
    """What is read of config.json."""

    tie_word_embeddings: bool = False
    dtype: str | None = None
    torch_dtype: str | None = None


def decide(*, anchor_every: int, since_anchor: int | None, forced: bool) -> Literal["anchor", "delta"]:
    """Choose the next version's kind.

    Args:
        anchor_every: Versions from one anchor to the next.
        since_anchor: Versions committed since the last anchor; None in a lineage that has none.
        forced: The caller wants an anchor now.
    """
    if forced or since_anchor is None or since_anchor + 1 >= anchor_every:
        return "anchor"
    return "delta"


def check_fits(kind: Literal["anchor", "delta"], held: Mapping[str, TensorSpec], new: Mapping[str, TensorSpec]) -> None:
    """Check a source against the lineage's tensors, before anything is encoded.

    In a delta an absent tensor is unchanged; an anchor has them all.

    Raises:
        InvalidInputError: A tensor is unknown, has another shape or dtype, or is missing; it is named.
    """
    for name, spec in new.items():
        if name not in held:
            raise InvalidInputError(f"{name} isn't in this lineage", hint="publish another model under another run")
        if spec != held[name]:
            raise InvalidInputError(
                f"{name} is {spec.dtype} {list(spec.shape)}, and in this lineage "
                f"{held[name].dtype} {list(held[name].shape)}",
                hint="cast to the serving dtype, or publish another model under another run",
            )
    missing = sorted(held.keys() - new.keys())
    if kind == "anchor" and missing:
        raise InvalidInputError(
            f"an anchor has every tensor, and {missing[0]} is missing", hint="publish the whole model"
        )


def check_config(config: bytes | bytearray, specs: Mapping[str, TensorSpec]) -> None:
    """Check an anchor's tensors against its own config, so that no version is committed that no engine can load.

    Raises:
        InvalidInputError: The config is no JSON object; it ties the output head, and the tensors have one of their
            own; or no tensor has the config's dtype, as where a float32 master copy was not cast.
    """
    try:
        read = msgspec.json.decode(config, type=_Config)
    except msgspec.MsgspecError as error:
        raise InvalidInputError(f"config.json can't be read: {error}", hint="take the model's own file") from error
    if read.tie_word_embeddings and _HEAD in specs:
        raise InvalidInputError(
            f"config.json ties {_HEAD} to the embedding, and the tensors have one of their own",
            hint=f"leave {_HEAD} out: a cast breaks the tie that is otherwise seen",
        )
    dtype = read.dtype or read.torch_dtype
    wanted = _DTYPES.get(dtype) if dtype else None
    if wanted and specs and all(spec.dtype != wanted for spec in specs.values()):
        raise InvalidInputError(
            f"config.json says {dtype}, and no tensor is {wanted}",
            hint="cast the tensors to the serving dtype before publishing",
        )


def check_side_files(held: Mapping[str, str], new: Mapping[str, str]) -> None:
    """Check an anchor's config, tokenizer and template against those of the lineage, by digest.

    Raises:
        InvalidInputError: One differs, is new or is missing; it is named.
    """
    for file in sorted(held.keys() | new.keys()):
        if held.get(file) != new.get(file):
            raise InvalidInputError(
                f"{file} isn't that of this lineage: the same weights would be another model",
                hint="keep the folder's files as they were, or publish under another run",
            )
