"""The files of a foreign delta: its safetensors files, and the index that says which tensor is in which of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from slackwater.checkpoint.foreign.delta import Files
from slackwater.checkpoint.foreign.pickles import refuse_pickled_file, refuse_pickled_name
from slackwater.checkpoint.shards import Shard, build_shard
from slackwater.checkpoint.tensor import Bits, TensorSpec
from slackwater.errors import CorruptError

INDEX: Final = "model.safetensors.index.json"
SUFFIX: Final = ".safetensors"


class Index(msgspec.Struct, frozen=True):
    """``model.safetensors.index.json``, as Hugging Face and all who follow it write it."""

    weight_map: dict[str, Annotated[str, msgspec.Meta(max_length=255)]]
    """Tensor to file."""
    metadata: msgspec.Raw = msgspec.Raw(b"{}")


def read_index(files: Files) -> Index | None:
    """Read the index; None where the files have none.

    Raises:
        CorruptError: It isn't an index.
    """
    raw = files.get(INDEX)
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw, type=Index)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise CorruptError(f"{INDEX} can't be read: {error}", hint="fetch the delta again") from error


def check_map(listed: Mapping[str, str], found: Mapping[str, str]) -> None:
    """Check that the files hold each tensor that the index lists, where it says, and no other.

    Raises:
        CorruptError: They don't; the message names a tensor.
    """
    wrong = sorted(name for name in listed.keys() | found.keys() if listed.get(name) != found.get(name))
    if wrong:
        raise CorruptError(
            f"{INDEX} and the files disagree about {len(wrong)} tensors, {wrong[0]} among them",
            hint="fetch the delta again",
        )


def weight_files(files: Files) -> tuple[str, ...]:
    """Names of the safetensors files, rising. Others that the folder may have are left alone, unread.

    Raises:
        UnsupportedError: There are none, and a pickle in their place.
        CorruptError: There are none.
    """
    names = tuple(sorted(name for name in files if name.endswith(SUFFIX)))
    if not names:
        for name in files:
            refuse_pickled_name(name)
        raise CorruptError("the delta has no safetensors file", hint="fetch the delta again")
    return names


def open_weights(files: Files, file: str) -> memoryview:
    """The bytes of one safetensors file.

    Raises:
        UnsupportedError: It is a pickle.
        CorruptError: It is missing, or its name is no safetensors file's.
    """
    refuse_pickled_name(file)
    if file not in files or not file.endswith(SUFFIX):
        raise CorruptError(f"the delta lacks its file {file[:80]!r}", hint="fetch the delta again")
    buffer = memoryview(files[file]).cast("B")
    refuse_pickled_file(file, buffer)
    return buffer


@dataclass(frozen=True, kw_only=True, slots=True)
class _Held:
    arrays: Mapping[str, Bits]

    def bits(self, name: str) -> Bits:
        return self.arrays[name]


def build_file(file: str, tensors: Mapping[TensorSpec, Bits], metadata: Mapping[str, str]) -> bytearray:
    """One safetensors file, its tensors in the mapping's order."""
    shard = Shard(file=file, specs=tuple(tensors))
    return build_shard(shard, _Held(arrays={spec.name: bits for spec, bits in tensors.items()}), metadata)
