"""What the next version is, and whether a source fits it."""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from typing import Final, Literal, SupportsIndex

import msgspec

from slackwater.checkpoint.canary import Canary
from slackwater.checkpoint.tensor import TensorSpec
from slackwater.errors import InvalidInputError
from slackwater.publish.naming import find_renamed

BLOB_BYTES: Final = 64 * 1024 * 1024
"""Most bytes in a pack of bodies, where a batch of them fits."""

_HEAD: Final = "lm_head.weight"
_CODES: Final = frozenset({"F8_E4M3", "F8_E5M2", "U8", "I8"})
"""What weights are quantised to."""
_DTYPES: Final = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""safetensors' names by those of config.json."""

_ANOTHER_MODEL: Final = "publish another model under another run"
_QUANTISE: Final = "it is held as codes and scales: publish a QuantizedSource around the floats"


class _Config(msgspec.Struct, frozen=True):
    """What is read of config.json."""

    tie_word_embeddings: bool = False
    dtype: str | None = None
    torch_dtype: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Since:
    """What was committed since an anchor."""

    versions: int
    share: float
    """Bytes of their objects, as a share of the model's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Anchors:
    """When the next version is an anchor: whoever starts from the bucket reads one and what follows it.

    Raises:
        InvalidInputError: A number is out of its bounds.
    """

    every: int = 50
    """Versions from one to the next, at most."""
    share: float = 2.0
    """Bytes of deltas since the last one, as a share of the model's, after which the next one comes."""

    def __post_init__(self) -> None:
        if self.every < 1 or not self.share > 0:
            raise InvalidInputError(f"anchor_every={self.every} is 1 or more, and anchor_share={self.share} above 0")


def decide(anchors: Anchors, since: Since | None, *, forced: bool) -> Literal["anchor", "delta"]:
    """Choose the next version's kind.

    Args:
        anchors: The policy.
        since: What was committed since the last anchor; None in a lineage that has none.
        forced: The caller wants an anchor now.
    """
    if forced or since is None or since.versions + 1 >= anchors.every or since.share >= anchors.share:
        return "anchor"
    return "delta"


def check_step(step: SupportsIndex) -> int:
    """The trainer's step as a manifest holds it.

    Raises:
        InvalidInputError: It is no whole number, or out of its bounds.
    """
    is_whole = isinstance(step, SupportsIndex)  # pyright: ignore[reportUnnecessaryIsInstance] : a caller's slip
    number = index(step) if is_whole and not isinstance(step, bool) else -1
    if not 0 <= number < 1 << 63:
        raise InvalidInputError(
            f"step {step!r} is no whole number from 0 to 2**63 - 1", hint="count the trainer's steps"
        )
    return number


def check_canary(canary: Canary | None) -> Canary | None:
    """The canary as a manifest holds it: a good one from when it was made.

    Raises:
        InvalidInputError: It is something else.
    """
    if not isinstance(canary, Canary | None):  # pyright: ignore[reportUnnecessaryIsInstance] : a caller's slip
        raise InvalidInputError(
            f"{type(canary).__name__} is no canary", hint="make a slackwater.checkpoint.canary.Canary of its parts"
        )
    return canary


def check_fits(kind: Literal["anchor", "delta"], held: Mapping[str, TensorSpec], new: Mapping[str, TensorSpec]) -> None:
    """Check a source against the lineage's tensors, before anything is encoded.

    In a delta an absent tensor is unchanged; an anchor has them all.

    Raises:
        InvalidInputError: A tensor is unknown, has another shape or dtype, or is missing; it is named.
    """
    for name, spec in new.items():
        if name not in held:
            raise InvalidInputError(f"{name} isn't in this run", hint=_advise_on_name(name, held, new))
        if spec != held[name]:
            raise InvalidInputError(
                f"{name} is {spec.dtype} {list(spec.shape)}, and in this run "
                f"{held[name].dtype} {list(held[name].shape)}",
                hint=_advise_on_dtype(spec, held[name]),
            )
    missing = sorted(held.keys() - new.keys())
    if kind == "anchor" and missing:
        raise InvalidInputError(
            f"an anchor has every tensor, and {missing[0]} is missing", hint="publish the whole model"
        )


def _advise_on_name(name: str, held: Mapping[str, TensorSpec], new: Mapping[str, TensorSpec]) -> str:
    if f"{name}_packed" in held:
        return _QUANTISE
    renamed = find_renamed(new.keys() - held.keys(), held.keys() - new.keys())
    if renamed is None:
        return _ANOTHER_MODEL
    theirs, ours = renamed
    return f"if {theirs} is what this run calls {ours}, name it so; {_ANOTHER_MODEL}"


def _advise_on_dtype(new: TensorSpec, held: TensorSpec) -> str:
    if new.dtype in _DTYPES.values() and held.dtype in _CODES:
        return _QUANTISE
    if new.shape == held.shape:
        return f"cast to the serving dtype, or {_ANOTHER_MODEL}"
    return f"give whole tensors, or a rank's pieces by PartedSource; {_ANOTHER_MODEL}"


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
    """Check a folder's config, tokenizer and template against those of the run, by digest. It may lack some.

    Raises:
        InvalidInputError: One differs or is new; it is named.
    """
    for file in sorted(new):
        if held.get(file) != new.get(file):
            raise InvalidInputError(
                f"{file} isn't that of this run: the same weights would be another model",
                hint="give the files of the run's first anchor by folder_files or --files, or take another run",
            )
