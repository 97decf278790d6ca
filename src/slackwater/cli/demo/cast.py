"""Who takes part in the demo: names, ports, keys, and the processes to start. Nothing is started here."""

import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_cache_path

from slackwater.cli.demo.processes import Child, free_port
from slackwater.cli.keys import CONTROL_KEY, INFERENCE_KEY
from slackwater.ids import RunId, run_id

REPLICAS = ("replica-0", "replica-1")
_WINDOW = "256"
"""Tokens: prompts and answers of the demo are short, and memory is a laptop's."""
_TOY_WINDOW = "64"


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoSettings:
    """Settings of one demo."""

    steps: int
    bucket: str | None
    """None: a directory below ``out``."""
    out: Path
    seed: int
    toy: bool
    """A tiny random model instead of a real one: nothing is downloaded, and masks and routes are used."""
    plain: bool
    """Lines instead of a live view, as where the output is no terminal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cast:
    """Processes and addresses of one run."""

    run: RunId
    bucket: str
    out: Path
    control_key: str
    urls: dict[str, str]
    """Base URL by process name."""
    trainer: Child
    gateway: Child
    replicas: tuple[Child, ...]
    checkers: tuple[Child, ...]
    """One per replica, started when the fleet has ended: they re-score its answers."""

    @property
    def children(self) -> tuple[Child, ...]:
        """Everyone, in the order in which they are asked to end."""
        return (self.trainer, self.gateway, *self.replicas, *self.checkers)

    @property
    def work(self) -> Path:
        """The bucket and the replicas' caches; emptied by the next demo."""
        return self.out / "work"

    @property
    def record(self) -> Path:
        """Every answer of the run, one JSON object a line."""
        return self.out / "rollouts.jsonl"

    @property
    def report(self) -> Path:
        """The picture at the end."""
        return self.out / "report.png"


def assemble(settings: DemoSettings) -> Cast:
    """Choose a run, ports and keys, and say how each process is started."""
    out = settings.out.resolve()
    run = run_id(f"demo-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}")
    bucket = settings.bucket or str(out / "work" / "bucket")
    urls = {name: f"http://127.0.0.1:{free_port()}" for name in ("gateway", *REPLICAS)}
    keys = {INFERENCE_KEY: secrets.token_urlsafe(24), CONTROL_KEY: secrets.token_urlsafe(24)}
    window = _TOY_WINDOW if settings.toy else _WINDOW
    model = str(_model_folder(settings, out))

    def child(name: str, *arguments: str, threads: int = 1) -> Child:
        return Child(
            name=name,
            arguments=(*arguments, "--bucket", bucket, "--run", run, "--supervised"),
            environment={**keys, **thread_environment(threads)},
            log=out / "logs" / f"{name}.log",
        )

    def port(name: str) -> str:
        return urls[name].rpartition(":")[2]

    record = str(out / "rollouts.jsonl")
    fleet = [part for name in REPLICAS for part in ("--replica", f"{name}={urls[name]}")]
    toy = ("--toy",) if settings.toy else ()
    trainer = ("train", "--gateway", urls["gateway"], "--model-folder", model, "--record", record, *toy)
    return Cast(
        run=run,
        bucket=bucket,
        out=out,
        control_key=keys[CONTROL_KEY],
        urls=urls,
        trainer=child("trainer", *trainer, "--steps", str(settings.steps), "--seed", str(settings.seed), threads=2),
        gateway=child("gateway", "gateway", *fleet, "--tokenizer", model, "--port", port("gateway")),
        replicas=tuple(
            child(
                name, "replica", "--batch-invariant", "--name", name, "--port", port(name),
                "--cache", str(out / "work" / "cache" / name), "--window", window,
            )
            for name in REPLICAS
        ),
        checkers=tuple(
            child(
                f"check-{name}", "replay", record, "--replica", name,
                "--cache", str(out / "work" / "cache" / name), "--window", window,
            )
            for name in REPLICAS
        ),
    )  # fmt: skip


def _model_folder(settings: DemoSettings, out: Path) -> Path:
    """The toy is made anew, of the seed; the real one is kept."""
    return out / "work" / "toy" if settings.toy else user_cache_path("slackwater") / "models" / "smollm2-135m-instruct"


def thread_environment(threads: int) -> dict[str, str]:
    """Give a process its share of cores, and let idle threads sleep: two processes whose idle threads spin on the
    same cores slow each other down.
    """
    return {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "KMP_BLOCKTIME": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
