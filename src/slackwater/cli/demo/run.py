"""`slackwater demo`: starts trainer, gateway and replicas, watches them, checks what they claim, writes the report."""

import asyncio
import contextlib
import json
import shutil
import signal
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass, field, replace
from functools import reduce

import msgspec
from rich.console import Console
from rich.live import Live

from slackwater.bucket.open import open_bucket, probe
from slackwater.cli.demo.cast import Cast, DemoSettings, assemble
from slackwater.cli.demo.claims import Record, claims, failures
from slackwater.cli.demo.events import Phase, PublishedEvent, StepEvent, decode_event
from slackwater.cli.demo.fleet import FleetWatch
from slackwater.cli.demo.processes import Child, keep_running, stop_all
from slackwater.cli.demo.view import Progress, draw, plain
from slackwater.cli.started import seconds_since_start
from slackwater.errors import CorruptError, InvalidInputError, SwapError, UnavailableError
from slackwater.trainer.align import LabelCheck
from slackwater.trainer.record import decode_record

_SETTLE_S = 60.0
"""Longest wait for the replicas to reach the last version."""
_LOOK_S = 0.25


async def run_demo(settings: DemoSettings) -> int:
    """Run the demo. Returns the exit status: 0 where every claim that any run must meet is met."""
    console = Console()
    async with _cast(settings) as cast, _fleet(cast) as fleet:
        record = await _Demo(settings=settings, cast=cast, fleet=fleet, console=console).run()
    figures = claims(record)
    line = json.dumps({"bench": "demo", "claims": [{"name": name, "value": value} for name, value in figures.items()]})
    (settings.out / "claims.json").write_text(line + "\n", "utf-8")
    for sentence in failures(figures):
        console.print(f"[red]the demo fails: {sentence}")
    console.print(f"report: {cast.report}    logs: {cast.out / 'logs'}", soft_wrap=True)
    print(line)  # noqa: T201 - the benchmark's one line
    return 1 if failures(figures) else 0


@contextlib.asynccontextmanager
async def _cast(settings: DemoSettings) -> AsyncGenerator[Cast]:
    """The processes; whoever was started has ended when this is left, also on Ctrl-C and SIGTERM."""
    cast = assemble(settings)
    await asyncio.to_thread(clear, cast)
    await asyncio.to_thread(probe, open_bucket(cast.bucket, create=True))
    try:
        with _ends_on_signal():
            yield cast
    finally:
        await asyncio.shield(stop_all(cast.children))


def clear(cast: Cast) -> None:
    """Make the folders, and remove what an earlier demo left in them: nothing that bears no mark of a demo.

    Raises:
        InvalidInputError: The work folder is somebody else's, or can't be made.
    """
    mark = cast.work / ".slackwater-demo"
    if cast.work.exists() and not mark.is_file():
        raise InvalidInputError(f"{cast.work} holds something that no demo made", hint="choose another --out")
    try:
        shutil.rmtree(cast.work, ignore_errors=True)
        cast.work.mkdir(parents=True)
        mark.touch()
        for child in cast.children:
            child.log.unlink(missing_ok=True)
    except OSError as error:
        raise InvalidInputError(f"{cast.work} can't be made: {error.strerror}", hint="choose another --out") from error


@contextlib.asynccontextmanager
async def _fleet(cast: Cast) -> AsyncGenerator[FleetWatch]:
    fleet = FleetWatch({child.name: cast.urls[child.name] for child in cast.replicas}, cast.control_key)
    try:
        yield fleet
    finally:
        await fleet.close()


@contextlib.contextmanager
def _ends_on_signal() -> Generator[None]:
    """Let SIGTERM and SIGHUP end the demo as Ctrl-C does: children first."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGHUP)
    for number in signals:
        loop.add_signal_handler(number, lambda: task.cancel() if task else None)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


@dataclass(kw_only=True, slots=True)
class _Demo:
    settings: DemoSettings
    cast: Cast
    fleet: FleetWatch
    console: Console
    progress: Progress = field(init=False)
    model_ready: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.progress = Progress(phase="starting", num_steps=self.settings.steps)

    async def run(self) -> Record:
        """Train, let the fleet settle, check the labels, write the report."""
        with self._live():
            await self._train()
            self._say_phase("comparing the fleet's weights with the trainer's")
            byte_exact = await self._settle()
            await stop_all([self.cast.trainer, self.cast.gateway, *self.cast.replicas])
            self._say_phase("re-scoring every token under the version that it claims")
            labels = await self._check_labels()
            self._say_phase("writing the report")
            return await self._report(labels, byte_exact=byte_exact)

    @contextlib.contextmanager
    def _live(self) -> Generator[None]:
        if self.settings.plain or not self.console.is_terminal:
            yield
            return
        with Live(
            get_renderable=lambda: draw(self.progress, seconds_since_start()),
            console=self.console,
            refresh_per_second=4,
            transient=False,
        ):
            yield

    async def _train(self) -> None:
        """Until the trainer is done; replicas that end meanwhile are started again."""
        await asyncio.gather(*(child.start() for child in (self.cast.trainer, *self.cast.replicas)))
        keepers = [asyncio.create_task(keep_running(child)) for child in self.cast.replicas]
        keepers.append(asyncio.create_task(self._keep_gateway()))
        watcher = asyncio.create_task(self._watch_fleet())
        following = asyncio.create_task(self._follow_trainer())
        try:
            done, _ = await asyncio.wait([following, watcher, *keepers], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (following, watcher, *keepers):
                task.cancel()
            await asyncio.gather(following, watcher, *keepers, return_exceptions=True)

    async def _follow_trainer(self) -> None:
        trainer = self.cast.trainer
        async for line in trainer.lines():
            match decode_event(line):
                case Phase() as phase:
                    self._enter(phase)
                case PublishedEvent() as published:
                    self.progress.published.append(published)
                case StepEvent() as step:
                    self.progress.steps.append(step)
                    self._say(plain(step, self.progress))
        code = await trainer.running.wait()
        if code:
            raise UnavailableError(
                f"the trainer ended with status {code}: {trainer.last_words()}", hint=f"read {trainer.log}"
            )

    def _enter(self, phase: Phase) -> None:
        names = {
            "model": "making the model's folder",
            "ready": "loading",
            "training": "training",
            "done": "trained",
        }
        self._say_phase(names.get(phase.name, phase.name))
        if phase.name == "ready":
            self.model_ready.set()

    async def _keep_gateway(self) -> None:
        """The gateway needs the model's tokenizer, so it starts when the folder is there."""
        await self.model_ready.wait()
        await self.cast.gateway.start()
        await keep_running(self.cast.gateway)

    def _say_phase(self, phase: str) -> None:
        self.progress.phase = phase
        self._say(f"{seconds_since_start():6.1f} s  {phase}")

    def _say(self, line: str) -> None:
        if self.settings.plain or not self.console.is_terminal:
            self.console.print(line, soft_wrap=True, highlight=False)

    async def _watch_fleet(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(_LOOK_S)

    async def _look(self) -> None:
        views = await asyncio.gather(*(self.fleet.look(child.name) for child in self.cast.replicas))
        self.progress.replicas = {view.name: view for view in views}
        self.progress.restarts = sum(child.starts - 1 for child in self.cast.replicas)

    async def _settle(self) -> bool:
        """Wait until both replicas serve the last version; whether their memory equals what was published."""
        last = self.progress.published[-1]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SETTLE_S):
                while any(view.version != last.version for view in self.progress.replicas.values()):
                    await asyncio.sleep(_LOOK_S)
                    await self._look()
        behind = [view.name for view in self.progress.replicas.values() if view.version != last.version]
        if behind:
            raise SwapError(
                f"{', '.join(behind)} did not reach version {last.version} in {_SETTLE_S:.0f} s",
                hint=f"read the logs in {self.cast.out / 'logs'}",
            )
        held = await asyncio.gather(*(self.fleet.weights(child.name) for child in self.cast.replicas))
        return all(weights == (last.version, last.state) for weights in held)

    async def _check_labels(self) -> LabelCheck:
        """Re-score each replica's answers in a process of its own, side by side."""
        await asyncio.gather(*(child.start() for child in self.cast.checkers))
        found = await asyncio.gather(*(_verdict(child) for child in self.cast.checkers))
        return reduce(LabelCheck.plus, found)

    async def _report(self, labels: LabelCheck, *, byte_exact: bool) -> Record:
        from slackwater.cli.demo.report import write_report  # noqa: PLC0415 - matplotlib, at the end alone

        with self.cast.record.open("rb") as lines:
            answers = tuple(decode_record(line) for line in lines)
        record = Record(
            steps=tuple(self.progress.steps),
            published=tuple(self.progress.published),
            swaps=self.fleet.swaps,
            answers=answers,
            labels=labels,
            byte_exact=byte_exact,
            restarts=self.progress.restarts,
            wall_s=seconds_since_start(),
            evidence=self.settings.toy,
        )
        await asyncio.to_thread(write_report, record, self.cast.report)
        return replace(record, wall_s=seconds_since_start())


async def _verdict(child: Child) -> LabelCheck:
    lines = [line async for line in child.lines()]
    code = await child.running.wait()
    if code or not lines:
        raise UnavailableError(f"{child.name} ended with status {code}: {child.last_words()}", hint=f"read {child.log}")
    try:
        return msgspec.json.decode(lines[-1], type=LabelCheck)
    except msgspec.DecodeError as error:
        raise CorruptError(f"{child.name} wrote {lines[-1][:120]!r}, which is no verdict") from error
