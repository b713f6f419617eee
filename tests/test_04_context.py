"""Context: truncate, clear, compact off the real prompt_tokens; and sessions that outlive the program."""

import copy
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading

import agent
import context
import practice_server
import pytest
from conftest import CODE, STATE_DIR, call, pipe, repl, run_turn
from context import clear_old_tool_results, load_session, save_session, split_for_compact, truncate_tool_result
from permissions import PermissionManager

SYSTEM = {"role": "system", "content": "Be brief."}
BIG = {"prompt_tokens": 30_000, "completion_tokens": 10, "total_tokens": 30_010}  # above HARD_LIMIT
REQUEST = "Now finish it:\n  1. keep «this»  \n  2. 保留每一个字 \\n {x}"


def user(text):
    return {"role": "user", "content": text}


def says(text):
    return {"role": "assistant", "content": text}


def step(*ids, text="a result"):
    """One step: the calls of one reply, then a result for each."""
    function = {"name": "read_file", "arguments": '{"path": "a.txt"}'}
    asked = {"role": "assistant", "tool_calls": [{"id": i, "type": "function", "function": function} for i in ids]}
    return [asked, *({"role": "tool", "tool_call_id": i, "content": text} for i in ids)]


def history(turns, steps=1, parallel=1, text="a result"):
    """A conversation of whole turns, as providers accept it."""
    messages = [SYSTEM]
    for turn in range(turns):
        messages.append(user(f"request {turn}"))
        for number in range(steps):
            messages += step(*(f"c{turn}-{number}-{i}" for i in range(parallel)), text=text)
        messages.append(says(f"answer {turn}"))
    return copy.deepcopy(messages)


def short_history():
    """Three turns with two results: one more result and clearing still has nothing to do."""
    return history(1, steps=0) + history(3)[5:]


def random_history(seed):
    dice = random.Random(seed)
    messages = [SYSTEM]
    for turn in range(dice.randrange(9)):
        messages.append(user(f"request {turn}"))
        for number in range(dice.randrange(4)):
            ids = [f"c{turn}-{number}-{i}" for i in range(dice.randint(1, 4))]
            messages += step(*ids, text="r" * dice.randrange(300))
        messages.append(says(f"answer {turn}"))
    return messages


def check_sendable(messages):
    """Raise ValueError unless a strict provider takes these messages with a new request after them."""
    practice_server.check_request({"model": "m", "messages": [*messages, user("go on")]})


def patient_client(**options):
    """The real client, which does not try again by itself."""
    from openai import OpenAI

    return OpenAI(api_key="no-key", max_retries=0, **options)


def shown_tokens(screen):
    return [int(number.replace(",", "")) for number in re.findall(r"prompt_tokens ~?([\d,]+)", screen)]


def asks(body):
    """Is this a request of the loop, not for a summary? Only the loop offers tools."""
    return "tools" in body


# --- Layer 1: truncate -------------------------------------------------------------------------------------------


def test_published_checks_of_truncation():
    out = truncate_tool_result("x" * 10000)
    assert len(out) < 4200 and "省略" in out and truncate_tool_result("short") == "short"


@pytest.mark.parametrize("length", [0, 1, 3999, 4000])
def test_what_fits_is_not_touched(length):
    assert truncate_tool_result("x" * length) == "x" * length


@pytest.mark.parametrize("length, limit", [(4001, 4000), (10_000, 4000), (123_457, 4000), (500, 101), (50, 2), (50, 1)])
def test_head_and_tail_stay_and_the_note_counts_exactly(length, limit):
    text = "".join(chr(0x4E00 + number % 5000) for number in range(length))  # neighbours differ
    out = truncate_tool_result(text, limit)
    head, english, chinese, tail = re.fullmatch(
        r"(.*)\n?\[… (\d+) characters omitted 中间省略 (\d+) 字符 …\]\n?(.*)", out, re.DOTALL
    ).groups()
    head = head.rstrip("\n")
    assert text.startswith(head) and text.endswith(tail) and abs(len(head) - len(tail)) <= 1
    assert len(head) + len(tail) + int(english) == length and english == chinese


def test_a_long_result_enters_the_history_cut(serve, workspace):
    (workspace / "big.txt").write_text("".join(f"{number} {'x' * 60}\n" for number in range(100)) + "THE END\n")
    server = serve(call("read_file", {"path": "big.txt"}), "done")
    run_turn("read big.txt")
    result = server.requests[1]["messages"][-1]["content"]
    assert len(result) < 4200 and "省略" in result and result.startswith("1\t0 x") and result.endswith("THE END")


# --- Layer 2: clear ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [3, 2, 1, 0, 12, 100])
def test_clearing_changes_only_the_content_of_old_results(keep):
    before = history(turns=3, steps=2, parallel=2, text="r" * 500)  # 12 results
    after = copy.deepcopy(before)
    clear_old_tool_results(after, keep)
    changed = []
    for old, new in zip(before, after, strict=True):
        if old["role"] == "tool":
            changed.append(old != new)
            assert {**new, "content": ""} == {**old, "content": ""}
        else:
            assert new == old
    assert changed == [True] * max(0, 12 - keep) + [False] * min(12, keep)
    check_sendable(after)


def test_clearing_keeps_the_newest_three_by_default_and_says_that_calling_again_helps():
    messages = history(turns=5, text="r" * 500)
    clear_old_tool_results(messages)
    results = [message["content"] for message in messages if message["role"] == "tool"]
    assert results[2:] == ["r" * 500] * 3 and results[0] == results[1] == context.PLACEHOLDER
    assert "again" in context.PLACEHOLDER and "清除" in context.PLACEHOLDER


def test_clearing_twice_is_clearing_once():
    once = history(turns=5, text="r" * 500)
    clear_old_tool_results(once)
    twice = copy.deepcopy(once)
    clear_old_tool_results(twice)
    assert twice == once


def test_all_but_the_newest_three_are_cleared_also_where_they_are_short():
    messages = history(turns=9, text="ok")
    clear_old_tool_results(messages)
    results = [message["content"] for message in messages if message["role"] == "tool"]
    assert set(results[:-3]) == {context.PLACEHOLDER} and results[-3:] == ["ok"] * 3


def test_clearing_is_announced_only_when_something_was_cleared(serve, workspace):
    serve(call("list_files", {}, usage={**BIG, "prompt_tokens": 20_000}), "done")
    assert "cleared" not in run_turn("look").screen


# --- Layer 3: compact --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_two_turns_are_too_short_to_split(turns):
    assert split_for_compact(history(turns)) is None


def test_every_split_keeps_calls_and_results_together():
    split = 0
    for seed in range(300):
        messages = random_history(seed)
        turns = sum(message["role"] == "user" for message in messages)
        parts = split_for_compact(messages)
        assert (parts is None) == (turns <= 2)
        if parts:
            split += 1
            old, recent = parts
            assert old + recent == messages[1:] and [m["role"] for m in recent].count("user") == 2
            assert recent[0]["role"] == "user"
            check_sendable([SYSTEM, *recent])
            check_sendable([SYSTEM, *old])
    assert split > 100


def test_the_summariser_reads_roles_calls_and_results():
    text = context.render_for_summary(history(1, text="the result")[1:] + [{**says(None), **step("z")[0]}])
    for part in ("user", "request 0", 'read_file({"path": "a.txt"})', "tool", "the result", "assistant", "answer 0"):
        assert part in text
    assert text.count("read_file(") == 2 and "None" not in text


def test_compaction_gives_system_summary_acknowledgement_and_the_recent_turns(serve):
    server, messages = serve("WHAT WAS DONE"), history(5, steps=2, parallel=2)
    before = copy.deepcopy(messages)
    after = context.compact(patient_client(), "practice", messages)
    assert [m["role"] for m in after[:4]] == ["system", "user", "assistant", "user"]
    assert after[0] == SYSTEM and "WHAT WAS DONE" in after[1]["content"] and "摘要" in after[1]["content"]
    assert after[3:] == before[-16:] and messages == before
    check_sendable(after)
    (request,) = server.requests
    assert not asks(request) and [m["role"] for m in request["messages"]] == ["user"]
    asked = request["messages"][0]["content"]
    assert context.SUMMARY_PROMPT.strip() in asked and "request 0" in asked and "answer 2" in asked
    assert "request 3" not in asked


def test_nothing_to_compact_costs_no_request(serve):
    server, messages = serve("never asked for"), history(2)
    assert context.compact(patient_client(), "practice", messages) == history(2) and server.requests == []


def test_compaction_in_a_turn_keeps_the_running_request_word_for_word(serve):  # R055, R031
    server = serve(call("list_files", {}, usage=BIG), "WHAT WAS DONE", "done")
    turn = run_turn(REQUEST, history(3))
    assert turn.answer == "done" and server.refusals == []
    assert [asks(body) for body in server.requests] == [True, False, True]
    after = server.requests[2]["messages"]
    assert user(REQUEST) in after and user("request 2") in after and "WHAT WAS DONE" in after[1]["content"]
    assert not any("request 0" in (m.get("content") or "") or "answer 1" in (m.get("content") or "") for m in after)
    assert len(after) < len(server.requests[0]["messages"])


def test_above_hard_with_nothing_to_compact_clearing_is_still_done(serve, workspace):
    (workspace / "a.txt").write_text("the contents " * 50)
    reads = {"tool_calls": [{"name": "read_file", "arguments": {"path": "a.txt"}}] * 10}
    server = serve({**reads, "usage": BIG}, "done")
    assert run_turn("read it ten times").answer == "done"
    results = [m["content"] for m in server.requests[1]["messages"] if m["role"] == "tool"]
    assert len(server.requests) == 2 and ["the contents" in result for result in results] == [False] * 7 + [True] * 3


EVIL = {"name": "run_shell", "arguments": {"command": "touch pwned"}}
BAD_SUMMARIES = {
    "empty": "",
    "null": {"content": None},
    "white space": " \n\t",
    "cut": {"content": "The user wan", "finish_reason": "length"},
    "filtered": {"content": "The user", "finish_reason": "content_filter"},
    "only reasoning": {"content": "", "reasoning_content": "thinking", "finish_reason": "length"},
    "a tool call": {"tool_calls": [EVIL]},
    "a tool call beside text": {"content": "The user wants", "tool_calls": [EVIL], "finish_reason": "stop"},
    "server error": {"status": 500},
    "too large": {"status": 400, "content": "context_length_exceeded"},
    "no choices": {"body": {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": []}},
    "null choices": {"body": {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": None}},
    "not JSON": {"raw": "<html>busy</html>", "content_type": "text/html"},
    "connection dropped": {"drop": True},
}


@pytest.mark.parametrize("summary", BAD_SUMMARIES.values(), ids=BAD_SUMMARIES)
def test_a_summary_that_is_no_summary_replaces_nothing(serve, workspace, summary):  # R054
    server = serve(call("list_files", {}, usage=BIG), summary, "done")
    turn = run_turn("go", short_history(), ask=lambda question: "yes", client=patient_client())
    assert turn.answer == "done" and [asks(body) for body in server.requests] == [True, False, True]
    before, after = server.requests[0]["messages"], server.requests[2]["messages"]
    assert after[:-2] == before == [*before[:1], *short_history()[1:], user("go")]
    assert sum("summary" in line for line in turn.screen.splitlines()) == 1
    assert not (workspace / "pwned").exists()


def test_ctrl_c_in_the_summary_leaves_the_history(serve):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background starts without it

    def interrupt(body):
        os.kill(os.getpid(), signal.SIGINT)
        return {"wait": 5}

    server, messages = serve(call("list_files", {}, usage=BIG), interrupt, "done"), short_history()
    with pytest.raises(KeyboardInterrupt):
        run_turn("first", messages)
    signal.signal(signal.SIGINT, before)
    assert messages[:12] == [*short_history(), user("first")]
    assert run_turn("second", messages).answer == "done" and server.refusals == []
    assert server.requests[-1]["messages"][: len(messages) - 1] == messages[:-1]


# --- When: the numbers -------------------------------------------------------------------------------------------


def test_prompt_tokens_climbs_falls_after_clearing_and_falls_far_after_compaction(serve, workspace):
    for name in "abc":
        (workspace / f"{name}.txt").write_text("".join(f"{name} {number} {'x' * 50}\n" for number in range(100)))
    for name in ("one", "two", "six"):
        (workspace / f"{name}.txt").write_text("short\n")
    requests = ["read a.txt b.txt", "read c.txt", "read one.txt two.txt six.txt"]
    requests += [f"read one.txt and mind: {'log ' * 4000}", "read two.txt", f"read six.txt and mind: {'log ' * 1000}"]
    server = serve()
    done = pipe("\n".join(requests), NAMI_SOFT_LIMIT="3000", NAMI_HARD_LIMIT="6000")
    assert (done.code, done.err, server.refusals) == (0, "", [])

    size = [practice_server.prompt_size(body["messages"], body.get("tools")) for body in server.requests]
    steps = [number for number, body in enumerate(server.requests) if asks(body)]
    summaries = [number for number, body in enumerate(server.requests) if not asks(body)]
    assert shown_tokens(done.out) == [size[number] for number in steps]  # each step prints what the server counted
    climb = size[: next(number for number in steps if size[number] > 3000) + 1]
    assert climb == sorted(climb) and climb[-1] > 5 * climb[0]
    cleared = [(size[n], size[n + 1]) for n in steps[:-1] if n + 1 < summaries[0] and size[n] > size[n + 1]]
    assert cleared and all(before > 3000 for before, after in cleared)
    compacted = [(size[number - 1], size[number + 1]) for number in summaries]
    assert all(before > 6000 for before, after in compacted)
    assert min(after / before for before, after in compacted) < 0.5


@pytest.mark.parametrize(
    "usage",
    [None, "null", {}, {"prompt_tokens": None}, {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}],
    ids=str,
)
def test_without_usage_the_layers_work_off_an_estimate(serve, usage):
    server = serve(call("list_files", {}, usage=usage), "WHAT WAS DONE", {"content": "done", "usage": usage})
    turn = run_turn(REQUEST, history(4, steps=2, text="x" * 12_000))  # 8 results of 3,000 tokens
    assert turn.answer == "done" and [asks(body) for body in server.requests] == [True, False, True]
    shown = re.findall(r"prompt_tokens (~?)([\d,]+)", turn.screen)
    assert [mark for mark, number in shown] == ["~", "~"]
    asked, after = (
        practice_server.prompt_size(body["messages"], body["tools"]) for body in server.requests if asks(body)
    )
    estimates = [int(number.replace(",", "")) for mark, number in shown]
    assert estimates == [pytest.approx(asked, rel=0.05), pytest.approx(after, rel=0.05)]
    results = [m["content"] for m in server.requests[2]["messages"] if m["role"] == "tool"]
    assert sum("x" * 12_000 in result for result in results) <= 2


@pytest.mark.parametrize("value, tokens", [(["x" * 4000], 1000), (["你" * 1000], 1000), (["é" * 10 + "abcd" * 25], 35)])
def test_an_estimate_is_a_quarter_per_ascii_character_and_one_per_other(value, tokens):
    assert tokens <= context.estimate_tokens(value) <= tokens + 2


def test_an_estimate_agrees_with_the_practice_server():
    messages = [*history(5, steps=2), user("读一下这个文件")]
    assert abs(context.estimate_tokens(messages) - practice_server.prompt_size(messages, None)) <= 1


def test_one_turn_of_sixty_steps_stays_inside_the_window(serve, workspace, monkeypatch):
    monkeypatch.setattr(agent, "MAX_STEPS", 61)
    (workspace / "big.txt").write_text(f"{'字' * 70}\n" * 100)  # each result costs about 4,000 tokens
    server = serve(*[call("read_file", {"path": "big.txt"})] * 60, "done")
    assert run_turn("read big.txt sixty times").answer == "done"
    sizes = [practice_server.prompt_size(body["messages"], body["tools"]) for body in server.requests]
    assert len(sizes) == 61 and max(sizes) < 32_000 and server.refusals == []


@pytest.mark.parametrize(
    "name, value",
    [
        ("NAMI_MAX_STEPS", "0"),
        ("NAMI_MAX_STEPS", "many"),
        ("NAMI_SOFT_LIMIT", "-1"),
        ("NAMI_SOFT_LIMIT", "²"),
        ("NAMI_HARD_LIMIT", "9" * 5000),
    ],
    ids=lambda value: value[:20],
)
def test_a_wrong_number_is_one_line_and_exit_code_2(name, value):
    done = pipe("", **{name: value})
    assert (done.code, done.out) == (2, "")
    assert done.err.count("\n") == 1 and name in done.err and "number" in done.err


# --- Sessions ----------------------------------------------------------------------------------------------------


def session_files():
    """Return every file in the state folder, as text."""
    return {path: path.read_text() for path in STATE_DIR.rglob("*") if path.is_file()}


def in_child(code, **options):
    """Run code that imports our modules in a process of its own; return what it printed."""
    env = {**os.environ, "PYTHONPATH": str(CODE)}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=10, **options)


def test_sessions_lie_where_the_file_tools_cannot_reach(workspace):
    save_session("x", history(1))
    assert not context.SESSION_DIR.resolve().is_relative_to(workspace)
    perms = PermissionManager(ask=lambda question: "yes")
    path = str(next(context.SESSION_DIR.iterdir()))
    for name, fields in (
        ("read_file", {"path": path}),
        ("write_file", {"path": path, "content": "[]"}),
        ("edit_file", {"path": path, "old": "a", "new": "b"}),
        ("list_files", {"pattern": str(context.SESSION_DIR)}),
    ):
        assert perms.check(name, fields) is not None


def test_what_was_saved_is_loaded_and_readable():
    messages = [*history(2), user("你好，世界 ☕"), says('a\u2028b \\ " \0')]
    save_session("x", history(5))
    save_session("x", messages)
    assert load_session("x") == messages
    assert "你好，世界 ☕" in (context.SESSION_DIR / "x.json").read_text(encoding="utf-8")
    assert load_session("another") is None


def test_a_lone_surrogate_does_not_stop_saving():
    save_session("x", [user("half \ud83d an emoji")])
    assert "an emoji" in load_session("x")[0]["content"]


def test_files_and_folders_are_private_also_when_replacing_an_older_file():  # R143
    before = os.umask(0o022)
    try:
        save_session("x", history(1))
        (context.SESSION_DIR / "x.json").chmod(0o644)
        context.SESSION_DIR.chmod(0o755)
        save_session("x", history(2))
    finally:
        os.umask(before)
    modes = {str(path.relative_to(STATE_DIR)): oct(path.stat().st_mode & 0o777) for path in STATE_DIR.rglob("*")}
    assert modes["sessions"] == "0o700" and modes["sessions/x.json"] == "0o600"
    assert set(modes.values()) == {"0o700", "0o600"}
    assert oct(STATE_DIR.stat().st_mode & 0o777) == "0o700"


def test_the_file_is_private_before_it_gets_its_name():  # R143
    code = """
import os, sys, context
os.umask(0o022)
def hook(event, args):
    if event == "os.rename":
        print(oct(os.stat(args[0]).st_mode & 0o777), os.path.getsize(args[0]) > 0)
sys.addaudithook(hook)
context.save_session("x", [{"role": "user", "content": "hi"}])
"""
    assert in_child(code).stdout == "0o600 True\n"


def test_a_disk_that_is_full_leaves_the_old_session_and_no_rubbish():  # R137
    save_session("x", history(2))
    before = session_files()
    code = """
import resource, context
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    context.save_session("x", [{"role": "user", "content": "x" * 100_000}])
except OSError as error:
    print("OSError")
"""
    assert in_child(code).stdout == "OSError\n"
    assert session_files() == before and load_session("x") == history(2)


def test_a_save_that_cannot_replace_leaves_no_rubbish():
    (context.SESSION_DIR / "x.json/inside").mkdir(parents=True)
    with pytest.raises(OSError):
        save_session("x", history(1))
    assert session_files() == {}


SAVED = json.dumps(history(3), ensure_ascii=False).encode()
BROKEN = {
    "empty": b"",
    "cut in the middle": SAVED[: len(SAVED) // 2],
    "NULs at the end": SAVED + b"\0" * 512,
    "only NULs": b"\0" * 512,
    "object": b"{}",
    "list of numbers": b"[1]",
    "text": b'"x"',
    "null": b"null",
    "number": b"NaN",
    "invalid UTF-8": SAVED.replace(b"answer", b"\xff\xfe"),
    "UTF-16": SAVED.decode().encode("utf-16"),
    "deep": b"[" * 100_000,
    "unknown role": b'[{"role": "robot", "content": "x"}]',
    "no content": b'[{"role": "user"}]',
    "calls of a wrong shape": b'[{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [1]}]',
    "call without id": b'[{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{}]}]',
    "result without id": b'[{"role": "user", "content": "x"}, {"role": "tool", "content": "x"}]',
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_a_broken_session_is_set_aside_and_never_overwritten(data, capsys):  # R137
    save_session("x", history(1))
    (context.SESSION_DIR / "x.json").write_bytes(data)
    assert not load_session("x")
    assert "x.json" in capsys.readouterr().out
    save_session("x", history(2))
    assert load_session("x") == history(2)
    assert data in [path.read_bytes() for path in context.SESSION_DIR.iterdir()]


def test_a_second_broken_session_does_not_overwrite_the_first(capsys):  # R137
    context.SESSION_DIR.mkdir(parents=True)
    for data in (b"first", b"second"):
        (context.SESSION_DIR / "x.json").write_bytes(data)
        load_session("x")
    kept = [path.read_bytes() for path in context.SESSION_DIR.iterdir()]
    assert {b"first", b"second"} <= set(kept)


def test_a_folder_with_the_name_of_a_session_is_set_aside(capsys):
    (context.SESSION_DIR / "x.json").mkdir(parents=True)
    (context.SESSION_DIR / "x.json/inside.txt").write_text("kept")
    assert not load_session("x") and "x.json" in capsys.readouterr().out
    save_session("x", history(1))
    assert load_session("x") == history(1) and "kept" in session_files().values()


def test_the_agent_starts_with_a_broken_session_and_says_so(serve, monkeypatch):  # R137
    serve("first answer", "second answer")
    monkeypatch.setattr(sys, "stdin", io.StringIO("first\n"))  # in this process: a second one would cost a second
    monkeypatch.setattr(sys, "argv", ["agent.py"])
    agent.main()
    (path,) = (path for path in STATE_DIR.rglob("*.json") if "first answer" in path.read_text())
    path.write_bytes(broken := path.read_bytes()[:-20])
    done = repl("second\n")
    assert (done.code, done.err) == (0, "") and path.name in done.out and "second answer" in done.out
    assert broken in [path.read_bytes() for path in STATE_DIR.rglob("*") if path.is_file()]


def test_an_error_in_the_middle_of_a_turn_loses_nothing_and_is_saved(serve, workspace):  # R159, R031
    (workspace / "notes.txt").write_text("x")
    saved = []

    def look_at_disk(body):
        saved.append("".join(session_files().values()))
        return "back"

    failure = {"status": 500, "content": "out of order", "headers": {"x-should-retry": "false"}}
    server = serve(*[call("list_files", {})] * 3, failure, look_at_disk)
    done = repl("work\ngo on\n")
    assert (done.code, done.err, server.refusals) == (0, "", []) and "out of order" in done.out and "back" in done.out
    last = server.requests[-1]["messages"]
    assert sum(m["role"] == "tool" and "notes.txt" in m["content"] for m in last) == 3
    assert user("work") in last and last[-1] == user("go on")
    assert saved[0].count('"tool_call_id"') >= 3 and "work" in saved[0]


def test_after_ctrl_c_and_a_kill_the_next_start_resumes_and_can_be_sent(serve, terminal):
    hold = threading.Event()
    server = serve("first answer", call("run_shell", {"command": "touch x"}), {"wait": hold}, "last answer")
    person = terminal()
    person.expect("> ")
    person.type("first")
    person.expect("first answer")
    person.expect("> ")
    person.type("second")
    person.expect("[n]o: ")
    person.type("n")
    person.expect("hy not")
    person.type("because of rain")
    for _ in range(200):
        if len(server.requests) < 3:
            person.read(0.05)
    person.press("C")
    person.expect("> ")
    os.kill(person.pid, signal.SIGKILL)
    person.exit_code()  # until it is gone, it may hold the session
    add_unanswered_call()
    done = repl("third\n")
    assert (done.code, done.err, server.refusals) == (0, "", []) and "esumed" in done.out and "last answer" in done.out
    texts = [message.get("content") or "" for message in server.requests[-1]["messages"]]
    assert {"first", "first answer", "second", "more", "third"} <= set(texts)
    assert any("because of rain" in text for text in texts)


def add_unanswered_call():
    """Leave the saved session as a crash in the middle of a turn would."""
    (path,) = (path for path in STATE_DIR.rglob("*.json") if "first answer" in path.read_text())
    saved = json.loads(path.read_text())
    messages = saved if isinstance(saved, list) else saved["messages"]
    messages += [user("more"), step("open-1", "open-2")[0]]
    path.write_text(json.dumps(saved))


def test_without_a_place_to_save_the_conversation_goes_on_in_memory(serve, workspace):
    (workspace.parent / "state").write_text("a file, not a folder")
    server = serve("first answer", "second answer")
    done = pipe("first\nsecond\n", NAMI_STATE_DIR=str(workspace.parent / "state"))
    assert (done.code, done.err) == (0, "") and "memory" in done.out
    assert [m["content"] for m in server.requests[1]["messages"][1:]] == ["first", "first answer", "second"]
    assert (workspace.parent / "state").read_text() == "a file, not a folder"
