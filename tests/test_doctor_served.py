"""The doctor asks a running server what it runs, how it reads text, and whether drafts are accepted."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from scripts.lib.chat.messages import from_rows
from scripts.lib.chat.template import ChatTemplate
from scripts.lib.doctor.command import Case, examine
from scripts.lib.doctor.served import after_start, canary, ceiling_of
from scripts.lib.ground.errors import StageError
from tests.broken_drafters import Run, tiny_run

REPORT = {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}


class Server:
    """A stand-in for SGLang that serves `template`; `report` and the figures of each answer can be changed."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.report: dict[str, object] = dict(REPORT)
        self.answer: dict[str, object] = {"completion_tokens": 48, "spec_verify_ct": 20}
        self.asked: list[dict] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.reply(200, outer.report)

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append(body)
                if "input_ids" in body:
                    self.reply(200, {"meta_info": outer.answer})
                elif "messages" in body:
                    self.reply(*outer.rendered(body["messages"]))
                else:
                    self.reply(*outer.tokenised(body["prompt"]))

            def reply(self, status, value):
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(value).encode())

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=[0.01], daemon=True).start()

    def tokenised(self, text):
        return 200, {"tokens": self.template.tokenize(text)}

    def rendered(self, messages):
        rows = [{"reasoning_content": None, "tool_calls": None, **message} for message in messages]
        return 200, {"tokens": self.template.prompt_ids(from_rows(rows))}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return tiny_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def served(run):
    server = Server(ChatTemplate.load(run.target))
    server.report["speculative_draft_model_path"] = str(run.drafter)
    yield server
    server.http.shutdown()


def names(found):
    return [(finding.name, finding.fatal) for finding in found]


def look(served, run):
    return after_start(served.url, run.target, run.drafter, "EAGLE3", run.flags)


def test_a_server_as_meant_has_no_finding(served, run):
    assert look(served, run) == []
    assert ceiling_of(served.url) == 4


@pytest.mark.parametrize(
    ("report", "name"),
    [
        ({"speculative_algorithm": "EAGLE"}, "server_differs"),
        ({"speculative_algorithm": None}, "no_speculation"),
        ({"speculative_draft_model_path": "/models/other"}, "drafter_differs"),
        ({"speculative_num_draft_tokens": 8}, "steps_rewritten"),
    ],
)
def test_a_server_that_runs_something_else_is_named(served, run, report, name):
    served.report |= report
    assert names(look(served, run)) == [(name, True)]


@pytest.mark.parametrize(
    ("report", "noted"),
    [
        ({"version": "0.5.17", "attention_backend": "fa3"}, True),
        ({"version": "0.5.17", "attention_backend": "triton"}, False),
        ({"version": "0.5.17", "attention_backend": "fa3", "speculative_draft_attention_backend": "triton"}, False),
        ({"version": "0.5.17", "attention_backend": "fa3", "disable_cuda_graph": True}, False),
        ({"version": "0.5.23", "attention_backend": "fa3"}, False),
    ],
)
def test_a_drafter_whose_extension_has_no_cuda_graph_is_noted(served, run, report, noted):
    served.report |= report
    assert names(look(served, run)) == ([("extension_eager", False)] if noted else [])


def test_a_baseline_that_speculates_is_named(served, run):
    assert names(after_start(served.url, run.target, None, None)) == [("server_differs", True)]


def test_a_server_with_another_tokenizer_is_named(served, run):
    served.template = type("Shifted", (), {"tokenize": lambda _, text: [1, 2, 3]})()
    assert names(look(served, run)) == [("tokenizer_differs", True)]


def test_a_server_with_another_template_is_named_with_both_texts(served, run):
    changed = ChatTemplate.load(run.target)
    changed.tokenizer.chat_template = changed.tokenizer.chat_template.replace("You help.", "Be kind.")
    served.template = changed
    (found,) = look(served, run)
    assert (found.name, found.fatal) == ("template_differs", True)
    assert "Be kind." in found.evidence
    assert "You help." in found.evidence


def test_a_server_that_does_not_tokenise_is_noted(served, run):
    """As SGLang 0.5.17 where the tokenizer's `model_max_length` is not set: 1e30 is no JSON to it."""
    served.tokenised = lambda text: (500, {"object": "error", "message": "Integer exceeds 64-bit range"})
    (found,) = look(served, run)
    assert (found.name, found.fatal) == ("server_silent", False)
    assert "does not tokenise: its tokenizer and chat template are not compared" in found.evidence


def test_a_server_that_renders_nothing_is_noted(served, run):
    served.rendered = lambda messages: (400, {"message": "Invalid prompt type"})
    assert names(look(served, run)) == [("server_silent", False)]


def test_the_canary_takes_a_drafter_that_works(served):
    assert canary(served.url, [[1, 2], [3, 4]], 4) == []  # 94 tokens in 40 verify steps
    assert [body["input_ids"] for body in served.asked] == [[1, 2], [3, 4]]
    assert served.asked[0]["sampling_params"]["temperature"] == 0.0


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        ({"completion_tokens": 48, "spec_verify_ct": 46}, "accept_near_one"),  # SGLang's own figure says 1.043: it counts prefill's token
        ({"completion_tokens": 48, "spec_verify_ct": 10}, "accept_impossible"),
        ({"completion_tokens": 48}, "no_speculation"),
    ],
)
def test_the_canary_stops_what_would_only_measure_a_misconfiguration(served, answer, name):
    served.answer = answer
    assert names(canary(served.url, [[1, 2]], 4)) == [(name, True)]


def test_drafts_from_the_text_itself_may_find_nothing(served):
    served.report["speculative_algorithm"] = "NGRAM"
    served.answer = {"completion_tokens": 48, "spec_verify_ct": 47}
    assert names(canary(served.url, [[1, 2]], 12)) == [("accept_near_one", False)]
    served.report["speculative_num_draft_tokens"] = 12
    assert ceiling_of(served.url) == 12


def test_answers_of_one_token_have_no_verify_step_and_say_nothing(served):
    served.answer = {"completion_tokens": 1}
    assert names(canary(served.url, [[1, 2]], 4)) == [("no_speculation", False)]


def test_no_server_is_an_error():
    with pytest.raises(StageError, match="does not say what it runs"):
        after_start("http://127.0.0.1:9", Path("target"), None, None)
    with pytest.raises(StageError, match="the canary got no answer"):
        canary("http://127.0.0.1:9", [[1]], 4)


def test_the_command_asks_a_server_after_the_files(served, run):
    served.answer = {"completion_tokens": 48, "spec_verify_ct": 47}
    case = Case(run.target, run.drafter, "EAGLE3", run.flags, url=served.url)
    assert names(examine(case)) == [("accept_near_one", True)]
    asked = len(served.asked)
    assert names(examine(Case(run.target, run.drafter, "EAGLE3", run.with_flag("speculative-algorithm", "EAGLE").flags, url=served.url)))
    assert len(served.asked) == asked
