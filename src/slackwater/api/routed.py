"""``routed_experts``: the routes of an answer, as they come and on the wire, in this API's form and in others'."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from slackwater.api.arrays import PIECE_BYTES, Array, joined
from slackwater.errors import CorruptError, InvalidInputError, UnsupportedError
from slackwater.rollout.routes import RouteRows, Routing

INT32_BYTES: Final = 4
"""Of an expert's number where SGLang's form is asked for."""
_NPY_ALIGN: Final = 64


class RoutedExperts(Array, frozen=True, kw_only=True, omit_defaults=True):
    """uint8, or uint16 where there are more than 256 experts, of shape [rows, layers, experts per token]: the rows of
    positions from ``start`` on, in order, without those that are missing.
    """

    start: int
    layers: tuple[int, ...]
    """Numbers of the layers on the second axis: those that have a router."""
    experts: int
    """Of each such layer; they count from 0."""
    missing: tuple[tuple[int, int], ...] = ()
    """[start, end) of positions whose rows nobody has told, and which have none in ``data``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Routed:
    """What ``engine_data`` says of an answer's routes."""

    told: RoutedExperts | None = None
    status: str = "not_requested"
    reason: str = ""
    """Why the status is what it is, where that isn't plain."""


NOT_ROUTED: Final = Routed()
"""Nobody asked."""


class RouteLog:
    """The routes of one answer as they come.

    Args:
        routing: What they are chosen from; None: the model has no routers, or nobody tells.
        start: The first position that was asked for.
    """

    def __init__(self, routing: Routing | None, start: int) -> None:
        self.routing = routing
        self.told: list[RouteRows] = []
        """All that came, rising."""
        self._start = start

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the layers that have a router."""
        return self.routing.layers if self.routing else ()

    def take(self, rows: bytes | None, end: int) -> RouteRows | None:
        """Note what a token tells of the positions before its own, ``end``.

        Raises:
            CorruptError: They are no whole rows, or of positions that earlier tokens have told of.
        """
        if not rows or self.routing is None:
            return None
        count, rest = divmod(len(rows), self.routing.row_bytes)
        if rest or end - count < self._told_end():
            raise CorruptError(f"an answer's routes before position {end} don't join those before them")
        self.told.append(RouteRows(end=end, data=rows))
        return self.told[-1]

    def shown(self, rows: RouteRows) -> RoutedExperts | None:
        """A part of the routes, for a chunk of a stream."""
        return self._form([rows], rows.end - self._count(rows), ())

    def whole(self, end: int) -> RoutedExperts | None:
        """All routes of an answer whose last row is before position ``end``. None where nothing is told."""
        return self._form(self.told, self._start, self.missing(end))

    def evidence(self, end: int, *, shows: bool) -> Routed:
        """What there is to say of an answer whose last row is before position ``end``; with the rows if it ``shows``
        them.
        """
        if self.routing is None:
            return Routed(status="unsupported", reason="the model has no routers, or its replicas don't tell of them")
        lacks = sum(high - low for low, high in self.missing(end))
        if lacks and not self.told:
            return Routed(status="unsupported", reason="the replica didn't tell of its routers")
        status, reason = ("partial", f"no replica told of {lacks} positions") if lacks else ("ok", "")
        return Routed(told=self.whole(end) if shows else None, status=status, reason=reason)

    def missing(self, end: int) -> tuple[tuple[int, int], ...]:
        """[start, end) of positions before ``end`` that nobody has told of."""
        begins = [rows.end - self._count(rows) for rows in self.told]
        ends = [rows.end for rows in self.told]
        gaps = zip([self._start, *ends], [*begins, max(end, self._start)], strict=True)
        return tuple((low, high) for low, high in gaps if low < high)

    def npy(self, end: int) -> str | None:
        """As vLLM has it: base64 of an ``.npy`` file of shape [rows, layers, experts per token]. None where a row is
        missing, which such a file can't say.
        """
        if self.routing is None or self.missing(end):
            return None
        shape = (sum(map(self._count, self.told)), len(self.routing.layers), self.routing.per_token)
        return joined([_npy_header(self.routing, shape), *(rows.data for rows in self.told)])

    def int32(self, end: int) -> str | None:
        """As SGLang has it: base64 of the same values as int32, without a header. None where a row is missing."""
        if self.routing is None or self.missing(end):
            return None
        size = 1 if self.routing.dtype == "uint8" else 2
        return joined(wide for rows in self.told for wide in _widened(rows.data, size))

    def _told_end(self) -> int:
        return self.told[-1].end if self.told else self._start

    def _count(self, rows: RouteRows) -> int:
        return len(rows.data) // self.routing.row_bytes if self.routing else 0

    def _form(
        self, told: Sequence[RouteRows], start: int, missing: tuple[tuple[int, int], ...]
    ) -> RoutedExperts | None:
        routing = self.routing
        if routing is None:
            return None
        return RoutedExperts(
            dtype=routing.dtype,
            shape=(sum(map(self._count, told)), len(routing.layers), routing.per_token),
            data=joined(rows.data for rows in told),
            start=start,
            layers=routing.layers,
            experts=routing.experts,
            missing=missing,
        )


def forced_rows(sent: Array, routing: Routing | None, *, most: int) -> bytes:
    """Rows that a request has the routers take. A long check: not for the event loop.

    Args:
        sent: Of shape [positions, layers, experts per token], from position 0 on.
        routing: What there is to choose from.
        most: Positions that may be forced.

    Raises:
        InvalidInputError: It has another dtype or shape, too many positions, or names experts that can't be chosen.
        UnsupportedError: The model has no routers.
    """
    if routing is None:
        raise UnsupportedError("forced_routes need routers, and this model has none", hint="leave them out")
    form = (len(routing.layers), routing.per_token)
    if sent.dtype != routing.dtype or len(sent.shape) != 1 + len(form) or sent.shape[1:] != form:
        raise InvalidInputError(
            f"forced_routes has the wrong form: {sent.dtype} of shape {list(sent.shape[:8])}",
            hint=f"send {routing.dtype} of shape [positions, {form[0]}, {form[1]}]",
        )
    try:
        rows = sent.raw()
        count = routing.check(rows)
    except (CorruptError, InvalidInputError) as error:
        raise InvalidInputError(f"forced_routes is wrong: {error.message}", hint=error.hint) from error
    if count > most:
        raise InvalidInputError(
            f"forced_routes is out of range: {count} rows", hint=f"prompt and forced tokens have {most} positions"
        )
    return rows


def _npy_header(routing: Routing, shape: tuple[int, int, int]) -> bytes:
    kind = "|u1" if routing.dtype == "uint8" else "<u2"
    told = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}"
    magic = b"\x93NUMPY\x01\x00"
    length = -(-(len(magic) + 2 + len(told) + 1) // _NPY_ALIGN) * _NPY_ALIGN - len(magic) - 2
    return magic + length.to_bytes(2, "little") + told.ljust(length - 1).encode() + b"\n"


def _widened(rows: bytes, size: int) -> Iterator[bytes]:
    """Little-endian numbers of ``size`` bytes as int32, piece by piece."""
    for at in range(0, len(rows), PIECE_BYTES):
        piece = rows[at : at + PIECE_BYTES]
        wide = bytearray(len(piece) // size * INT32_BYTES)
        for byte in range(size):
            wide[byte::INT32_BYTES] = piece[byte::size]
        yield bytes(wide)
