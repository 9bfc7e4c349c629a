"""Attaching to servers that run already, once they serve the target."""

import contextlib

import pytest

from scripts.lib.chat.template import ChatTemplate
from scripts.lib.ground.errors import StageError
from scripts.lib.serving.health import PROBE, request
from scripts.lib.serving.launch import free_port, launch
from scripts.lib.serving.process import ServerProcess
from scripts.lib.serving.server import server, wait_healthy
from scripts.lib.serving.settings import ServerSettings
from tests.serving_parts import PATIENCE_SECONDS, crash, eventually, with_environment

pytest_plugins = ["tests.serving_fixtures"]


@pytest.fixture
def elsewhere(settings, target, tmp_path):
    """Gives a function that runs somebody else's server, which shows what the stub's options say, and returns its URL."""
    with contextlib.ExitStack() as stack:

        def run(name="other", **options):
            port = free_port("127.0.0.1")
            stub = with_environment(settings, **{"STUB_MODEL": "/models/other", "STUB_PIDS": str(tmp_path / name), **options})
            process = ServerProcess(launch(stub, target, port), tmp_path / f"{name}.log")
            stack.callback(process.end)
            wait_healthy(f"http://127.0.0.1:{port}", PATIENCE_SECONDS)
            return f"http://127.0.0.1:{port}"

        yield run


def probe_count(target):
    """What the stub must answer to look like the target's tokenizer."""
    return ",".join(map(str, ChatTemplate.load(target).tokenize(PROBE)))


def test_attaching_starts_and_ends_nothing(elsewhere, settings, target, tmp_path):
    urls = [elsewhere("one", STUB_MODEL=str(target.resolve())), elsewhere("two", STUB_MODEL=str(target.resolve()))]
    before = (tmp_path / "starts").read_text()
    with server(ServerSettings(urls=[f"{urls[0]}/", urls[1]]), target, tmp_path / "server.log") as running:
        assert running.urls == tuple(urls)
        running.check()
    assert (tmp_path / "starts").read_text() == before
    assert request(f"{urls[0]}/health") == {}
    assert not (tmp_path / "server.log").exists()


def test_a_server_with_another_tokenizer_is_refused(elsewhere, target, tmp_path):
    url = elsewhere(STUB_TOKENS="1,2,3")
    with (
        pytest.raises(StageError, match=r"serves /models/other, whose tokenizer gives other ids than the target's; .*--model-path"),
        server(ServerSettings(urls=[url]), target, tmp_path / "server.log"),
    ):
        pass


def test_a_server_of_another_architecture_is_refused(elsewhere, target, tmp_path):
    url = elsewhere(STUB_TYPE="qwen3")
    with (
        pytest.raises(StageError, match=r"serves /models/other of type qwen3, the target's is llama"),
        server(ServerSettings(urls=[url]), target, tmp_path / "server.log"),
    ):
        pass


def test_the_same_model_under_another_path_is_taken_and_said(elsewhere, target, tmp_path, caplog):
    url = elsewhere(STUB_TOKENS=probe_count(target))
    with server(ServerSettings(urls=[url]), target, tmp_path / "server.log") as running:
        assert running.version == "0.5.17"
    assert "type and tokenizer are those of the target" in caplog.text and "weights cannot be compared" in caplog.text


def test_a_server_that_does_not_tokenise_is_taken_by_its_type_and_that_is_said(elsewhere, target, tmp_path, caplog):
    url = elsewhere(STUB_TOKENS="none")
    with server(ServerSettings(urls=[url]), target, tmp_path / "server.log") as running:
        assert running.version == "0.5.17"
    assert "its type is that of the target" in caplog.text


def test_an_untried_version_is_said(elsewhere, target, tmp_path, caplog):
    url = elsewhere(STUB_MODEL=str(target.resolve()), STUB_VERSION="0.6.0")
    with server(ServerSettings(urls=[url]), target, tmp_path / "server.log") as running:
        assert running.version == "0.6.0"
    assert "SGLang 0.6.0 found; aerie was tried with 0.5.17 on an H200, 0.5.23 on a CPU" in caplog.text


def test_a_server_that_is_not_sglang_has_no_version(elsewhere, target, tmp_path, caplog):
    url = elsewhere(STUB_OPENAI="1")
    with server(ServerSettings(urls=[url]), target, tmp_path / "server.log") as running:
        assert running.version == ""
    assert "not SGLang, so nothing shows that its model /models/other is the target" in caplog.text


def test_an_attached_server_that_stays_away_is_gone_for_good(elsewhere, target, tmp_path):
    url = elsewhere(STUB_MODEL=str(target.resolve()))
    with server(ServerSettings(urls=[url], start_timeout=0.2), target, tmp_path / "server.log") as running:
        crash(url)
        running.check()
        with pytest.raises(StageError, match=rf"{url}: not healthy for 0 s"):
            eventually(running.check)


def test_attaching_to_nothing_is_an_error_that_names_the_url(target, tmp_path):
    url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    with (
        pytest.raises(StageError, match=rf"{url}: not healthy within 0 s; start that server or correct runtime.server.urls"),
        server(ServerSettings(urls=[url], start_timeout=0.0), target, tmp_path / "server.log"),
    ):
        pass
