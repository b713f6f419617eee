"""The practice model: strict checks, scripted replies over real HTTP, and the rules."""

import copy
import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import openai
import pytest

LESSONS = Path(__file__).resolve().parents[1] / "lessons"
sys.path.append(str(LESSONS))
import practice_server as practice  # noqa: E402


def tool(name, *required, **optional):
    properties = {key: {"type": "string"} for key in required} | {key: {"type": kind} for key, kind in optional.items()}
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}


TOOLS = [
    tool("list_files", path="string"),
    tool("read_file", "path", offset="integer", limit="integer"),
    tool("run_shell", "command"),
    tool("write_file", "path", "content"),
    tool("edit_file", "path", "old", "new"),
    tool("compact", focus="string"),
    tool("delegate", "task"),
]
SYSTEM = {"role": "system", "content": "Be brief."}


def user(text):
    return {"role": "user", "content": text}


def calls(*ids, name="read_file", arguments='{"path": "a.txt"}'):
    made = [{"id": i, "type": "function", "function": {"name": name, "arguments": arguments}} for i in ids]
    return {"role": "assistant", "tool_calls": made}


def result(identifier, text="ok"):
    return {"role": "tool", "tool_call_id": identifier, "content": text}


GROUP = [calls("c1", "c2"), result("c1"), result("c2")]


@pytest.fixture(scope="module")
def shared():
    with practice.start() as server:
        yield server


def client(server):
    return openai.OpenAI(base_url=server.url, api_key="k", max_retries=0, timeout=5)


def ask(server, *messages, **options):
    return client(server).chat.completions.create(model="any", messages=list(messages) or [user("hello")], **options)


def post(server, body, path="/v1/chat/completions", connection=None):
    connection = connection or http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=5)
    connection.request("POST", path, body if isinstance(body, bytes) else json.dumps(body))
    reply = connection.getresponse()
    return reply.status, json.loads(reply.read())


# --- strict checks ---


@pytest.mark.parametrize(
    "messages",
    [
        [user("a")],
        [SYSTEM, user("a")],
        [SYSTEM, user("a"), {"role": "assistant", "content": "b"}, user("c")],
        [SYSTEM, user("a"), *GROUP],
        [SYSTEM, user("a"), *GROUP, calls("c3") | {"content": "so"}, result("c3", "")],
        [SYSTEM, user("a"), *GROUP, {"role": "assistant", "content": "b"}, user("c")],
        [SYSTEM, user("a"), calls("c1") | {"content": None}, result("c1")],
    ],
)
def test_valid_requests_pass(messages):
    practice.check_request({"model": "m", "messages": messages, "tools": TOOLS})


ASSISTANT = {"role": "assistant", "content": "b"}
REFUSED = [
    ([], "non-empty list"),
    (["x"], "role must be"),
    ([{"role": "developer", "content": "x"}], "role must be"),
    ([{"role": ["user"], "content": "x"}], "role must be"),
    ([user("a"), ASSISTANT, SYSTEM, user("b")], "only the first"),
    ([SYSTEM, SYSTEM, user("a")], "only the first"),
    ([user([{"type": "text", "text": "a"}])], "must be a string"),
    ([user("")], "must not be empty"),
    ([user(None)], "must be a string"),
    ([user("a") | {"name": "x"}], "unknown key"),
    ([user("a"), ASSISTANT | {"refusal": None}, user("b")], "unknown key"),
    ([user("a"), ASSISTANT | {"reasoning_content": "x"}, user("b")], "unknown key"),
    ([user("a"), {"role": "assistant", "content": ""}, user("b")], "non-empty string"),
    ([user("a"), {"role": "assistant", "content": None}, user("b")], "non-empty string"),
    ([user("a"), calls("c1") | {"content": ""}, result("c1")], "non-empty string"),
    ([user("a"), ASSISTANT | {"tool_calls": []}, user("b")], "'tool_calls' is empty"),
    ([user("a"), calls("c1"), result("c1", 3)], "must be a string"),
    ([user("a"), calls("c1"), {"role": "tool", "content": "x"}], "'tool_call_id' is missing"),
    ([user("a"), calls("c1"), result("c1") | {"name": "read_file"}], "unknown key"),
    ([user("a"), calls("c1", name="a b"), result("c1")], "name is not valid"),
    ([user("a"), calls("c1", name=""), result("c1")], "name is not valid"),
    ([user("a"), calls("c1", arguments="{"), result("c1")], "JSON object"),
    ([user("a"), calls("c1", arguments="[]"), result("c1")], "JSON object"),
    ([user("a"), calls("c1", arguments={}), result("c1")], "JSON object"),
    ([user("a"), calls("c1", arguments=""), result("c1")], "JSON object"),
    ([user("a"), calls(""), result("")], "not unique"),
    ([user("a"), calls("c1", "c1"), result("c1")], "not unique"),
    ([user("a"), *GROUP, calls("c1"), result("c1")], "not unique"),
    ([user("a"), {"role": "assistant", "tool_calls": [{"id": "x", "function": {}}]}], "needs id, type"),
    ([user("a"), calls("c1", "c2"), result("c1")], "must be followed by tool messages"),
    ([user("a"), calls("c1", "c2"), result("c2"), result("c1")], "must be followed by tool messages"),
    ([user("a"), calls("c1"), user("b")], "must be followed by tool messages"),
    ([user("a"), result("c1")], "must be a response to a preceding message with 'tool_calls'"),
    ([user("a"), calls("c1"), result("c1"), result("c1")], "must be a response to a preceding message"),
    ([user("a"), *GROUP, user("b")], "user must not follow tool"),
    ([user("a"), user("b")], "user must not follow user"),
    ([user("a"), ASSISTANT, ASSISTANT, user("b")], "assistant must not follow assistant"),
    ([SYSTEM, ASSISTANT, user("b")], "assistant must not follow system"),
    ([user("a"), ASSISTANT], "last message"),
    ([SYSTEM], "last message"),
    ([user("\ud800")], "surrogate"),
]


@pytest.mark.parametrize(("messages", "text"), REFUSED)
def test_malformed_messages_are_refused(messages, text):
    with pytest.raises(ValueError, match=text):
        practice.check_request({"model": "m", "messages": copy.deepcopy(messages)})


@pytest.mark.parametrize(
    "change",
    [
        {"model": ""},
        {"model": None},
        {"messages": None},
        {"tools": []},
        {"tools": "x"},
        {"tools": [{"type": "function"}]},
        {"tools": [TOOLS[0], TOOLS[0]]},
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}]},
        {"tools": [{"type": "function", "function": {"name": "a", "description": "", "parameters": {}}}]},
        {"tools": [tool("bad name")]},
    ],
)
def test_malformed_requests_are_refused_with_400(shared, change):
    status, body = post(shared, {"model": "m", "messages": [user("a")]} | change)
    assert status == 400 and body["error"]["type"] == "invalid_request_error"
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert shared.refusals[-1] == body["error"]["message"]


def test_checks_run_before_the_script_unless_switched_off():
    with practice.start(["kept"]) as server:
        with pytest.raises(openai.BadRequestError, match="user must not follow user"):
            ask(server, user("a"), user("b"))
        assert ask(server).choices[0].message.content == "kept"
    with practice.start(["ok"], strict=False) as server:
        assert ask(server, user("a"), user("b")).choices[0].message.content == "ok"


# --- window and usage ---


@pytest.mark.parametrize(("text", "tokens"), [("", 0), ("a", 1), ("abcd", 1), ("abcde", 2), ("中文", 2), ("ab中", 2)])
def test_count_tokens(text, tokens):
    assert practice.count_tokens(text) == tokens


def test_window_refusal():
    with practice.start(window=100) as server:
        with pytest.raises(openai.BadRequestError, match="maximum context length is 100 tokens") as caught:
            ask(server, user("x" * 400))
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="reduce the length"):
            ask(server, max_tokens=95)
        assert len(server.refusals) == len(server.requests) == 2


def test_usage_is_counted_and_the_common_prefix_is_cached():
    with practice.start(["one", "two"]) as server:
        first = ask(server, user("a" * 400)).usage
        second = ask(server, user("a" * 400), {"role": "assistant", "content": "one"}, user("b"), tools=TOOLS[:1]).usage
    assert first.prompt_tokens == practice.count_tokens(json.dumps([user("a" * 400)]))
    assert first.total_tokens == first.prompt_tokens + first.completion_tokens > first.prompt_tokens
    assert first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details.cached_tokens < 5  # the tools stand before the messages
    with practice.start(["one", "two"]) as server:
        first = ask(server, user("a" * 400)).usage
        second = ask(server, user("a" * 400), {"role": "assistant", "content": "one"}, user("b")).usage
    assert abs(second.prompt_tokens_details.cached_tokens - first.prompt_tokens) <= 1


# --- scripted replies ---


def test_script_items_of_every_kind():
    script = [
        "text",
        {"tool_calls": [{"name": "a", "arguments": {"文": 1}}, {"name": "b", "arguments": "{bro", "id": "x"}]},
        {"content": "cut", "finish_reason": "length", "usage": {"prompt_tokens": 25000}},
        {"content": "t", "usage": None, "reasoning_content": "hm", "message": {"refusal": "no"}},
        {"content": "n", "usage": "null"},
        {"raw": {"id": "r", "choices": []}},
        lambda body: body["messages"][-1]["content"].upper(),
    ]
    with practice.start(script) as server:
        assert ask(server).choices[0].message.content == "text"
        choice = ask(server).choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        assert [c.function.arguments for c in choice.message.tool_calls] == ['{"文": 1}', "{bro"]
        assert choice.message.tool_calls[0].id and choice.message.tool_calls[1].id == "x"
        reply = ask(server)
        assert reply.choices[0].finish_reason == "length" and reply.usage.prompt_tokens == 25000
        reply = ask(server)
        assert reply.usage is None and reply.choices[0].message.reasoning_content == "hm"
        assert reply.choices[0].message.refusal == "no"
        assert ask(server).usage is None
        assert ask(server).choices == []
        assert ask(server).choices[0].message.content == "HELLO"
        assert server.script == [] and len(server.requests) == 7
        with pytest.raises(openai.BadRequestError, match=r"no reply left \(request 8\)"):
            ask(server)
        assert server.paths == ["/v1/chat/completions"] * 8 and set(server.authorizations) == {"Bearer k"}
        assert server.requests[0] == {"model": "any", "messages": [user("hello")]}


@pytest.mark.parametrize("arguments", [None, [], 3])
def test_arguments_that_are_no_text_are_sent_raw(arguments):
    with practice.start([{"tool_calls": [{"name": "a", "arguments": arguments, "id": None}]}]) as server:
        _, body = post(server, {"model": "m", "messages": [user("a")]})
    assert body["choices"][0]["message"]["tool_calls"] == [
        {"id": None, "type": "function", "function": {"name": "a", "arguments": arguments}}
    ]


@pytest.mark.parametrize(
    ("item", "error", "text"),
    [
        ({"status": 500}, openai.InternalServerError, "scripted status 500"),
        (
            {"status": 429, "body": {"error": {"message": "slow"}}, "headers": {"x-a": "1"}},
            openai.RateLimitError,
            "slow",
        ),
        ({"status": 502, "body": "<html>", "content_type": "text/html"}, openai.InternalServerError, ""),
        ({"status": 400, "body": b"\xff"}, openai.BadRequestError, ""),
        ({"drop": True}, openai.APIConnectionError, ""),
    ],
)
def test_scripted_failures(item, error, text):
    with practice.start([item, "after"]) as server:
        with pytest.raises(error) as caught:
            ask(server)
        assert text in str(caught.value)
        if "headers" in item:
            assert caught.value.response.headers["x-a"] == "1"
        assert ask(server).choices[0].message.content == "after"


@pytest.mark.parametrize("stall", [False, True])
def test_wait_holds_the_reply_until_it_is_set(stall):
    gate = threading.Event()
    with practice.start(
        [{"content": "late", "wait": None if stall else gate}], stall=gate if stall else None
    ) as server:
        threading.Timer(0.1, gate.set).start()
        began = time.monotonic()
        assert ask(server).choices[0].message.content == "late"
        assert time.monotonic() - began > 0.09


def test_close_ends_waiting_replies_and_open_connections():
    server = practice.start([{"content": "never", "wait": threading.Event()}])
    threading.Timer(0.1, server.close).start()
    with pytest.raises(openai.APIConnectionError):
        ask(server)
    server.close()
    server = practice.start()
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=5)
    assert post(server, {"model": "m", "messages": [user("a")]}, connection=connection)[0] == 200
    server.close()
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        post(server, {}, connection=connection)
        connection.auto_open = 0
        post(server, {}, connection=connection)


# --- streaming ---


def read_stream(server, **options):
    text, made, reasons, usage = "", {}, [], None
    for chunk in ask(server, stream=True, **options):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
            for call in choice.delta.tool_calls or []:
                row = made.setdefault(call.index, {"id": call.id, "name": call.function.name, "arguments": ""})
                row["arguments"] += call.function.arguments or ""
    return text, list(made.values()), reasons, usage


def test_streamed_text_and_parallel_calls():
    two = [{"name": "a", "arguments": {"path": "a long enough path"}, "id": "1"}, {"name": "b", "id": "2"}]
    with practice.start(["words " * 30, {"content": "so", "tool_calls": two}]) as server:
        text, made, reasons, usage = read_stream(server, stream_options={"include_usage": True})
        assert (text, made, reasons) == ("words " * 30, [], ["stop"]) and usage.prompt_tokens > 0
        text, made, reasons, usage = read_stream(server)
        assert text == "so" and reasons == ["tool_calls"] and usage is None
        assert made[0] == {"id": "1", "name": "a", "arguments": '{"path": "a long enough path"}'}
        assert made[1] == {"id": "2", "name": "b", "arguments": "{}"}


def test_raw_chunks_with_a_pause_without_done_and_cut_short():
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "m"}
    part = chunk | {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": None}]}
    gate = threading.Event()
    script = [{"chunks": [part, gate, part]}, {"chunks": [part], "done": False}, {"chunks": [part], "drop": True}, "ok"]
    with practice.start(script) as server:
        stream = iter(ask(server, stream=True))
        next(stream)
        gate.set()
        assert next(stream).choices[0].delta.content == "x" and list(stream) == []
        assert read_stream(server)[0] == "x"
        with pytest.raises(openai.APIConnectionError):
            read_stream(server)
        assert read_stream(server)[0] == "ok"


# --- HTTP ---


def test_endpoints_and_keep_alive_on_one_connection(shared):
    assert [model.id for model in client(shared).models.list()] == ["practice"]
    connection = http.client.HTTPConnection("127.0.0.1", shared.server_address[1], timeout=5)
    began = time.monotonic()
    assert post(shared, {"a": 1}, "/v1/nothing", connection)[0] == 404
    local = connection.sock
    for data in (b"{", b"[]", b"", b"\xff"):
        assert post(shared, data, connection=connection) == (400, practice.error_body(shared.refusals[-1]))
    for _ in range(5):
        assert post(shared, {"model": "m", "messages": [user("hi")]}, connection=connection)[0] == 200
    assert connection.sock is local and time.monotonic() - began < 0.2


def test_a_client_that_hangs_up_is_silent(capfd):
    gate = threading.Event()
    with practice.start([{"content": "x" * 3_000_000, "wait": gate}, "next"]) as server:
        data = json.dumps({"model": "m", "messages": [user("a")]})
        with socket.create_connection(server.server_address) as sock:
            sock.sendall(f"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: {len(data)}\r\n\r\n{data}".encode())
            time.sleep(0.05)
        gate.set()
        time.sleep(0.05)
        assert ask(server).choices[0].message.content == "next"
    assert capfd.readouterr() == ("", "")


def test_import_has_no_effects_and_main_serves():
    code = "import sys, practice_server as p; assert 'http.server' not in sys.modules and 'socket' not in sys.modules"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=LESSONS, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    with practice.start() as server:
        port = str(server.server_address[1])
        command = [sys.executable, str(LESSONS / "practice_server.py"), "--port"]
        taken = subprocess.run([*command, port], capture_output=True, text=True, check=False)
        assert taken.returncode == 2 and taken.stderr.count("\n") == 1
    process = subprocess.Popen([*command, "0", "--window", "50"], stdout=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    process.kill()
    process.wait()
    process.stdout.close()
    assert "http://127.0.0.1:" in line


# --- the rules ---


def play(*requests, tools=TOOLS, answers=None, messages=None, limit=30):
    """Run a bare agent loop on the rules; returns (steps as lists of (name, arguments), final text, messages)."""
    messages = messages or [SYSTEM]
    for request in requests:
        messages.append(user(request))
        steps = []
        for _ in range(limit):
            practice.check_request({"model": "m", "messages": messages, **({"tools": tools} if tools else {})})
            reply = practice.practice_reply(messages, tools)
            if "tool_calls" not in reply:
                break
            made = [
                {
                    "id": c["id"],
                    "type": "function",
                    "function": {"name": c["name"], "arguments": json.dumps(c["arguments"])},
                }
                for c in reply["tool_calls"]
            ]
            messages.append({"role": "assistant", "tool_calls": made})
            for call in reply["tool_calls"]:
                answer = (answers or {}).get(call["name"], "ok")
                text = answer(call["arguments"]) if callable(answer) else answer
                messages.append(result(call["id"], text))
            steps.append([(call["name"], call["arguments"]) for call in reply["tool_calls"]])
        else:
            pytest.fail("the practice model goes round in circles")
        messages.append({"role": "assistant", "content": reply["content"]})
    return steps, reply["content"], messages


LISTING = "docs/\n.env\nuv.lock\nlogo.png\nREADME.md\nnotes.txt  120 bytes\nsrc/a b.py\n[3 more 省略]"


def reads(*names):
    return [("read_file", {"path": name}) for name in names]


@pytest.mark.parametrize(
    ("request_text", "expected"),
    [
        ("list the files", [[("list_files", {})]]),
        ("请列出文件", [[("list_files", {})]]),
        ("what is in notes.txt?", [reads("notes.txt")]),
        ("Read a.py, src/b.py and README.", [reads("a.py", "src/b.py", "README")]),
        ("请读取notes.txt和笔记.md", [reads("notes.txt", "笔记.md")]),
        ("读 `my file` 的内容", [reads("my file")]),
        ("read /etc/hosts please", [reads("/etc/hosts")]),
        ("read three files", [[("list_files", {})], reads("README.md", "notes.txt", "src/a b.py")]),
        ("读三个文件", [[("list_files", {})], reads("README.md", "notes.txt", "src/a b.py")]),
        ("run a command", [[("run_shell", {"command": practice.DEFAULT_COMMAND})]]),
        ("run `ls -l`", [[("run_shell", {"command": "ls -l"})]]),
        ("运行：ls", [[("run_shell", {"command": "ls"})]]),
        ("write a note", [[("write_file", {"path": "practice-note.txt", "content": practice.DEFAULT_NOTE})]]),
        ("write 'hi you' to b.txt", [[("write_file", {"path": "b.txt", "content": "hi you\n"})]]),
        ("写 你好 到 b.txt", [[("write_file", {"path": "b.txt", "content": "你好\n"})]]),
        ("edit a.py: old x -> new y", [[("edit_file", {"path": "a.py", "old": "old x", "new": "new y"})]]),
        ("compact", [[("compact", {})]]),
        ("压缩", [[("compact", {})]]),
        ("delegate: list the files", [[("delegate", {"task": "list the files"})]]),
        ("edit a.py", []),
        ("hello", []),
        ("what can you do?", []),
        ("see https://x.com/a.html, e.g. now", []),
    ],
)
def test_what_a_request_makes_it_do(request_text, expected):
    steps, answer, _ = play(request_text, answers={"list_files": LISTING})
    assert steps == expected and answer


def test_only_offered_tools_are_used():
    for request in [
        *practice.suggest(t["function"]["name"] for t in TOOLS),
        "edit a.py: x -> y",
        "compact",
        "read a.py",
    ]:
        assert play(request, tools=[])[0] == []
    steps, _, _ = play("read three files", tools=TOOLS[1:3], answers={"run_shell": "a.txt\nb.txt\n[exit 0]"})
    assert [step[0][0] for step in steps] == ["run_shell", "read_file"]


@pytest.mark.parametrize(
    ("request_text", "answers", "said"),
    [
        ("list the files", {"list_files": "a\nb"}, "2 lines"),
        ("read a.md", {"read_file": "\n# Title\nx"}, "a.md: 3 lines shown; begins: # Title"),
        ("read a.md", {"read_file": "Error: no such file"}, "could not be read: Error: no such file"),
        ("读 a.md", {"read_file": "错误：没有"}, "读取失败"),
        ("run a command", {"run_shell": "hello\n[exit 0]"}, "hello"),
        ("write a note", {"write_file": "Denied by the user: not today"}, "not today"),
        ("write a note", {"write_file": "Denied by the user"}, "was denied"),
        ("写一个笔记", {"write_file": "用户拒绝了"}, "被拒绝"),
        ("read three files", {"list_files": "(empty)"}, "no text files"),
        ("hello", {}, "do not think"),
        ("你好", {}, "不会思考"),
    ],
)
def test_what_it_says(request_text, answers, said):
    assert said in play(request_text, answers=answers)[1]


@pytest.mark.parametrize(
    ("names", "lines"),
    [
        (["list_files", "read_file", "run_shell", "write_file"], 5),
        (["read_file"], ["read README.md"]),
        (["write_file", "run_shell"], ["run a command", "write a note"]),
        ([], []),
    ],
)
def test_suggest(names, lines):
    found = practice.suggest(names)
    assert (len(found) if isinstance(lines, int) else found) == lines


def clear(messages):
    for message in [m for m in messages if m["role"] == "tool"][:-3]:
        message["content"] = "[old result cleared 已清除]"


def long_session(size, managed=True, fold=False):
    """Play a long session with results of size characters; returns (prompt sizes, reads per step, answer)."""
    messages, prompts, counts = [SYSTEM, user("a long session")], [], []
    for _ in range(20):
        if managed and prompts and prompts[-1] > 16_000:
            clear(messages)
        if fold and prompts and prompts[-1] > 24_000:
            cut = max(number for number, message in enumerate(messages) if "tool_calls" in message)
            block = "[Summary of the earlier conversation]\n- run things\n[end of the summary]\na long session"
            messages[1:cut] = [user(block)]
        prompts.append(practice.prompt_size(messages, TOOLS))
        practice.check_request({"model": "m", "messages": messages, "tools": TOOLS})
        reply = practice.practice_reply(messages, TOOLS)
        if "content" in reply:
            return prompts, counts, reply["content"]
        counts.append(len(reply["tool_calls"]))
        made = [calls(c["id"], name=c["name"], arguments=json.dumps(c["arguments"])) for c in reply["tool_calls"]]
        messages.append({"role": "assistant", "tool_calls": [m["tool_calls"][0] for m in made]})
        listing = "\n".join(f"file{n}.txt" for n in range(7))
        messages += [result(c["id"], listing if c["name"] == "list_files" else "x" * size) for c in reply["tool_calls"]]
    pytest.fail("a long session did not end")


@pytest.mark.parametrize("size", [1500, 2500, 4000, 8000])
@pytest.mark.parametrize("fold", [False, True])
def test_a_long_session_jumps_over_the_limits_and_fits_the_window(size, fold):
    prompts, counts, answer = long_session(size, fold=fold)
    assert 24_500 < max(prompts) < 29_000 and len(counts) <= 14
    assert counts[:3] == [1, 4, 4] and min(prompts[-2:]) < 16_000
    assert "A summary stands for" in answer if fold else "ask once more" in answer


@pytest.mark.parametrize(("size", "managed"), [(40, True), (4000, False), (30_000, False)])
def test_a_long_session_ends_in_other_folders_too(size, managed):
    prompts, counts, answer = long_session(size, managed)
    assert max(prompts) < 31_000 if size < 30_000 else True
    assert len(counts) <= 14 and ("NAMI_SOFT_LIMIT=3000" in answer) == (size == 40)


def small_folder(files, requests=1, limit=None):
    """Play long sessions in a folder of files (dict of lines); returns (reads of the last, answer)."""

    def read(arguments):
        lines, start = files[arguments["path"]], arguments.get("offset", 1)
        assert start <= len(lines), "a read past the end"
        shown = lines[start - 1 : start + 199]
        text = "\n".join(f"{number}\t{line}" for number, line in enumerate(shown, start))
        left = len(lines) - start - len(shown) + 1
        return text[:4000] + (f"\n[{len(lines)} lines in all; go on with offset {start + 200}]" if left else "")

    answers = {"list_files": "\n".join(files) or "no files", "read_file": read}
    if limit:
        answers["read_file"] = lambda arguments: "[old result cleared 已清除]"
    steps, answer, _ = play(*["a long session"] * requests, answers=answers)
    return sum(len(step) for step in steps[1:]), answer


@pytest.mark.parametrize(("names", "lines"), [("a", 3), ("abc", 3), ("abc", 12), ("abcdefg", 3)])
@pytest.mark.parametrize("requests", [1, 3])
def test_a_small_folder_is_read_a_few_times_and_never_past_an_end(names, lines, requests):
    count, answer = small_folder({f"{name}.txt": ["some words in it"] * lines for name in names}, requests)
    assert count <= 12 and "the prompt reached about" in answer and "NAMI_SOFT_LIMIT=3000" in answer
    assert ("larger files" in answer) == (lines == 3) and "cleared" not in answer


@pytest.mark.parametrize("lines", [60, 199, 200, 201, 230, 1000])
def test_normal_files_are_never_read_past_an_end(lines):
    assert small_folder({"a.txt": ["some words " * 5] * lines})[1].startswith("Done")


def test_a_long_session_without_files_or_with_low_limits():
    assert small_folder({}) == (0, "There is no text file to read here; try: write a note")
    count, answer = small_folder({"a.txt": [], "b.txt": []}, limit=True)
    assert count <= 28 and answer.startswith("Done. Old results were cleared. There is no summary yet")
    assert "Error: no" in play("a long session", answers={"list_files": "a.txt", "read_file": "Error: no"})[1]
    assert play("list the files", answers={"list_files": "a.txt"})[1].startswith("The listing I was given has 1 line.")


def test_lost_steps_are_not_started_again():
    block = user("[Summary]\n- things\nThe running request:\nread three files")
    assert "content" in practice.practice_reply([SYSTEM, block], TOOLS)
    steps, _, _ = play("read a.txt", messages=[SYSTEM, block, {"role": "assistant", "content": "ok"}])
    assert steps == [reads("a.txt")]


# --- the summary ---

HISTORY = """Make a summary of this conversation. Keep the user's goal: and errors.

{user} {ask}
{assistant} read_file({{"path": "a.py"}})
{tool} import os
{assistant} run_shell({{"command": "python a.py"}})
{tool} Error: it broke
{user} thanks
"""


@pytest.mark.parametrize("tags", [("[user]", "[assistant]", "[tool]"), ("user:", "assistant:", "tool:")])
@pytest.mark.parametrize(
    ("ask_text", "title"), [("fix a.py", "- Asked: fix a.py | thanks"), ("修好 a.py", "修好 a.py")]
)
def test_summary_by_extraction(tags, ask_text, title):
    text = HISTORY.format(user=tags[0], assistant=tags[1], tool=tags[2], ask=ask_text)
    answer = practice.practice_reply([user(text)], [])["content"]
    assert title in answer and "a.py" in answer and "python a.py" in answer and "it broke" in answer
    assert len(answer) < len(text) and "user's goal" not in answer


def test_summary_carries_the_last_one_on_and_stays_short():
    first = practice.summarise([user("Summary please\n[user] 修好 b.py\n[assistant] read_file(path='b.py')")])
    assert first.startswith("- 请求: 修好 b.py\n- 文件: b.py")
    second = practice.summarise([user(f"Summary please\n[user] [Summary so far]\n{first}\n[user] 再来\n" + "x" * 500)])
    assert second.startswith("- 请求: 修好 b.py | 再来\n- 文件: b.py")
    many = "\n".join(f"[user] request number {n} {'y' * 200}\n[tool] Error {n}" for n in range(200))
    assert len(practice.summarise([user("summary\n" + many)])) <= 1500
    assert len(practice.summarise([user("summary")])) <= 7
