"""Lesson 1: the loop, the errors of a provider, the person at a terminal or behind a pipe. R…: a reported failure."""

import json
import os
import socket
import subprocess
import sys
import threading

import pytest
from conftest import CODE, call, pipe, repl, run_turn

KEY = "sk-the-secret-key-of-this-person"
NO_RETRY = {"x-should-retry": "false"}  # the SDK would repeat a 500 after a pause
FELL_OVER = {"status": 500, "content": "the provider fell over", "headers": NO_RETRY}
READ_NOTES = call("read_file", {"path": "notes.txt"})


@pytest.fixture
def notes(workspace):
    (workspace / "notes.txt").write_text("buy milk\n")


def read_several(*paths):
    return {"tool_calls": [{"name": "read_file", "arguments": {"path": path}} for path in paths]}


def results(messages):
    return [message["content"] for message in messages if message["role"] == "tool"]


def requests_of_user(messages):
    return [message["content"] for message in messages if message["role"] == "user"]


def run(command, **options):
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=20, **options)


# --- The loop ---


def test_loop_hands_the_result_back_until_the_model_answers(serve, notes):
    server = serve(READ_NOTES, "It says: buy milk")
    turn = run_turn("what is in notes.txt?")
    assert turn.answer == "It says: buy milk"
    assert [message["role"] for message in turn.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert "buy milk" in server.requests[1]["messages"][-1]["content"]


def test_person_sees_the_call_its_result_and_the_answer(serve, notes):
    serve(call("read_file", {"path": "notes.txt"}, content="I look."), "All done.")
    screen = run_turn("what is in notes.txt?").screen
    places = [screen.index(part) for part in ("I look.", "read_file", "buy milk", "All done.")]
    assert places == sorted(places)


def test_every_request_offers_the_tools_and_repeats_the_conversation(serve, notes):
    server = serve(READ_NOTES, "done")
    messages = run_turn("look").messages
    first, second = server.requests
    assert first["tools"] == second["tools"] and "read_file" in json.dumps(first["tools"])
    assert second["messages"][: len(first["messages"])] == first["messages"]
    assert messages[:-1] == second["messages"]


def test_history_is_plain_json_with_the_fields_every_provider_takes_back(serve, notes):
    extras = {"reasoning_content": "hm", "refusal": None, "annotations": [], "audio": None, "function_call": None}
    serve({**READ_NOTES, "message": extras}, {"content": "done", "message": extras})
    messages = run_turn("look").messages
    assert json.loads(json.dumps(messages)) == messages
    assert all(set(message) <= {"role", "content", "tool_calls", "tool_call_id"} for message in messages)


def test_history_grows_from_turn_to_turn(serve):
    server = serve("one", "two")
    run_turn("second", run_turn("first").messages)
    said = [message["content"] for message in server.requests[1]["messages"][1:]]
    assert said == ["first", "one", "second"]


def test_all_calls_of_one_reply_run_in_order_each_with_its_own_result(serve, workspace):  # R035
    for name in ("a", "b", "c"):
        (workspace / name).write_text(f"text of {name}\n")
    server = serve(read_several("b", "a", "c"), "done")
    run_turn("read all")
    asked, *answered = server.requests[1]["messages"][-4:]
    assert [message["tool_call_id"] for message in answered] == [made["id"] for made in asked["tool_calls"]]
    assert ["text of " + name in text for name, text in zip("bac", results(answered), strict=True)] == [True] * 3


# --- What goes wrong in a step is text for the model ---


@pytest.mark.parametrize(
    "name, arguments, told",
    [
        ("search_web", {"query": "x"}, "read_file"),  # R022: the answer names the tools that exist
        ("Read_File", {"path": "notes.txt"}, "read_file"),
        ("read_file", {"path": "missing.txt"}, "missing.txt"),
        ("read_file", {"path": "."}, "Error"),  # a folder
        ("read_file", {"file": "notes.txt"}, "file"),
        ("read_file", "{}", "path"),
        ("read_file", '{"path": "notes', "Error"),  # R001
        ("read_file", "[]", "Error"),  # R005
        ("read_file", "", "Error"),  # R003
    ],
)
def test_failed_call_is_told_to_the_model_and_the_loop_goes_on(serve, notes, name, arguments, told):
    server = serve(call(name, arguments), READ_NOTES, "done", strict=False)  # lesson 2 makes the history strict
    turn = run_turn("look")
    failed, good = results(server.requests[2]["messages"])
    assert told in failed and "buy milk" not in failed
    assert "buy milk" in good and turn.answer == "done"


def test_failed_call_does_not_stop_the_others_of_its_reply(serve, notes):  # R039
    server = serve(read_several(".", "notes.txt"), "done")
    assert run_turn("look").answer == "done"
    failed, good = results(server.requests[1]["messages"])
    assert failed.startswith("Error") and "buy milk" in good


@pytest.mark.parametrize(
    "reply",
    [
        {"content": None},
        {"content": ""},
        {"content": "\n\n \t"},  # R045, and seen of a small local model
        {"content": "fine", "message": {"tool_calls": []}},  # some servers send the empty list in every answer
        {"content": None, "message": {"tool_calls": None}},
    ],
)
def test_reply_without_text_or_with_an_empty_list_of_calls_can_be_sent_back(serve, reply):  # R050
    server = serve(reply, "second")
    turn = run_turn("hi")
    assert turn.screen.strip()
    assert run_turn("again", turn.messages).answer == "second"
    assert server.refusals == []


def test_empty_text_beside_calls_never_enters_the_history(serve, notes):
    server = serve({**READ_NOTES, "content": ""}, "done")
    turn = run_turn("look")
    assert turn.answer == "done" and server.refusals == []
    assert "" not in [message.get("content") for message in turn.messages]


@pytest.mark.parametrize("role", ["model", None, ""])
def test_a_reply_under_another_role_is_the_assistants(serve, role):
    server = serve({"message": {"role": role, "content": "hello"}}, "second")
    turn = run_turn("hi")
    assert turn.messages[-1] == {"role": "assistant", "content": "hello"}
    assert run_turn("again", turn.messages).answer == "second" and server.refusals == []


def test_step_limit_says_so_and_leaves_a_history_that_can_be_sent(serve, notes):
    server = serve(READ_NOTES, READ_NOTES, READ_NOTES, "went on")
    done = pipe("loop\ngo on\n", NAMI_MAX_STEPS="3")
    assert (done.code, done.err, server.refusals) == (0, "", [])
    assert "3 steps" in done.out.split("went on")[0]
    assert len(results(server.requests[3]["messages"])) == 3


# --- Errors of the provider: one line with its reason, the conversation goes on ---


@pytest.mark.parametrize(
    "status, body, reason",
    [
        (404, {"error": {"message": "The model `gpt-9` does not exist", "code": None}}, "`gpt-9` does not exist"),
        (400, {"error": {"message": "tiny:1b does not support tools"}}, "tiny:1b does not support tools"),  # R033
        (403, {"message": "quota used up"}, "quota used up"),
        (401, "", "401"),
        (402, {"error": {"message": "余额不足 [bold]"}}, "余额不足 [bold]"),  # brackets are not our markup
    ],
)
def test_error_of_the_provider_is_one_line_with_its_reason(serve, status, body, reason):
    server = serve({"status": status, "body": body, "headers": NO_RETRY}, "fine")
    turn = run_turn("hi")
    (line,) = turn.screen.strip().splitlines()
    assert reason in line and str(status) in line
    assert run_turn("again", turn.messages).answer == "fine"
    assert requests_of_user(server.requests[1]["messages"]) == ["hi", "again"] and server.refusals == []  # R050


def test_error_in_step_three_keeps_the_steps_before_it(serve, notes):  # R159
    server = serve(READ_NOTES, call("read_file", {"path": "missing.txt"}), FELL_OVER, "went on")
    turn = run_turn("look")
    assert turn.answer is None and "the provider fell over" in turn.screen
    assert run_turn("go on", turn.messages).answer == "went on"
    kept = server.requests[3]["messages"]
    assert ["buy milk" in text for text in results(kept)] == [True, False]
    assert requests_of_user(kept) == ["look", "go on"] and server.refusals == []


def test_refused_key_is_one_line_without_the_key_and_the_prompt_comes_back(serve, monkeypatch):
    serve({"status": 401, "content": f"Incorrect API key provided: {KEY}."}, "fine")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    done = repl("hi\nagain\n")
    assert (done.code, done.err) == (0, "")
    assert "Incorrect API key" in done.out and KEY not in done.out
    assert "fine" in done.out and done.out.count("> ") == 3


def test_unreachable_server_is_one_line_with_its_address(serve):
    import openai

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening: nobody else gets this port
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        turn = run_turn("hi", client=openai.OpenAI(base_url=url, api_key="none", max_retries=0))
    (line,) = turn.screen.strip().splitlines()
    assert url in line and "refused" in line
    server = serve("fine")
    assert run_turn("again", turn.messages).answer == "fine" and server.refusals == []


def test_server_that_hangs_up_is_one_line(serve):
    import openai

    server = serve({"drop": True}, "fine")
    turn = run_turn("hi", client=openai.OpenAI(base_url=server.url, api_key="none", max_retries=0))
    (line,) = turn.screen.strip().splitlines()
    assert "onnect" in line
    assert run_turn("again", turn.messages).answer == "fine" and server.refusals == []


# --- Which server answers ---


def test_without_key_and_server_the_practice_model_answers_and_says_so_in_one_line(workspace):
    (workspace / "notes.txt").write_text("buy milk\n")
    done = repl("read notes.txt\n")
    assert (done.code, done.err) == (0, "")
    said = [line for line in done.out.splitlines() if "practice model" in line]
    assert len(said) == 1 and "OPENAI_API_KEY" in said[0] and done.out.startswith(said[0])
    assert "begins: buy milk" in done.out


def test_loopback_server_needs_no_key_and_gets_no_other_one(serve, monkeypatch):
    monkeypatch.setenv("DEEPSEEK_API_KEY", KEY)
    server = serve("hello")
    assert run_turn("hi").answer == "hello"
    assert server.authorizations[0].startswith("Bearer ") and KEY not in server.authorizations[0]


def test_key_and_model_of_the_person_are_sent(serve, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", f" {KEY}\n")  # as it is pasted, or read from a file
    server = serve("hello")
    run_turn("hi")
    assert server.authorizations == [f"Bearer {KEY}"]
    assert server.requests[0]["model"]


# --- The person ---


def test_ctrl_c_cancels_the_turn_however_often_it_is_pressed(serve, terminal):  # R128, R036
    held = {"wait": threading.Event()}
    server = serve(held, held, "the last answer")
    person = terminal()
    person.expect("> ")
    for presses in (1, 2):
        person.type(f"question {presses}")
        while len(server.requests) < presses:
            assert person.read(0.05), person.screen
        os.write(person.fd, b"\x03" * presses)
        person.expect("Stopped")
        person.expect("> ")
    person.type("the last question")
    person.expect("the last answer")
    person.expect("> ")
    person.press("D")
    assert person.exit_code() == 0
    assert requests_of_user(server.requests[2]["messages"]) == ["question 1", "question 2", "the last question"]
    assert server.refusals == []


def test_ctrl_c_at_the_prompt_drops_the_line_and_says_how_to_leave(serve, terminal):  # R128
    server = serve("not asked")
    person = terminal()
    person.expect("> ")
    os.write(person.fd, b"half a line")
    person.expect("half a line")
    person.read(0.2)  # Python misses a Ctrl-C that comes just before it begins to wait for the keyboard
    person.press("C")
    assert "Ctrl-D" in person.expect("> ")
    person.type("exit")
    assert person.exit_code() == 0
    assert server.requests == []


@pytest.mark.parametrize("text", ["", "exit\n", "quit\n", " exit \n", "\n   \n"])
def test_leaving_is_clean_and_needs_no_model(serve, text):  # R130
    server = serve("not asked")
    done = repl(text)
    assert (done.code, done.err, server.requests) == (0, "", [])
    assert [line for line in done.out.splitlines() if line.strip("> ") and server.url not in line] == []


def test_piped_characters_and_answers_that_the_encoding_lacks_are_replaced(serve):  # R130: and no line end
    server = serve("你好")
    done = pipe(b"half \xe5\x93 a character", PYTHONIOENCODING="ascii")
    assert (done.code, done.err) == (0, "") and "??" in done.out
    assert requests_of_user(server.requests[0]["messages"]) == ["half \ufffd\ufffd a character"]


# --- Importing ---

WATCH = """
import sys
def watch(event, details):
    if event.startswith(("socket.", "subprocess.", "os.mkdir", "os.system")):
        print("importing caused", event, details)
sys.addaudithook(watch)
sys.path.insert(0, sys.argv[1])
__import__(sys.argv[2])
print(*{"openai", "sqlite3", "http"} & set(sys.modules))
"""


@pytest.mark.parametrize("module", sorted(path.stem for path in CODE.glob("*.py")))
def test_importing_a_module_does_nothing(tmp_path, module):
    home = tmp_path / "empty home"
    home.mkdir()
    done = run([sys.executable, "-B", "-c", WATCH, CODE, module], cwd=home, env={"HOME": str(home)})
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")
    assert list(home.iterdir()) == []


def test_first_prompt_does_not_wait_for_openai(serve, tmp_path):
    server = serve("not asked")
    (tmp_path / "openai.py").write_text("raise SystemExit('openai was imported before the first prompt')\n")
    done = pipe("", PYTHONPATH=str(tmp_path))
    assert (done.code, done.err) == (0, "")
    assert [line.strip() for line in done.out.splitlines() if server.url not in line] == [">"]
