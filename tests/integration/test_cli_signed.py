"""Commands that sign and trust: keys come from files, and every reader refuses what they didn't sign."""

import json
import os
import runpy
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from states_rig import RUN, bits, publish_states, write_states

from slackwater.bucket.local import LocalBucket
from slackwater.checkpoint.keys import fold_key, manifest_key
from slackwater.checkpoint.manifest import encode_manifest
from slackwater.cli.attended import Attended
from slackwater.cli.publish import PublishSettings, fold_after, publish_folder
from slackwater.cli.scratch import Scratch
from slackwater.cli.trust import warn_of_unsigned
from slackwater.errors import AuthError
from slackwater.ids import Version
from slackwater.publish.lineage import read_manifest
from slackwater.publish.path import read_fold
from slackwater.testing.bucket import Fault, FaultyBucket, MemoryBucket

SOURCE = Path(__file__).parents[2] / "src"
SCRIPT: Final = Path(__file__).parents[2] / "publish_checkpoint.py"
LAST: Final = Version(4)


def slackwater(*words: Path | str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slackwater.cli.main", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "TERM": "dumb", "COLUMNS": "120"}
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=100)


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_states(tmp_path_factory.mktemp("states"), 6)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the trainer's ``key.pem`` and ``key.pub``, and those of a ``stranger``."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("key", "stranger"):
        key = Ed25519PrivateKey.generate()
        private = folder / f"{name}.pem"
        private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        private.chmod(0o600)
        public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        (folder / f"{name}.pub").write_bytes(public)
    return folder


@pytest.fixture(scope="module")
def published(states: list[Path], keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five signed versions, and the signed folds 0..2 and 0..4 that were made after the commits."""
    folder = tmp_path_factory.mktemp("run") / "bucket"
    for step, state in enumerate(states[:5]):
        done = slackwater(
            "publish", state, "--bucket", folder, "--run", RUN, "--step", str(step),
            "--sign-with", keys / "key.pem", "--fold-every", "2", *(["--trust", keys / "key.pub"] if step else []),
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "") or "NaN" in done.stderr
        assert (f"made the fold run/0..{step}: " in done.stdout) == (step in {2, 4})
    return folder


@pytest.fixture
def bucket(published: Path, tmp_path: Path) -> Path:
    """A copy, to be changed."""
    return shutil.copytree(published, tmp_path / "bucket")


def forge(bucket: Path, version: Version = LAST) -> None:
    forged = msgspec.structs.replace(read_manifest(LocalBucket(bucket), RUN, version), step=77)
    (bucket / manifest_key(RUN, version)).write_bytes(encode_manifest(forged))


def test_a_signed_version_is_pulled_by_its_folds(
    published: Path, states: list[Path], keys: Path, tmp_path: Path
) -> None:
    done = slackwater("pull", "run/4", tmp_path / "model", "--bucket", published, "--trust", keys / "key.pub")
    assert (done.returncode, done.stderr) == (0, "")
    assert bits(tmp_path / "model") == bits(states[4])
    assert [path.name for path in sorted((published / "run/folds").iterdir())] == [
        "00000000-00000002.json",
        "00000000-00000004.json",
    ]
    trusting = ("--bucket", published, "--trust", keys / "stranger.pub", "--trust", keys / "key.pub")
    verified = slackwater("verify", "run/0..4", *trusting, "--depth", "tensors")
    assert verified.returncode == 0, verified.stdout


def test_no_command_with_keys_takes_a_forged_version(
    bucket: Path, states: list[Path], keys: Path, tmp_path: Path
) -> None:
    forge(bucket)
    key, out = keys / "key.pub", tmp_path / "out"
    before = {path: path.read_bytes() for path in sorted(bucket.rglob("*")) if path.is_file()}
    run = ("--bucket", bucket, "--run", RUN, "--trust", key)
    signing = ("--sign-with", keys / "key.pem")
    lines = [
        ("pull", "run/4", out, "--bucket", bucket, "--trust", key),
        ("apply", states[3], "run/4", "--out", out, "--bucket", bucket, "--trust", key),
        ("diff", states[3], "run/4", "--bucket", bucket, "--trust", key),
        ("inspect", "run/4", "--bucket", bucket, "--trust", key),
        ("fold", "run/3..4", "--bucket", bucket, "--trust", key, *signing),
        ("rollback", "--to", "1", *run, *signing),
        ("publish", states[5], *run, *signing),
    ]
    for words in lines:
        done = slackwater(*words)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1), (words, done.stderr)
        assert "run/manifests/00000004.json: it isn't signed" in done.stderr
    logged = json.loads(slackwater("log", *run, "--json").stdout)
    assert [item["kind"] for item in logged["versions"]] == ["anchor", "delta", "delta", "delta", "damaged"]
    assert slackwater("verify", "run/4", "--bucket", bucket, "--trust", key, "--depth", "manifest").returncode == 4
    assert {path: path.read_bytes() for path in sorted(bucket.rglob("*")) if path.is_file()} == before
    assert not out.exists()


def test_a_replica_with_keys_takes_no_version_of_a_stranger(published: Path, keys: Path, tmp_path: Path) -> None:
    environment = {"SLACKWATER_INFERENCE_KEY": "a" * 32, "SLACKWATER_CONTROL_KEY": "b" * 32, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-m", "slackwater.cli.main", "replica", "--port", "0", "--cache", str(tmp_path)]
    words = ["--bucket", str(published), "--run", RUN, "--trust", str(keys / "stranger.pub")]
    with subprocess.Popen(
        [*command, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=os.environ | environment
    ) as process:
        late = threading.Timer(60, process.kill)
        late.start()
        try:
            assert process.stderr is not None
            assert any("which isn't trusted" in line for line in process.stderr)
        finally:
            process.kill()
            late.cancel()
    assert not list(tmp_path.rglob("*.safetensors"))


def test_an_unsigned_fold_is_left_aside_and_told(bucket: Path, states: list[Path], keys: Path, tmp_path: Path) -> None:
    (bucket / fold_key(RUN, Version(0), LAST)).unlink()
    made = slackwater("fold", "run/0..4", "--bucket", bucket, "--level", "wan")
    assert made.returncode == 0, made.stderr
    words = ("pull", "run/4", tmp_path / "model", "--bucket", bucket, "--trust", keys / "key.pub")
    done = slackwater(*words)
    assert done.returncode == 0
    assert "going without folds" in done.stderr
    assert bits(tmp_path / "model") == bits(states[4])
    (bucket / fold_key(RUN, Version(0), LAST)).unlink()
    signed = ("fold", "run/0..4", "--bucket", bucket, "--level", "wan", "--sign-with", keys / "key.pem")
    assert slackwater(*signed).returncode == 0
    again = slackwater("pull", "run/4", tmp_path / "again", "--bucket", bucket, "--trust", keys / "key.pub")
    assert (again.returncode, again.stderr) == (0, "")


def test_going_back_and_the_script_sign_as_well(bucket: Path, states: list[Path], keys: Path, tmp_path: Path) -> None:
    signing = ("--sign-with", keys / "key.pem")
    back = slackwater("rollback", "--bucket", bucket, "--run", RUN, "--to", "2", *signing, "--trust", keys / "key.pub")
    assert back.returncode == 0, back.stderr
    main = runpy.run_path(str(SCRIPT))["main"]
    assert main([str(states[5]), "--bucket", str(bucket), "--run", RUN, *map(str, signing)]) == 0
    assert main([str(states[5]), "--bucket", str(bucket), "--run", RUN, "--sign-with", str(tmp_path)]) == 1
    done = slackwater("pull", "run/6", tmp_path / "model", "--bucket", bucket, "--trust", keys / "key.pub")
    assert done.returncode == 0, done.stderr
    assert bits(tmp_path / "model") == bits(states[5])


def test_wrong_keys_are_told_before_anything_is_made(states: list[Path], keys: Path, tmp_path: Path) -> None:
    public, bucket = keys / "key.pub", tmp_path / "bucket"
    for words, status, told in [
        (("publish", states[0], "--run", RUN, "--sign-with", public), 1, f"{public} holds a public key"),
        (
            ("publish", states[0], "--run", RUN, "--trust", keys / "key.pem"),
            1,
            "key.pem holds a private key, and what is trusted is its public half",
        ),
        (("publish", states[0], "--run", RUN, "--sign-with", keys / "none.pem"), 1, "No such file"),
        (("log", "--run", RUN, "--trust", keys / "none.pub"), 1, "No such file"),
        (("publish", states[0], "--run", RUN, "--fold-every", "0"), 2, "--fold-every"),
    ]:
        done = slackwater(*words, "--bucket", bucket)
        assert (done.returncode, told in " ".join(done.stderr.split())) == (status, True), done.stderr
        assert "PRIVATE" not in done.stderr
    assert not bucket.exists()
    folders = slackwater("diff", states[0], states[1], "--trust", public)
    assert (folders.returncode, "folders have no signatures" in folders.stderr) == (1, True)
    out = ("--base", states[0], "--out", tmp_path / "delta", "--sign-with", keys / "key.pem")
    assert slackwater("fold", tmp_path, *out).returncode == 2


def test_with_trust_nothing_is_committed_that_is_refused_afterwards(
    bucket: Path, states: list[Path], keys: Path, tmp_path: Path
) -> None:
    before = {path: path.read_bytes() for path in sorted(bucket.rglob("*")) if path.is_file()}
    run = ("--bucket", bucket, "--run", RUN)
    trusting = ("--trust", keys / "key.pub")
    for words in (
        ("publish", states[5], *run, *trusting),
        ("rollback", "--to", "1", *run, *trusting),
        ("fold", "run/1..4", "--bucket", bucket, *trusting),
        ("publish", states[5], "--bucket", tmp_path / "new", "--run", RUN, *trusting),
    ):
        done = slackwater(*words)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), (words, done.stderr)
        assert "nothing would sign it (add --sign-with KEY" in done.stderr
        done = slackwater(*words, "--sign-with", keys / "stranger.pem")
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), (words, done.stderr)
        assert f"{keys / 'stranger.pem'} is key " in done.stderr
        assert "for a new key, trust both" in done.stderr
    assert {path: path.read_bytes() for path in sorted(bucket.rglob("*")) if path.is_file()} == before
    assert not (tmp_path / "new").exists()
    both = (*trusting, "--trust", keys / "stranger.pub", "--sign-with", keys / "stranger.pem")
    done = slackwater("publish", states[5], *run, *both, "--anchor")
    assert done.returncode == 0, done.stderr


def test_whoever_goes_on_unsigned_from_a_signed_version_is_warned(bucket: Path, states: list[Path]) -> None:
    run = ("--bucket", bucket, "--run", RUN)
    told = "run/4 is signed, and what follows won't be: readers with --trust will refuse it (add --sign-with KEY)"
    first = slackwater("publish", states[5], *run)
    assert (first.returncode, told in first.stderr) == (0, True)
    second = slackwater("publish", states[4], *run)
    assert (second.returncode, "is signed" in second.stderr) == (0, False)


def test_an_unsigned_run_costs_one_request_to_be_told_from_a_signed_one(
    published: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watched = FaultyBucket(MemoryBucket())
    warn_of_unsigned(watched, RUN)
    assert [watched.count(verb) for verb in ("list", "get", "get_range", "put", "put_if_absent")] == [1, 0, 0, 0, 0]
    refused = Fault(verb="list", key="/signatures", before=AuthError("refused"))
    warn_of_unsigned(FaultyBucket(LocalBucket(published), refused), RUN)
    assert caplog.text == ""
    warn_of_unsigned(LocalBucket(published), RUN)
    assert "run/4 is signed, and what follows won't be" in caplog.text


def test_verify_of_what_no_trusted_key_signed_ends_with_status_4(
    published: Path, states: list[Path], keys: Path, tmp_path: Path
) -> None:
    unsigned = tmp_path / "unsigned"
    publish_states(LocalBucket(unsigned, create=True), states[:3])
    for where, key in ((unsigned, "key.pub"), (published, "stranger.pub")):
        done = slackwater("verify", "run/2", "--bucket", where, "--trust", keys / key)
        assert (done.returncode, done.stderr) == (4, "")
        *found, verdict = done.stdout.splitlines()
        assert [line.partition(":")[0] for line in found] == ["manifest"] * 3
        assert verdict == "run/2: damaged: 3 manifest (whole: nothing)"


def test_a_fold_that_fails_leaves_the_version_committed(bucket: Path, states: list[Path], keys: Path) -> None:
    (bucket / "run/folds/00000004-00000006.json").write_text("{")
    for state in (states[5], states[4]):
        done = slackwater(
            "publish", state, "--bucket", bucket, "--run", RUN, "--sign-with", keys / "key.pem", "--fold-every", "2"
        )
    assert done.returncode == 0
    assert "the fold run/4..6 is left out" in done.stderr
    assert "made the fold" not in done.stdout
    assert read_manifest(LocalBucket(bucket), RUN, Version(6)).step == 0
    assert read_fold(LocalBucket(bucket), RUN, Version(0), LAST).version == LAST


def test_folds_of_a_run_that_is_damaged_meanwhile_cost_the_version_nothing(
    bucket: Path, states: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    published = publish_folder(states[5], str(bucket), RUN, step=5)
    (bucket / manifest_key(RUN, Version(1))).unlink()
    with Scratch() as scratch:
        work = Attended(scratch=scratch, tell=lambda _stage, _done, _total: None)
        assert fold_after(published, str(bucket), PublishSettings(), 5, work, is_told=True) == []
    assert "no fold is made after run/5: " in caplog.text
