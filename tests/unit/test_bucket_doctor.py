"""The report of `slackwater doctor`."""

import json
from pathlib import Path

import pytest

from slackwater.bucket.verdict import Mode, Outcome, Probe
from slackwater.cli.doctor import report
from slackwater.errors import InvalidInputError, NotFoundError, UnsupportedError


@pytest.fixture
def unlinkable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without hard links."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)


def test_a_table_names_every_probe_and_both_modes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report(str(tmp_path), mode=Mode.PUBLISH, as_json=False)
    shown = capsys.readouterr()
    assert all(probe in shown.out for probe in Probe)
    assert "read: yes\npublish: yes\n" in shown.out
    assert shown.err == ""


def test_json_is_one_line_with_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report(tmp_path.as_uri(), mode=Mode.PUBLISH, as_json=True)
    (line,) = capsys.readouterr().out.splitlines()
    said = json.loads(line)
    assert (said["url"], said["read"], said["publish"], said["left"]) == (tmp_path.as_uri(), True, True, None)
    assert [each["probe"] for each in said["probes"]] == list(Probe)
    assert {each["outcome"] for each in said["probes"]} <= set(Outcome)
    assert not any(each["stops"] for each in said["probes"])


@pytest.mark.usefixtures("unlinkable")
@pytest.mark.parametrize("as_json", [True, False])
def test_a_store_that_can_not_publish_is_refused_after_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, as_json: bool
) -> None:
    with pytest.raises(UnsupportedError, match="can't be used to publish"):
        report(str(tmp_path), mode=Mode.PUBLISH, as_json=as_json)
    shown = capsys.readouterr().out
    assert "hard links" in " ".join(shown.split())
    assert ('"publish": false' if as_json else "publish: no") in shown


@pytest.mark.usefixtures("unlinkable")
def test_such_a_store_may_still_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report(str(tmp_path), mode=Mode.READ, as_json=False)
    assert "read: yes\npublish: no\n" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "error"), [("absent", NotFoundError), ("ftp://host/x", InvalidInputError)])
def test_what_is_no_bucket_is_told_without_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, error: type[Exception]
) -> None:
    with pytest.raises(error):
        report(name if "://" in name else str(tmp_path / name), mode=Mode.READ, as_json=False)
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "absent").exists()
