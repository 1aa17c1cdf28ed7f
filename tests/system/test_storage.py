"""Folders at URLs: whole or not at all, whatever breaks; runs that go on on another machine."""

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

import malmoi
from malmoi.cli.app import run_command
from malmoi.errors import MalmoiError, UsageError
from malmoi.system import storage
from malmoi.system.storage import WorkingCopy, address, fetched, publish, remote_url, working_copy
from malmoi.text.rows import rows_of
from malmoi.training.signals import Stopped
from tiny_runs import assert_equal_weights, signalled, steps_of, train, write_corpus

URL = "memory://bucket/run"
WRITES = ("pipe_file", "put_file", "rm_file")


class Broken(ConnectionError):
    """What a connection says that is no more."""


class Connection:
    """To a store in memory; `fails` says for each write or read whether it does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails: Callable[[str, str], bool] = lambda operation, path: False
        self.done: list[str] = []
        for name in (*WRITES, "get_file"):
            monkeypatch.setattr(MemoryFileSystem, name, self._watched(name))

    def _watched(self, name: str) -> Any:
        original = getattr(MemoryFileSystem, name)

        def call(files: Any, *given: Any, **more: Any) -> Any:
            path = next(str(one) for one in given if "bucket" in str(one))
            if self.fails(name, path):
                raise Broken("the connection was reset")
            self.done.append(f"{name} {path}")
            return original(files, *given, **more)

        return call


@pytest.fixture
def connection(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Connection]:
    monkeypatch.setattr(storage, "FIRST_WAIT", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine"))
    MemoryFileSystem.store.clear()
    yield Connection(monkeypatch)
    MemoryFileSystem.store.clear()


def contents(folder: Path) -> dict[str, str]:
    names = storage._names(folder)
    return {name: (folder / name).read_text() for name in names}


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a machine that has nothing of it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("s3://bucket/run/", "s3://bucket/run"),
        (Path("s3://bucket/run"), "s3://bucket/run"),
        ("file:///tmp/run", "file:///tmp/run"),
        (Path("file:///tmp/run"), "file:///tmp/run"),
        ("runs/gpt", ""),
        (Path("c:/runs"), ""),
        ("builtin:sotu", ""),
        ("google-bert/bert-base-uncased", ""),
    ],
)
def test_urls_are_told_from_paths(given: str | Path, url: str) -> None:
    assert remote_url(given) == url


def test_what_is_written_is_there_under_its_own_name(connection: Connection) -> None:
    for text in ("one", "two", "three"):
        with working_copy(URL) as folder:
            write(folder, model=text, state__step=text)
        files = MemoryFileSystem()
        assert sorted(files.find("/bucket")) == [
            "/bucket/run/malmoi-files.json",
            "/bucket/run/model",
            "/bucket/run/state/step",
        ]
        assert files.cat_file("/bucket/run/model").decode() == text
        assert contents(fetched(URL)) == {"model": text, "state/step": text}
        assert address(folder / "model") == f"{URL}/model"


def test_a_reader_finds_the_old_state_or_the_new_one_wherever_an_upload_breaks(
    connection: Connection, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each write of an upload in turn is the last one that the store takes."""
    old = {"model": "old", "log": "1", "state/step-1": "s"}
    new = {"model": "new", "log": "12", "state/step-2": "t"}
    whole = 0
    for last in range(100):
        MemoryFileSystem.store.clear()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / str(last)))
        connection.fails = lambda operation, path: False
        with working_copy(URL) as folder:
            write(folder, model="old", log="1", **{"state__step-1": "s"})
        (folder / "state/step-1").unlink()
        write(folder, model="new", log="12", **{"state__step-2": "t"})
        copy = WorkingCopy(URL)
        copy.restore()
        connection.done.clear()
        connection.fails = lambda operation, path, last=last: (  # type: ignore[misc]
            operation in WRITES and len(connection.done) >= last
        )
        try:
            copy.upload()
            copy.upload(own_names=True)
        except (MalmoiError, Broken):
            pass
        finished = len(connection.done) < last
        read = contents(fetched(URL))
        assert read in (old, new)
        whole += read == new
        connection.fails = lambda operation, path: False
        with working_copy(URL):
            pass
        assert contents(fetched(URL)) == new
        if finished:
            break
    assert last > 8
    assert 0 < whole <= last


def test_a_write_is_tried_again(connection: Connection, caplog: pytest.LogCaptureFixture) -> None:
    faults = ["once", "twice"]
    connection.fails = lambda operation, path: (
        path.endswith("model") and bool(faults and faults.pop())
    )
    with caplog.at_level("INFO"), working_copy(URL) as folder:
        write(folder, model="one")
    assert caplog.text.count("the connection was reset; trying again") == 2
    assert contents(fetched(URL)) == {"model": "one"}


def test_a_store_that_fails_leaves_the_work_on_the_disk(
    connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:

    def work() -> None:
        with working_copy(URL) as folder:
            connection.fails = lambda operation, path: operation in WRITES
            write(folder, model="one")
            publish(folder)

    with pytest.raises(MalmoiError, match=r"is complete, but memory://bucket/run could not be"):
        work()
    assert "The work goes on in" in caplog.text
    connection.fails = lambda operation, path: False
    with working_copy(URL) as again:  # the same command
        assert contents(again) == {"model": "one"}
    assert contents(fetched(URL)) == {"model": "one"}


def test_a_store_that_cannot_be_written_is_refused_before_the_work(connection: Connection) -> None:
    connection.fails = lambda operation, path: operation in WRITES
    refused = pytest.raises(MalmoiError, match="could not be transferred: the connection was reset")
    with refused, working_copy(URL):
        pytest.fail("the work has begun")


def test_two_machines_do_not_write_at_once(
    connection: Connection, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:

    def both() -> None:
        with working_copy(URL) as folder:
            write(folder, model="one")
            with monkeypatch.context() as other:
                elsewhere(other, tmp_path)
                with working_copy(URL) as second:
                    write(second, model="two")

    with pytest.raises(MalmoiError, match="let one machine at a time write"):
        both()
    with working_copy(URL) as folder:  # what is at the URL goes on
        assert contents(folder) == {"model": "two"}


def test_what_is_gone_at_the_url_is_gone_here(connection: Connection) -> None:
    with working_copy(URL) as folder:
        write(folder, model="one", state__step="1")
    MemoryFileSystem().rm("/bucket", recursive=True)
    with working_copy(URL) as folder:
        assert not list(folder.rglob("*"))


def test_a_list_cannot_name_files_outside_its_folder(connection: Connection) -> None:
    files = MemoryFileSystem()
    for name in ("../../x", "/etc/x"):
        files.pipe_file(
            "/bucket/run/malmoi-files.json", f'{{"files": {{"{name}": ["a", 1, 2]}}}}'.encode()
        )
        with pytest.raises(MalmoiError, match="damaged"):
            fetched(URL)


def test_a_table_is_read_from_a_url(connection: Connection) -> None:
    files = MemoryFileSystem()
    for text in ("fine", "good"):
        files.pipe_file("/bucket/rows.csv", f"text,label\n{text},1\n".encode())
        (row,) = rows_of("memory://bucket/rows.csv")
        assert (row["text"], Path(row.place).name) == (text, "rows.csv:2")
    with pytest.raises(MalmoiError, match=r"There is no file or folder memory://bucket/none\.csv"):
        next(rows_of("memory://bucket/none.csv"))


def test_a_run_goes_on_elsewhere_to_the_same_bits(
    connection: Connection, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    corpus = write_corpus(tmp_path / "text.txt")
    settings = {"steps": 8, "train.save_every": 2}
    train("gpt", corpus, tmp_path / "undisturbed", **settings)
    with signalled(step=5), pytest.raises(Stopped):
        train("gpt", corpus, Path(URL), **settings)
    elsewhere(monkeypatch, tmp_path)
    model = train("gpt", corpus, Path(URL), **settings)
    assert steps_of(Path(model.checkpoint.source)) == list(range(1, 9))
    assert_equal_weights(fetched(URL), tmp_path / "undisturbed")
    prompt = "the state"
    assert malmoi.load(URL).score(prompt, " of") == model.score(prompt, " of")


def test_commands_take_urls(
    connection: Connection, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "".join(f"a {word} film {n},{word}\n" for n in range(20) for word in ("good", "bad"))
    MemoryFileSystem().pipe_file("/bucket/rows.csv", f"text,label\n{rows}".encode())
    given = ["--steps", "2", "--device", "cpu", "-m", "malmoi-bert", "-o", "memory://bucket/tuned"]
    assert run_command(["finetune", "memory://bucket/rows.csv", *given]) == 0
    assert "memory://bucket/tuned" in capsys.readouterr().out
    said = ["-m", "memory://bucket/tuned", "-o", "memory://bucket/said.csv", "--device", "cpu"]
    assert run_command(["predict", "memory://bucket/rows.csv", *said]) == 0
    assert capsys.readouterr().out.strip() == "memory://bucket/said.csv: 40 rows"
    assert len(list(rows_of("memory://bucket/said.csv"))) == 40


def test_an_s3_server_keeps_a_run(
    object_store: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine"))
    corpus = write_corpus(tmp_path / "text.txt")
    settings = {"steps": 4, "train.save_every": 2}
    with pytest.raises(MalmoiError, match="bucket does not exist"):
        train("gpt", corpus, Path("s3://bucket/run"), **settings)
    object_store.mkdir("bucket")
    with signalled(step=3), pytest.raises(Stopped):
        train("gpt", corpus, Path("s3://bucket/run"), **settings)
    elsewhere(monkeypatch, tmp_path)
    train("gpt", corpus, Path("s3://bucket/run"), **settings)
    train("gpt", corpus, tmp_path / "undisturbed", **settings)
    assert_equal_weights(fetched("s3://bucket/run"), tmp_path / "undisturbed")


def test_a_slow_server_that_throttles_and_loses_answers_keeps_a_run(
    object_store: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of every five requests one is throttled, and one is done but answered with an error."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication as Server

    object_store.mkdir("depot")
    willing = Server.__call__
    faults = itertools.count(1)

    def unwilling(server: Any, environ: Any, start: Any) -> Any:
        number = next(faults)
        time.sleep(0.02)
        if number % 5 == 2:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start("503 Slow Down", [("Content-Length", "0")])
            return [b""]
        answer = willing(server, environ, start if number % 5 != 4 else lambda *given: None)
        if number % 5 != 4:
            return answer
        list(answer)
        start("500 Internal Server Error", [("Content-Length", "0")])
        return [b""]

    monkeypatch.setattr(Server, "__call__", unwilling)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine"))
    corpus = write_corpus(tmp_path / "text.txt")
    settings = {"steps": 4, "train.save_every": 2}
    with signalled(step=3), pytest.raises(Stopped):
        train("gpt", corpus, Path("s3://depot/run"), **settings)
    elsewhere(monkeypatch, tmp_path)
    train("gpt", corpus, Path("s3://depot/run"), **settings)
    train("gpt", corpus, tmp_path / "undisturbed", **settings)
    assert_equal_weights(fetched("s3://depot/run"), tmp_path / "undisturbed")
    assert next(faults) > 50


def test_python_writes_models_and_corpora_to_urls(tmp_path: Path) -> None:
    base = f"file://{tmp_path}"
    malmoi.load("malmoi-bert", device="cpu").save(f"{base}/bert")
    [filled] = malmoi.load(f"{base}/bert", device="cpu").fill("I [MASK] you.", top=1)
    [expected] = malmoi.load("malmoi-bert", device="cpu").fill("I [MASK] you.", top=1)
    assert filled.token == expected.token
    malmoi.build_corpus(str(write_corpus(tmp_path / "text.txt")), f"{base}/corpus", min_words=1)
    assert (tmp_path / "corpus" / "corpus.json").is_file()
    malmoi.train_tokenizer(tmp_path / "text.txt", f"{base}/words", kind="char", vocab=60)
    with pytest.raises(UsageError, match="already exists"):
        malmoi.train_tokenizer(tmp_path / "text.txt", f"{base}/words", kind="char", vocab=60)
    assert not Path("file:").exists()
