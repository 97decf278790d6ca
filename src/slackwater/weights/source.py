"""Where tensors come from. A source is read while it is published and must not change meanwhile."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from slackwater.checkpoint.pieces import WHOLE, Piece, Pieces, num_lines, tiles_in
from slackwater.checkpoint.shards import Slot, read_slots
from slackwater.checkpoint.tensor import Bits, TensorSpec
from slackwater.errors import ConflictError, CorruptError, InvalidInputError, NotFoundError
from slackwater.ids import Version

INDEX_FILE: Final = "model.safetensors.index.json"
UNDO_FOLDER: Final = ".slackwater-undo"
"""Where an application in place keeps tiles that it is writing, in the folder of the model."""

_MAX_INDEX_BYTES: Final = 256 * 1024 * 1024

_SIDE_SUFFIXES: Final = frozenset({".json", ".jinja", ".txt", ".model", ".tiktoken"})
_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)+")
_OF_TRAINERS: Final = re.compile(r"trainer_state\.json|(all|train|eval|test|predict)_results\.json")
"""What Hugging Face's Trainer writes beside a model, anew at each step."""
_PICKLED_SUFFIXES: Final = frozenset({".bin", ".pt", ".pth", ".pkl", ".ckpt"})


@runtime_checkable
class TensorSource(Protocol):
    """Tensors by canonical name, as flat integer views of their bits. Reads may come from any thread."""

    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor, by rising name."""
        ...

    def bits(self, name: str) -> Bits:
        """One tensor, flat and in row-major order; without a copy where the source can. Not to be written.

        Raises:
            NotFoundError: No such tensor.
        """
        ...


class Named(Protocol):
    """Something whose name goes into a manifest."""

    @property
    def name(self) -> str:
        """A stable name."""
        ...


@runtime_checkable
class Quantizes(Protocol):
    """A source whose tensors are quantised on their way: `slackwater.weights.quantized.QuantizedSource`."""

    @property
    def quantizers(self) -> Mapping[str, Named]:
        """The quantiser of each tensor that one makes."""
        ...


@runtime_checkable
class Follows(Protocol):
    """A source that keeps something of the committed state: `slackwater.weights.device.DeviceSource`."""

    def committed(self, version: Version) -> None:
        """What was read is committed now, as ``version``."""
        ...


@runtime_checkable
class Shows(Protocol):
    """A source that may show memory which its owner writes, instead of copies of it."""

    def shows(self, name: str) -> bool:
        """Whether `TensorSource.bits` gives a view of one tensor, so that reading it again costs nothing."""
        ...


@runtime_checkable
class Parted(Protocol):
    """A source that has pieces of some tensors, as ranks do: `slackwater.weights.parted.PartedSource`.

    `TensorSource.specs` names the whole tensors all the same, and `TensorSource.bits` gives the pieces, flat and in
    row-major order of their own.
    """

    def pieces(self) -> Mapping[str, Piece]:
        """The tensors of which it has a piece, and which; it has the others whole."""
        ...


def pieces_of(source: TensorSource) -> Pieces:
    """What a source has of its tensors; pieces that are whole tensors aren't named.

    Raises:
        InvalidInputError: A piece is of a tensor that the source doesn't name, or its edges aren't those of tiles.
    """
    if not isinstance(source, Parted):
        return WHOLE
    specs, found = source.specs(), dict[str, Piece]()
    for name, piece in source.pieces().items():
        if name not in specs:
            raise InvalidInputError(f"there is a piece of {name}, and no such tensor", hint="name the whole tensor too")
        tiles_in(specs[name], piece)
        if piece.end - piece.begin < num_lines(specs[name]):
            found[name] = piece
    return found


class ShardSource:
    """Tensors in safetensors files that are mapped or held in memory.

    Args:
        buffers: Each file's bytes by its name.

    Raises:
        CorruptError: A file breaks safetensors' rules, or two files hold the same tensor.
    """

    def __init__(self, buffers: Mapping[str, bytearray | memoryview | npt.NDArray[np.uint8]]) -> None:
        self._buffers = buffers
        self._slots: dict[str, tuple[str, Slot]] = {}
        for file, buffer in buffers.items():
            for name, slot in read_slots(file, buffer).items():
                if name in self._slots:
                    raise CorruptError(f"{name} is both in {self._slots[name][0]} and in {file}")
                self._slots[name] = (file, slot)
        self._specs: Final = {name: slot.spec for name, (_, slot) in sorted(self._slots.items())}

    def specs(self) -> Mapping[str, TensorSpec]:
        """See `TensorSource.specs`."""
        return self._specs

    def bits(self, name: str) -> Bits:
        """See `TensorSource.bits`. A view of the file; writable where the buffer is."""
        file, slot = self._find(name)
        return slot.bits(self._buffers[file])

    def shows(self, name: str) -> bool:
        """See `Shows.shows`."""
        return name in self._slots

    def place(self, name: str) -> tuple[str, int]:
        """The file that holds a tensor, and its first byte in it.

        Raises:
            NotFoundError: No such tensor.
        """
        file, slot = self._find(name)
        return file, slot.offset

    def _find(self, name: str) -> tuple[str, Slot]:
        if name not in self._slots:
            raise NotFoundError(f"there is no tensor {name} in {', '.join(self._buffers)}")
        return self._slots[name]


class FolderSource(ShardSource):
    """A Hugging Face folder of safetensors files, mapped: opening it reads headers alone.

    Args:
        folder: With ``model.safetensors.index.json`` and the files it names, or with safetensors files alone.
        half_written: Take a folder in which an application in place was interrupted: to go on with it.

    Attributes:
        shards: The safetensors files by name.
        files: What belongs to the model besides: config, tokenizer, chat template, the index; by name.

    Raises:
        InvalidInputError: No folder, no safetensors in it, or tensors and index don't match.
        ConflictError: An application in place was interrupted here.
        CorruptError: A file breaks safetensors' rules, or is shorter or longer than its header says.
    """

    def __init__(self, folder: Path | str, *, half_written: bool = False) -> None:
        folder = Path(folder)
        if not half_written and (folder / UNDO_FOLDER).is_dir():
            raise ConflictError(
                f"{folder} is half written: an application in place was interrupted there", hint="run it again"
            )
        weight_map = _read_weight_map(folder)
        self.folder: Final = folder
        self.shards: Final[Mapping[str, Path]] = _find_shards(folder, weight_map)
        index = {} if weight_map is None else {INDEX_FILE: folder / INDEX_FILE}
        self.files: Final[Mapping[str, Path]] = {**side_files(folder), **index}
        super().__init__({file: _map(path) for file, path in self.shards.items()})
        if weight_map is not None:
            self._check_index(weight_map)

    def _check_index(self, weight_map: Mapping[str, str]) -> None:
        for name, file in weight_map.items():
            if name not in self._slots or self._slots[name][0] != file:
                raise InvalidInputError(
                    f"{self.folder}: {INDEX_FILE} names {name} in {file}, and it isn't there",
                    hint="save the whole model again",
                )
        extra = sorted(self._slots.keys() - weight_map.keys())
        if extra:
            raise InvalidInputError(f"{self.folder}: {INDEX_FILE} doesn't name {extra[0]}")


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors\Z")]]


def _read_weight_map(folder: Path) -> Mapping[str, str] | None:
    path = folder / INDEX_FILE
    if not path.is_file():
        return None
    if path.stat().st_size > _MAX_INDEX_BYTES:
        raise CorruptError(f"{path} has {path.stat().st_size} bytes; we read {_MAX_INDEX_BYTES}")
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Index).weight_map
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise CorruptError(f"{path} can't be read: {error}") from error


def _find_shards(folder: Path, weight_map: Mapping[str, str] | None) -> Mapping[str, Path]:
    if not folder.is_dir():
        raise InvalidInputError(f"{folder} is no folder", hint="name a Hugging Face model folder")
    names = {p.name for p in folder.glob("*.safetensors")} if weight_map is None else set(weight_map.values())
    if not names:
        raise InvalidInputError(f"{folder} is a folder without safetensors", hint=_advice(folder))
    for name in sorted(names):
        if not (folder / name).is_file():
            raise InvalidInputError(f"{folder}: {INDEX_FILE} names {name}, and there is no such file")
    return {name: folder / name for name in sorted(names)}


def _advice(folder: Path) -> str:
    if any(path.suffix in _PICKLED_SUFFIXES for path in folder.iterdir()):
        return "pickled weights are never read: save the model with safe_serialization=True"
    return "name a Hugging Face model folder"


def _map(path: Path) -> npt.NDArray[np.uint8]:
    if path.stat().st_size == 0:
        raise CorruptError(f"{path.name}: the file is empty", hint="fetch or write the file again")
    return np.memmap(path, dtype=np.uint8, mode="r")


def side_files(folder: Path) -> Mapping[str, Path]:
    """The files of a model folder that are neither weights nor their index, by rising name.

    Raises:
        InvalidInputError: No such folder.
    """
    if not folder.is_dir():
        raise InvalidInputError(f"{folder} is no folder", hint="name a Hugging Face model folder")
    return {path.name: path for path in sorted(folder.iterdir()) if _is_side_file(path)}


def _is_side_file(path: Path) -> bool:
    plain = _PLAIN_NAME.fullmatch(path.name) is not None and not path.name.endswith(".index.json")
    own = _OF_TRAINERS.fullmatch(path.name) is None
    return plain and own and path.suffix in _SIDE_SUFFIXES and path.is_file()
