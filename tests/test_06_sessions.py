"""Sessions: every message is on disk before the next, a crash is repaired, and earlier points can be reached again."""

import copy
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import agent
import context
import practice_server
import pytest
from conftest import CODE, STATE_DIR, call, pipe
from context import append, change, fork, repair, session_path, tree, undo, sendable
from permissions import PermissionManager

PROMPT = "Be brief."
SYSTEM = {"role": "system", "content": PROMPT}
LOG = ".log.jsonl"
FAILURE = {"status": 500, "content": "out of order", "headers": {"x-should-retry": "false"}}
posix_only = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX")


def user(text):
    return {"role": "user", "content": text}


def says(text):
    return {"role": "assistant", "content": text}


def asks(*ids, **more):
    function = {"name": "list_files", "arguments": "{}"}
    return {
        "role": "assistant",
        "tool_calls": [{"id": i, "type": "function", "function": function} for i in ids],
        **more,
    }


def result(identity, text="a result"):
    return {"role": "tool", "tool_call_id": identity, "content": text}


def turn(number, text="a result"):
    ids = [f"c{number}-{i}" for i in range(2)]
    return [user(f"request {number}"), asks(*ids), *(result(i, f"{text} {i}") for i in ids), says(f"answer {number}")]


def turns(*numbers, **more):
    return [message for number in numbers for message in turn(number, **more)]


def begin(*messages, name="x", said=None):
    """A new session, open, with these messages in it."""
    session = context.new_session(Path.cwd(), PROMPT, "a-model", warn=[].append if said is None else said.append)
    session.name = name
    append(session, *messages)
    return session


def saved(*messages, name="x"):
    """A session that a program before this one has left behind."""
    begin(*messages, name=name).log.close()


def reopen(name="x", said=None):
    return context.open_session(name, PROMPT, Path.cwd(), warn=[].append if said is None else said.append)


def plain(session):
    return list(map(sendable, session.messages))


def view_path(name="x"):
    return STATE_DIR / "sessions" / f"{name}.json"


def log_path(name="x"):
    return STATE_DIR / "sessions" / f"{name}{LOG}"


def put(data, name="x", log=False):
    """Write a session file by hand; data: bytes, or what JSON can hold."""
    path = log_path(name) if log else view_path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())


def view(name="x"):
    return json.loads(view_path(name).read_text(encoding="utf-8"))


def records(name="x"):
    """The records of a log, read without our own code; a torn line is skipped."""
    found = []
    for line in log_path(name).read_bytes().split(b"\n") if log_path(name).exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            pass
    return found


def logged(name="x"):
    return [record["message"] for record in records(name) if record["kind"] == "message"]


def request_id(text, name="x"):
    return str(next(r["id"] for r in records(name) if r["kind"] == "message" and r["message"].get("content") == text))


def check_sendable(messages):
    """Raise ValueError unless a strict provider takes what is sent after a new request."""
    practice_server.check_request({"model": "m", "messages": repair([*messages, user("go on")])[0]})


def compact_by_hand(session, keep=2):
    """What compaction does to the view, without a model."""
    _, recent = context.split_for_compact(session.messages, keep)
    change(session, "compact", [session.messages[0], user("[Summary]"), says("Understood."), *recent])


def talk(session, text, **options):
    """One turn of a live session in this process, over the real client, which does not try again by itself."""
    from openai import OpenAI
    from rich.console import Console

    screen = io.StringIO()
    console = Console(file=screen, markup=False, emoji=False, highlight=False, soft_wrap=True, width=200)
    perms = PermissionManager(ask=lambda question: "yes")
    agent.run(text, session, perms, client=OpenAI(api_key="no-key", max_retries=0), console=console, **options)
    return screen.getvalue()


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch):
    """Only a power cut needs fsync, and a busy disk takes 20 ms for each."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture
def start(monkeypatch, capsys):
    """Return a function that starts the agent in this process and types these lines; it returns the screen."""

    def run_main(*lines):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        monkeypatch.setattr(sys, "argv", ["agent.py"])
        capsys.readouterr()
        agent.main()
        for name in ("compact", "update_plan"):  # from lesson 9 on these hold the session, and with it the lock
            agent.tools.TOOLS.pop(name, None)
        return capsys.readouterr().out

    return run_main


@pytest.fixture
def another_folder(workspace, monkeypatch):
    (workspace.parent / "another").mkdir()
    return workspace.parent / "another"


def child(code, **options):
    """A process of its own that imports our modules."""
    env = {**os.environ, "PYTHONPATH": str(CODE)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", code], env=env, text=True, **pipes, **options)


# --- Killed at any moment ----------------------------------------------------------------------------------------


def work_until_killed(name, number, report):
    """Append messages m0, m1, … for ever, in turns, with clearing and compaction; report each that is done."""
    session = reopen(name) or begin(name=name)

    def add(message):
        nonlocal number
        append(session, {**message, "content": f"m{number}"})
        os.write(report, b"%d\n" % number)
        number += 1

    while True:
        ids = f"a{number}", f"b{number}"
        for message in (user(""), asks(*ids), *map(result, ids), says("")):
            add(message)
        change(session, "clear", context.clear_old_tool_results([dict(message) for message in session.messages]))
        if context.split_for_compact(session.messages):
            compact_by_hand(session)


@posix_only
def test_200_kills_lose_at_most_the_message_in_flight():  # item 3
    dice = random.Random(6)
    next_number = dict.fromkeys("abcdefghij", 0)
    for moment in range(200):
        name = "abcdefghij"[moment % 10]
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                work_until_killed(name, next_number[name], writing)
            finally:
                os._exit(1)
        os.close(writing)
        with os.fdopen(reading, "rb") as report:
            done = [int(report.readline()) for _ in range(dice.randrange(3))]  # some at the very start, too
            time.sleep(dice.uniform(0, 0.008))
            os.kill(pid, signal.SIGKILL)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
            done += [int(line) for line in report.read().split()]
        certain = done[-1] + 1 if done else next_number[name]

        texts = [m["content"] for m in logged(name) if re.fullmatch(r"m\d+", m["content"])]
        assert texts == [f"m{n}" for n in range(len(texts))] and certain <= len(texts) <= certain + 1, moment
        next_number[name] = len(texts)
        if session := reopen(name):
            check_sendable(plain(session))
            assert repair(session.messages) == (session.messages, [])
            seen = [message["content"] for message in session.messages if re.fullmatch(r"m\d+", message["content"])]
            assert seen[-1:] == texts[-1:]
            session.log.close()
        assert session or not texts
    assert sum(next_number.values()) > 150


def test_a_view_older_than_the_log_catches_up():
    session = begin(*turns(1))
    older = view_path().read_bytes()
    append(session, *turns(2, 3))
    session.log.close()
    put(older)
    assert plain(reopen()) == [SYSTEM, *turns(1, 2, 3)]


def test_a_view_older_than_an_undo_catches_up():
    session = begin(*turns(1, 2))
    older = view_path().read_bytes()
    undo(session)
    append(session, *turns(3))
    session.log.close()
    put(older)
    assert plain(reopen()) == [SYSTEM, *turns(1, 3)]


def test_the_log_is_written_before_the_view():  # by a hook that looks when the view is about to be replaced
    code = """
import sys, context
from pathlib import Path
session = context.new_session(Path.cwd(), "Be brief.")
def hook(event, args):
    if event == "os.rename":
        print("request 1" in context.session_path(session.name, ".log.jsonl").read_text())
sys.addaudithook(hook)
context.append(session, {"role": "user", "content": "request 1"})
"""
    assert child(code).communicate(timeout=10) == ("True\n", "")


def test_the_view_is_on_the_disk_before_it_gets_its_name(monkeypatch):  # R137: else a power cut leaves NULs
    order, replace = [], os.replace
    monkeypatch.setattr(os, "fsync", lambda file: order.append(("fsync", os.fstat(file).st_size)))
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append(("replace", os.stat(a).st_size)), replace(a, b)))
    begin(*turns(1))
    size = view_path().stat().st_size
    assert order[-2:] == [("fsync", size), ("replace", size)]


def test_a_kill_while_a_lesson_4_session_gets_its_log_doubles_nothing():
    put([SYSTEM, *turns(1, 2)])
    before = view_path().read_bytes()
    reopen().log.close()
    put(before)  # killed after the log was written, before the view was
    session = reopen()
    assert plain(session) == [SYSTEM, *turns(1, 2)]
    append(session, *turns(3))
    session.log.close()
    assert plain(reopen()) == [SYSTEM, *turns(1, 2, 3)]


def test_a_torn_last_line_is_skipped_and_does_not_swallow_the_next():
    saved(*turns(1))
    with log_path().open("ab") as log:
        log.write(b'\n{"id": 99, "parent": 5, "kind": "message", "message": {"role": "us')
    session = reopen()
    append(session, *turns(2))
    session.log.close()
    assert plain(reopen()) == [SYSTEM, *turns(1, 2)] and logged() == turns(1, 2)


@pytest.mark.parametrize(
    "line",
    [
        b"[]",
        b"7",
        b'{"id": 99}',
        b'{"id": 99, "parent": 5}',
        b'{"id": 99, "parent": 5, "kind": "message"}',
        b'{"id": 99, "parent": 5, "kind": "message", "message": {"role": "user"}}',
        b'{"id": 99, "parent": [], "kind": "message", "message": {"role": "user", "content": "x"}}',
        b"\0" * 512,
        b"\xff\xfe",
        b"[" * 100_000,
    ],
    ids=lambda line: line[:60].decode(errors="replace").replace("\0", "0"),
)
@pytest.mark.parametrize("view_is_there", [True, False])
def test_a_line_that_is_no_record_is_skipped(line, view_is_there):
    saved(*turns(1))
    with log_path().open("ab") as log:
        log.write(b"\n" + line + b"\n")
    if not view_is_there:
        view_path().unlink()
    session = reopen()
    append(session, *turns(2))
    assert plain(session) == [SYSTEM, *turns(1, 2)] and len(tree(session)) == 2


def test_resume_reads_only_the_new_end_of_a_long_log():  # item 8
    saved(*turns(1))
    early = b"".join(b'{"id": %d, "parent": null, "kind": "x"}\n' % number for number in range(10**9, 10**9 + 10**5))
    put(early, log=True)
    put({**view(), "log_size": len(early)})
    with log_path().open("ab") as log:
        message = {"id": 6, "parent": 5, "kind": "message", "message": user("late")}
        log.write(json.dumps(message).encode() + b"\n")
    session = reopen()
    assert user("late") in plain(session) and session.last_id < 10**9


# --- The view and the log are broken or missing ------------------------------------------------------------------

VIEW = json.dumps({"format": 1, "usage": {}, "log_size": 0, "messages": [SYSTEM, *turns(1)]}).encode()
BROKEN = {
    "empty": b"",
    "cut": VIEW[:-100],
    "NULs at the end": VIEW + b"\0" * 512,
    "only NULs": b"\0" * 512,
    "number": b"7",
    "no messages": b"{}",
    "messages are no list": b'{"log_size": 0, "messages": {"role": "user"}}',
}
WRONG_FIELDS = ['"usage": []', '"turns": "two"', '"last_id": "7"', '"plan": null']


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_a_broken_view_is_set_aside_and_rebuilt_from_the_log(data, serve):  # R137
    said = []
    serve("done")
    saved(*turns(1, 2))
    put(data)
    session = reopen(said=said)
    talk(session, "go on")
    session.log.close()
    assert plain(reopen()) == [SYSTEM, *turns(1, 2), user("go on"), says("done")]
    assert sum("x.json" in line for line in said) == 1
    assert data in [path.read_bytes() for path in view_path().parent.iterdir()]


@pytest.mark.parametrize("field", WRONG_FIELDS)
def test_a_field_of_the_wrong_type_is_left_out_and_the_rest_loads(field, start):
    saved(*turns(1, 2))
    put(f'{{"log_size": 0, {field}, "messages": []}}'.encode())
    assert re.search(r"^\W*x ", start("/new", "/sessions"), re.MULTILINE)
    session = reopen()
    append(session, *turns(3))
    assert plain(session) == [SYSTEM, *turns(1, 2, 3)] and len(tree(session)) == 3


def test_undoing_the_first_request_starts_a_new_root():
    session = begin(*turns(1))
    undo(session)
    append(session, *turns(2))
    assert [line.split()[0] for line in tree(session)] != ["*", "*"]
    assert plain(fork(session, request_id("request 2"))) == [SYSTEM, *turns(2)]


def test_a_rebuilt_session_is_whole_again_at_the_next_start(serve, start):  # R137: also when nothing was said meanwhile
    server = serve("first answer", "last answer")
    start("first")
    (path,) = view_path().parent.glob("*.json")
    path.write_bytes(b"")
    assert "first" in start()
    screen = start("last")
    assert path.stem in screen and "1 turns" in screen
    assert [m["content"] for m in server.requests[-1]["messages"][1:]] == ["first", "first answer", "last"]
    assert json.loads(path.read_text())["workspace"] == str(Path.cwd())


def test_a_rebuilt_session_keeps_what_undo_took_back_out():
    session = begin(*turns(1, 2, 3))
    undo(session)
    session.log.close()
    view_path().unlink()
    assert plain(reopen()) == [SYSTEM, *turns(1, 2)]


def test_without_its_log_a_session_goes_on_and_can_be_forked_anywhere():
    saved(*turns(1, 2))
    log_path().unlink()
    session = reopen()
    assert plain(session) == [SYSTEM, *turns(1, 2)]
    append(session, *turns(3))
    assert [line.split()[-2:] for line in tree(session)] == [["request", f"{n}"] for n in (1, 2, 3)]
    assert plain(fork(session, request_id("request 3"))) == [SYSTEM, *turns(1, 2, 3)]


def test_the_bare_list_of_lesson_4_loads_and_gets_a_log():
    put([SYSTEM, *turns(1, 2)])
    session = reopen()
    assert plain(session) == [SYSTEM, *turns(1, 2)] and logged() == turns(1, 2)
    assert plain(fork(session, request_id("request 1"))) == [SYSTEM, *turns(1)]
    session.log.close()
    assert plain(reopen()) == [SYSTEM, *turns(1, 2)] and logged() == turns(1, 2)


def test_a_view_edited_by_hand_loads_and_is_listed(start):
    saved(*turns(1))
    edited = json.dumps(view(), indent=4).replace("answer 1", "edited 一")
    view_path().write_text(edited, encoding="utf-8")
    assert plain(reopen()) == [SYSTEM, *turns(1)[:-1], says("edited 一")]
    assert re.search(r"\* x .* in " + re.escape(str(Path.cwd())), start("/new", "/sessions"))


def test_the_first_line_of_a_view_tells_all_but_the_messages():
    session = begin(*turns(1))
    session.plan, session.usage = ["step one"], {"prompt_tokens": 1234}
    append(session, user("request 2"))
    first = view_path().read_bytes().split(b"\n")[0].decode()
    header = json.loads(first + "]}")
    assert set(header) >= {"format", "name", "workspace", "model", "created", "updated", "title", "usage", "plan"}
    assert (header["name"], header["workspace"], header["model"]) == ("x", str(Path.cwd()), "a-model")
    assert (header["title"], header["turns"]) == ("request 1", 2)
    assert header["usage"] == {"prompt_tokens": 1234} and header["plan"] == ["step one"]
    view_path().write_bytes(first.encode() + b"\ngarbage that no list of sessions needs to parse\n]}\n")
    ((_, listed),) = context.saved_sessions()
    assert listed["title"] == "request 1"


def test_1000_messages_the_plan_and_the_usage_survive():  # R144
    messages = turns(*range(200), text='一 \u2028 \\ " \0' * 100)
    session = begin(*messages)
    session.plan = [{"step": "one", "done": True}]
    append(session, user("last"))
    session.usage = {"prompt_tokens": 5, "other": [1]}
    append(session, says("done"))
    session.log.close()
    again = reopen()
    assert plain(again) == [SYSTEM, *messages, user("last"), says("done")]
    assert again.plan == [{"step": "one", "done": True}] and again.usage == {"prompt_tokens": 5, "other": [1]}
    assert again.turns == 201


# --- Files, names, folders ---------------------------------------------------------------------------------------


@posix_only
def test_view_log_and_folders_are_private_from_the_first_moment():  # R143
    code = """
import os, stat, sys, context
from pathlib import Path
os.umask(0o022)
def hook(event, args):
    if event == "os.rename":
        print({oct(path.stat().st_mode & 0o777) for path in Path(args[0]).parent.iterdir()})
sys.addaudithook(hook)
context.append(context.new_session(Path.cwd(), "Be brief."), {"role": "user", "content": "hi"})
"""
    assert child(code).communicate(timeout=10) == ("{'0o600'}\n", "")
    assert {oct(path.stat().st_mode & 0o777) for path in STATE_DIR.rglob("*") if path.is_dir()} == {"0o700"}


@posix_only
def test_an_older_file_that_others_could_read_becomes_private():  # R143
    saved(*turns(1))
    for path in (view_path(), log_path()):
        path.chmod(0o644)
    session = reopen()
    append(session, *turns(2))
    assert {oct(path.stat().st_mode & 0o777) for path in (view_path(), log_path())} == {"0o600"}


NO_NAMES = ["../../x", "../x", "/tmp/x", "a/b", "a\\b", "..", ".", "", " ", ".hidden", "x" * 300, "a\0b", "a\nb", "a:b"]
NO_NAMES += ["CON", "con", "nul.txt", "COM1", "lpt9"]


@pytest.mark.parametrize("name", NO_NAMES, ids=repr)
def test_a_name_that_is_no_file_name_is_refused(name):  # R141
    with pytest.raises(ValueError):
        session_path(name)
    with pytest.raises(ValueError):
        context.save_session(name, [SYSTEM])
    assert not STATE_DIR.exists() or not [path for path in STATE_DIR.rglob("*") if path.is_file()]


@pytest.mark.parametrize("name", ["x", "my-work_2.old", "会话-一", "console", "字" * 60, "x" * 80], ids=lambda n: n[:9])
def test_a_good_name_is_kept_and_survives_a_broken_file(name):  # R141, R137
    saved(*turns(1), name=name)
    assert view_path(name).is_file() and log_path(name).is_file()
    put(b"", name)
    assert plain(reopen(name)) == [SYSTEM, *turns(1)]


def test_the_longest_name_that_is_allowed_survives_a_broken_file():  # three bytes a character
    for length in range(90, 59, -1):
        try:
            session_path("字" * length)
            break
        except ValueError:
            pass
    saved(*turns(1), name="字" * length)
    put(b"", "字" * length)
    assert plain(reopen("字" * length)) == [SYSTEM, *turns(1)]


@pytest.mark.parametrize("folder", ["a b", ".config", "-x", "项目", "🎉", "x" * 200, "con", "a;rm -rf", "_", "..."])
def test_a_folder_of_any_name_gives_a_session_name_that_is_allowed(folder):
    name = context.new_session(Path("/tmp", folder), PROMPT).name
    assert session_path(name).parent == context.SESSION_DIR
    assert re.fullmatch(r".+-\d{8}-\d{6}-[0-9a-f]{4}", name)


def test_two_sessions_of_one_moment_differ(monkeypatch):  # R146
    real = time.strftime
    monkeypatch.setattr(time, "strftime", lambda form, *rest: real(form, time.gmtime(0)))
    names = {context.new_session(Path.cwd(), PROMPT).name for _ in range(3)}
    assert len(names) == 3


def test_a_new_session_never_takes_the_name_of_an_old_one(monkeypatch):  # R146: neither the clock nor chance helps
    real, chance = time.strftime, iter(["aaaa", "aaaa", "bbbb"])
    monkeypatch.setattr(time, "strftime", lambda form, *rest: real(form, time.gmtime(0)))
    monkeypatch.setattr("secrets.token_hex", lambda size: next(chance))
    first = context.new_session(Path.cwd(), PROMPT)
    append(first, *turns(1))
    first.log.close()
    second = context.new_session(Path.cwd(), PROMPT)
    append(second, *turns(2))
    assert plain(reopen(first.name)) == [SYSTEM, *turns(1)] and second.name != first.name


def test_the_latest_session_of_this_folder_is_resumed_and_no_other(
    serve, start, workspace, another_folder, monkeypatch
):
    server = serve("a", "b", "c")  # R147
    start("said here")
    monkeypatch.chdir(another_folder)
    assert "esumed" not in start("said there")
    monkeypatch.chdir(workspace)
    screen = start("again")
    texts = [m["content"] for m in server.requests[-1]["messages"]]
    assert "esumed" in screen and "said here" in texts and "said there" not in texts


def test_of_two_sessions_of_this_folder_the_newest_is_resumed(serve, start):
    server = serve("a", "b", "c")
    start("older")
    start("/new", "newer")
    start("again")
    assert [m["content"] for m in server.requests[-1]["messages"][1:]] == ["newer", "b", "again"]


def test_a_broken_session_of_a_folder_with_a_longer_name_is_not_taken(start, workspace, monkeypatch):  # R147
    (folder := workspace.parent / "workspace-two").mkdir()
    monkeypatch.chdir(folder)
    session = context.new_session(folder, PROMPT)
    append(session, *turns(1))
    session.log.close()
    context.session_path(session.name).write_bytes(b"")
    monkeypatch.chdir(workspace)
    assert "esumed" not in start()


def test_a_broken_session_of_a_folder_with_a_space_is_found(start, workspace, monkeypatch):
    (folder := workspace.parent / "my work").mkdir()
    monkeypatch.chdir(folder)
    session = context.new_session(folder, PROMPT)
    append(session, *turns(1))
    session.log.close()
    context.session_path(session.name).write_bytes(b"")
    assert "esumed" in start()


def test_resuming_a_session_of_another_folder_says_so(serve, start, workspace, another_folder, monkeypatch):  # R147
    server = serve("done")
    saved(*turns(1), name="work")
    monkeypatch.chdir(another_folder)
    screen = start("/resume work", "go on")
    assert str(workspace) in screen and str(another_folder) in screen
    sent = server.requests[-1]["messages"]
    assert sent[1:-1] == turns(1) and str(another_folder) in sent[0]["content"]
    assert str(workspace) not in sent[0]["content"]


@pytest.mark.parametrize(
    "typed, resumed", [("beta", "beta"), ("b", "beta"), ("alpha", "alpha"), ("alp", None), ("alpha-", "alpha-2")]
)
def test_a_unique_beginning_of_a_name_is_enough(typed, resumed, start, monkeypatch, another_folder):
    for name in ("alpha", "alpha-2", "beta"):
        saved(*turns(1), name=name)
    monkeypatch.chdir(another_folder)
    screen = start(f"/resume {typed}")
    assert (f"Resumed {resumed}:" in screen) if resumed else ("2 sessions" in screen and "/sessions" in screen)


@pytest.mark.parametrize("typed", ["nothing", "../../x", "/etc/passwd", "*", "x" * 300])
def test_a_name_that_no_session_has_is_said(typed, start):  # R141
    saved(*turns(1), name="alpha")
    before = view_path("alpha").read_bytes()
    assert "/sessions" in start("/new", f"/resume {typed}")
    assert view_path("alpha").read_bytes() == before
    assert sorted(path.name for path in STATE_DIR.rglob("*") if path.is_file()) == ["alpha.json", "alpha.log.jsonl"]


def test_resuming_the_session_that_is_open_stays_in_it(serve, start):
    serve("a", "b")
    start("first")
    (path,) = view_path().parent.glob("*.json")
    screen = start(f"/resume {path.stem}", "second")
    assert "nother process" not in screen and list(view_path().parent.glob("*.json")) == [path]


def test_one_can_leave_a_session_and_come_back(serve, start):
    server = serve("a", "b")
    start("first")
    (path,) = view_path().parent.glob("*.json")
    screen = start("/new", f"/resume {path.stem}", "second")
    assert "nother process" not in screen
    assert [m["content"] for m in server.requests[-1]["messages"][1:]] == ["first", "a", "second"]


# --- The list ----------------------------------------------------------------------------------------------------

UNREADABLE = {"directory": Path.mkdir, "link to nowhere": lambda path: path.symlink_to("nowhere")}
UNREADABLE |= {"link to itself": lambda path: path.symlink_to(path.name)}


def no_permission(path):
    if os.geteuid() or not Path("/proc/self/mem").exists():
        path.write_bytes(VIEW)
        path.chmod(0)
    else:
        path.symlink_to("/proc/self/mem")  # what even root cannot read


UNREADABLE |= {"unreadable": no_permission}
SEEN_IN_THE_LIST = ["empty", "cut", "NULs at the end", "only NULs", "number"]
FILES = {name: (lambda path, data=BROKEN[name]: path.write_bytes(data)) for name in SEEN_IN_THE_LIST}


@posix_only
@pytest.mark.parametrize("make", [*FILES.values(), *UNREADABLE.values()], ids=[*FILES, *UNREADABLE])
def test_one_bad_file_does_not_spoil_the_list(make, start):  # R138
    for name in ("good-1", "good-2", "good-3"):
        saved(*turns(1), name=name)
    make(view_path("bad"))
    screen = start("/sessions")
    assert all(re.search(rf"^\W*{name} .*1 turns", screen, re.MULTILINE) for name in ("good-1", "good-2", "good-3"))
    assert re.search(r"^\W*bad\.json cannot be read", screen, re.MULTILINE)


def test_the_list_is_newest_first_and_tells_what_is_needed(start, another_folder, workspace, monkeypatch):  # item 4
    session = begin(user("Fix the\n build   please"), says("done"), name="old")
    session.usage["prompt_tokens"] = 12345
    append(session, user("request 2"))
    saved(*turns(1), name="new")
    monkeypatch.chdir(another_folder)
    saved(*turns(1, 2, 3), name="middle")
    for name, hours in {"new": 1, "middle": 3, "old": 24 * 5}.items():
        os.utime(view_path(name), (time.time() - 3600 * hours - 60,) * 2)
    monkeypatch.chdir(workspace)
    session.log.close()
    screen = start("/new", "/sessions").split("\n")
    rows = [line for line in screen if re.match(r"(> )*[* ] (new|middle|old) ", line)]
    assert [re.sub("^(> )*", "", line)[:2] for line in rows] == ["* ", "  ", "* "]
    assert [re.search(r"(new|middle|old) ", line)[1] for line in rows] == ["new", "middle", "old"]
    assert f"last used {session.updated}" in rows[2] and str(workspace) in rows[2]
    assert "2 turns" in rows[2] and "12,345" in rows[2] and str(another_folder) in rows[1]
    assert any("Fix the build please" in line for line in screen)


# --- Two processes -----------------------------------------------------------------------------------------------

HOLDER = """
import sys, context
from pathlib import Path
session = context.open_session("x", "Be brief.", Path.cwd())
print("ready", flush=True)
for text in sys.stdin:
    context.append(session, {"role": "user", "content": text.strip()}, {"role": "assistant", "content": "ok"})
    print("saved", flush=True)
"""


@pytest.fixture
def holder():
    """Another process that has session x open; it appends what it is told."""
    saved(*turns(1))
    process = child(HOLDER)
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate()


def tell(holder, text):
    holder.stdin.write(f"{text}\n")
    holder.stdin.flush()
    assert holder.stdout.readline() == "saved\n"


def test_the_second_process_on_a_session_is_told_and_works_on_a_branch(holder):  # R140
    said = []
    branch = reopen(said=said)
    tell(holder, "from the first")
    append(branch, *turns(2))
    tell(holder, "again from the first")
    append(branch, *turns(3))
    branch.log.close()
    assert len(said) == 1 and "x" in said[0] and branch.name in said[0] and branch.name != "x"
    assert plain(reopen(branch.name)) == [SYSTEM, *turns(1, 2, 3)]
    holder.kill()
    holder.wait()
    first = [*turns(1), user("from the first"), says("ok"), user("again from the first"), says("ok")]
    assert plain(reopen()) == [SYSTEM, *first] and logged() == first


def test_a_second_terminal_in_the_same_folder_gets_a_branch(holder, serve, start):  # R140
    server = serve("done")
    screen = start("hello")
    assert "nother process" in screen and server.requests[0]["messages"][1:] == [*turns(1), user("hello")]
    assert logged() == turns(1)


def test_a_session_is_free_again_after_its_process_was_killed(holder):
    holder.kill()
    holder.wait()
    assert reopen().name == "x"


# --- Tree, fork, undo --------------------------------------------------------------------------------------------


def test_the_tree_shows_branches_compaction_and_where_we_are():  # item 5
    session = begin(*turns(1, 2))
    undo(session)
    append(session, *turns(3, 4))
    compact_by_hand(session, 1)
    append(session, *turns(5))
    lines = tree(session)
    shown = [(m[1], m[2], m[3]) for m in (re.match(r" *(\*?) *(\d+) +(.*)", line) for line in lines) if m]
    ids = {text: request_id(text) for text in (f"request {n}" for n in range(1, 6))}
    assert shown == [("" if n == 2 else "*", ids[f"request {n}"], f"request {n}") for n in range(1, 6)]
    (mark,) = (i for i, line in enumerate(lines) if "compacted" in line)
    assert "request 4" in lines[mark - 1] and "request 5" in lines[mark + 1]
    indent = {line.split()[-1]: len(line) - len(line.lstrip(" *")) for line in lines}
    assert indent["3"] != indent["2"]  # both follow request 1
    assert indent["2"] == indent["1"] and indent["4"] == indent["3"]


def test_the_tree_of_a_new_session_says_there_is_nothing(start):
    assert "no requests" in start("/tree")


ODD = '一 \u2028 \r\n \\ " \x1b[0m \0 café'


def test_a_fork_from_before_a_compaction_has_the_original_texts():  # item 5: byte for byte, also of cleared results
    first = [user(ODD), asks("a", "b"), result("a", ODD * 500), result("b", "é" * 4000), says(ODD)]
    session = begin(*copy.deepcopy(first), *turns(2, 3, 4, 5))
    change(session, "clear", context.clear_old_tool_results([dict(m) for m in session.messages], 1))
    compact_by_hand(session)
    assert ODD not in json.dumps(plain(session))
    branch = fork(session, request_id(ODD))
    assert plain(branch) == [SYSTEM, *first] and branch.turns == 1 and branch.name != session.name
    assert plain(fork(session, request_id("request 4"))) == [SYSTEM, *first, *turns(2, 3, 4)]
    append(branch, *turns(6))
    branch.log.close()
    assert plain(reopen(branch.name)) == [SYSTEM, *first, *turns(6)]


def test_a_fork_can_go_to_what_undo_took_back_and_from_a_fork():
    session = begin(*turns(1, 2))
    undo(session)
    append(session, *turns(3))
    branch = fork(session, request_id("request 2"))
    assert plain(branch) == [SYSTEM, *turns(1, 2)]
    assert plain(fork(branch, request_id("request 1", branch.name))) == [SYSTEM, *turns(1)]
    assert plain(session) == [SYSTEM, *turns(1, 3)]


def test_a_fork_of_an_interrupted_turn_can_be_sent(serve):
    session = begin(user("request 1"), asks("a", "b"), result("a"))
    branch = fork(session, request_id("request 1"))
    server = serve("done")
    talk(branch, "go on")
    assert server.refusals == [] and server.requests[0]["messages"][1] == user("request 1")


@pytest.mark.parametrize("identity", ["", "99", "abc", "-1", "²"])
def test_a_fork_to_nowhere_says_where_the_ids_are(identity, start):
    saved(*turns(1))
    assert "/tree" in start(f"/fork {identity}").replace("/fork", "")
    assert sorted(path.name for path in view_path().parent.iterdir()) == ["x.json", "x.log.jsonl"]


def test_undo_changes_the_view_not_the_files_nor_the_log(serve, start, workspace):
    (workspace / "notes.txt").write_text("x")
    server = serve("first answer", call("list_files", {}), "second answer", "third answer")
    screen = start("first", "second", "/undo", "third")
    assert re.search("Taken back.*files.*second", screen)
    assert [m["content"] for m in server.requests[-1]["messages"][1:]] == ["first", "first answer", "third"]
    (path,) = view_path().parent.glob("*.json")
    assert "notes.txt" in path.with_suffix(LOG).read_text() and "second" not in path.read_text()
    assert (workspace / "notes.txt").read_text() == "x" and server.refusals == []


def test_undo_twice_and_once_too_often(start):
    saved(*turns(1, 2))
    screen = start("/undo", "/undo", "/undo")
    assert re.search("request 2.*request 1.*Nothing", screen, re.DOTALL)
    session = reopen()
    assert plain(session) == [SYSTEM] and session.turns == 0 and logged() == turns(1, 2)


def test_undo_after_a_compaction_keeps_the_summary_and_then_reaches_behind_it():
    session = begin(*turns(1, 2, 3, 4))
    compact_by_hand(session)
    assert [undo(session), undo(session)] == ["request 4", "request 3"]
    assert plain(session) == [SYSTEM, user("[Summary]"), says("Understood.")]
    assert undo(session) == "request 2" and plain(session) == [SYSTEM, *turns(1)]
    session.log.close()
    again = reopen()
    assert plain(again) == [SYSTEM, *turns(1)] and again.turns == 1
    assert [undo(again), undo(again)] == ["request 1", None]
    assert logged() == turns(1, 2, 3, 4)


# --- Repair ------------------------------------------------------------------------------------------------------


def random_history(dice):
    """Any order of well-formed messages, as crashes, other tools and editors leave them."""
    messages = []
    for number in range(dice.randrange(12)):
        kind = dice.choice(["user", "user", "answer", "blank", "step", "step", "step", "system", "orphan"])
        if kind == "user":
            messages.append(user(f"u{number}"))
        elif kind == "answer":
            messages.append(says(f"answer {number}"))
        elif kind == "blank":
            messages.append(dice.choice([says(""), says("\n\n"), user("  "), user("")]))
        elif kind == "system":
            messages.append({"role": "system", "content": f"system {number}"})
        elif kind == "orphan":
            messages.append(result(f"orphan {number}"))
        else:
            ids = [f"c{number}-{i}" for i in range(dice.randint(1, 4))]
            messages.append(asks(*ids, **dice.choice([{}, {"content": None}, {"content": f"text {number}"}])))
            given = [result(i, f"r{n} of {i}") for n in range(2) for i in ids if dice.random() < 0.6 - n * 0.4]
            dice.shuffle(given)
            messages += given
    return messages


def results_given(messages):
    """{call id: the first result that stands in the block of tool messages right after the call}"""
    given, open_ids = {}, set()
    for message in messages:
        if message["role"] == "tool" and message["tool_call_id"] in open_ids:
            given.setdefault(message["tool_call_id"], message["content"])
        elif message["role"] != "tool":
            open_ids = {one["id"] for one in message.get("tool_calls") or []}
    return given


def test_2000_random_histories_are_repaired():  # C14; R037, R041, R043, R045, R047, R048
    dice, dropped = random.Random(14), 0
    for _ in range(2000):
        history = [SYSTEM] * dice.randrange(3) + random_history(dice)
        before = copy.deepcopy(history)
        fixed, _ = repair(history)
        assert history == before  # the messages of the caller stay as they are
        check_sendable(fixed)
        practice_server.check_request({"model": "m", "messages": repair([*history, user("go on")])[0]})
        assert repair(fixed) == (fixed, [])
        texts = [m["content"] for m in history if m["role"] == "user" and m["content"].strip()]
        assert [m["content"] for m in fixed if m["role"] == "user"] == texts
        kept, wanted = results_given(fixed), results_given(history)
        assert all(kept[i] == wanted[i] for i in kept if i in wanted)
        dropped += any(i not in kept for i in wanted)
    assert dropped < 1000  # only those before the first request


def test_what_is_well_formed_is_not_touched():
    assert repair([SYSTEM, *turns(1, 2)]) == ([SYSTEM, *turns(1, 2)], [])


A, B = result("a", "result a"), result("b", "result b")
CALLS = asks("a", "b")
REPAIRS = {  # what is saved after [system, user]; the results that each call must have, None: one that says interrupted
    "R037 no result": ([CALLS], [None, None]),
    "R037 one result": ([CALLS, A], ["result a", None]),
    "R037 only the second result": ([CALLS, B], [None, "result b"]),
    "results swapped": ([CALLS, B, A, says("x")], ["result a", "result b"]),
    "result twice": ([CALLS, A, B, A], ["result a", "result b"]),
    "R048 orphan at the start": ([A, says("x")], []),
    "R048 orphan id": ([CALLS, result("z"), A, B], ["result a", "result b"]),
    "R048 orphan after an answer": ([says("x"), A], []),
    "R043 empty": ([says("")], []),
    "R043 empty between": ([says("one"), says(""), says("two")], []),
    "R045 whitespace": ([says("\n\n")], []),
    "R047 ends with a tool message": ([CALLS, A, B], ["result a", "result b"]),
    "R047 user after tool": ([CALLS, A, B, user("more")], ["result a", "result b"]),
    "two users": ([user("more")], []),
    "two systems": ([says("x"), SYSTEM, user("more"), says("y")], []),
    "empty text beside calls": ([asks("a", "b", content=""), A, B], ["result a", "result b"]),
    "blank text beside calls": ([asks("a", "b", content=" \n"), A, B], ["result a", "result b"]),
    "empty list of calls": ([{**says("x"), "tool_calls": []}], []),
    "no calls and no text": ([{"role": "assistant", "tool_calls": []}], []),
    "null calls": ([{**says("x"), "tool_calls": None}], []),
}


def test_an_id_that_comes_again_gets_a_name_that_no_other_call_has():
    """As after a compaction, which takes away some of the calls that were renamed before."""
    answer = {"role": "assistant", "content": "done"}
    calls = [message for identity in ("c-2", "c", "c") for message in (asks(identity), result(identity))]
    fixed, _ = context.repair([SYSTEM, user("go"), *calls, answer])
    ids = [call["id"] for message in fixed for call in message.get("tool_calls", [])]
    assert len(set(ids)) == 3 and ids[:2] == ["c-2", "c"]
    assert [message["tool_call_id"] for message in fixed if message["role"] == "tool"] == ids


@pytest.mark.parametrize("tail, wanted", REPAIRS.values(), ids=REPAIRS)
def test_a_saved_session_that_no_provider_takes_is_repaired_at_load(tail, wanted, serve, start):
    put([SYSTEM, user("first"), *tail])
    server = serve("done")
    screen = start("/resume x", "go on")
    sent = server.requests[0]["messages"]
    assert server.refusals == [] and "done" in screen
    typed = ["first", *(m["content"] for m in tail if m["role"] == "user"), "go on"]
    assert [m["content"] for m in sent if m["role"] == "user"] == typed
    got = [m["content"] for m in sent if m["role"] == "tool"]
    assert len(got) == len(wanted)
    for text, expected in zip(got, wanted, strict=True):
        assert text == expected if expected else "interrupted" in text
    if wanted is REPAIRS["R043 empty between"][1] and len(tail) == 3 and "one" in str(tail):
        assert [m["content"] for m in sent if m["role"] == "assistant"] == ["one\ntwo"]  # neighbours joined


def test_the_person_is_told_once_what_was_repaired():
    saved(user("first"), asks("a", "b"), result("a"))
    said = []
    session = reopen(said=said)
    assert len(said) == 1 and "without a result" in said[0]
    session.log.close()
    assert plain(reopen(said=said)) == plain(session) and len(said) == 1


def test_the_person_is_told_once_also_when_work_goes_on(serve, start):
    saved(user("first"), asks("a", "b"), result("a"))
    serve("done")
    screen = start("go on")
    assert "done" in screen and screen.count("epaired") == 1


def test_each_fault_is_said_once_however_often_it_occurs():
    saved(user("first"), *[result("z")] * 50)
    said = []
    reopen(said=said)
    assert len(said) == 1 and len(said[0]) < 200


def test_ctrl_c_in_the_first_of_two_calls_leaves_a_session_that_goes_on(serve, terminal, workspace):  # R036
    calls = [
        {"name": "run_shell", "arguments": {"command": f"touch began-{n}; sleep 30"}, "id": f"c{n}"} for n in (1, 2)
    ]
    server = serve({"tool_calls": calls}, "all is well")
    person = terminal()
    person.expect("> ")
    person.type("run both")
    person.expect("[n]o: ")
    person.type("y")
    for _ in range(100):
        if not (workspace / "began-1").exists():
            person.read(0.1)
    person.press("C")
    person.expect("Stopped")
    person.expect("> ")
    person.type("go on")
    person.expect("all is well")
    sent = server.requests[-1]["messages"]
    assert [m.get("tool_call_id") for m in sent if m["role"] == "tool"] == ["c1", "c2"]
    assert server.refusals == [] and sent[-1] == user("go on") and not (workspace / "began-2").exists()


def test_a_dropped_connection_after_a_tool_ran_does_not_run_it_twice(serve, workspace):  # R038
    server = serve(call("run_shell", {"command": "echo ran >> count.txt"}), {"drop": True}, "done")
    session = begin()
    talk(session, "do it")
    talk(session, "go on")
    assert (workspace / "count.txt").read_text() == "ran\n" and server.refusals == []
    assert [m["role"] for m in server.requests[-1]["messages"]] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
    ]
    session.log.close()
    assert plain(reopen()) == [*server.requests[-1]["messages"], says("done")]


def test_a_request_that_failed_is_kept_once_for_each_time_it_was_typed(serve):  # R050
    server = serve(FAILURE, "done")
    session = begin()
    assert "out of order" in talk(session, "hello")
    talk(session, "hello")
    sent = server.requests[-1]["messages"]
    assert [m["role"] for m in sent] == ["system", "user", "assistant", "user"]
    assert [sent[1], sent[3]] == [user("hello")] * 2 and server.refusals == []


# --- Text that is no text ----------------------------------------------------------------------------------------


def test_half_a_character_on_stdin_poisons_nothing(serve):  # R134
    server = serve("one", "two")
    done = pipe(b"\xe5\x93 hi\nagain\n")
    assert (done.code, done.err, server.refusals) == (0, "", [])
    assert "hi" in server.requests[1]["messages"][1]["content"]
    for path in STATE_DIR.rglob("*.json*"):
        assert "hi" in path.read_bytes().decode("utf-8")


HALF = "half \ud83d an emoji"


@pytest.mark.parametrize(
    "reply",
    [{"content": HALF}, call("list_files", {"pattern": HALF}), call("list_files", '{"pattern": "\\ud83d"}')],
    ids=["content", "arguments", "escaped arguments"],
)
def test_half_a_character_in_a_reply_poisons_nothing(reply, serve):  # R134
    server = serve(reply, *["done"] * 2)
    session = begin()
    talk(session, "one")
    talk(session, "two")
    session.log.close()
    assert server.refusals == [] and len(server.requests) >= 2 and session.messages[-1]["content"] == "done"
    assert plain(reopen()) == plain(session)
    assert json.dumps(plain(session), ensure_ascii=False).encode() and log_path().read_bytes().decode()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere file names are Unicode")
def test_a_bad_byte_in_a_file_name_poisons_nothing(serve):  # R134
    Path(os.fsdecode(b"bad\xff.txt")).write_text("x")
    server = serve(call("list_files", {}), "done")
    session = begin()
    talk(session, "list")
    assert server.refusals == [] and session.messages[-1]["content"] == "done"
    assert "bad" in server.requests[1]["messages"][-1]["content"]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere file names are Unicode")
def test_a_bad_byte_in_the_name_of_the_workspace_poisons_nothing(serve, start, workspace, monkeypatch):  # R134
    (folder := workspace.parent / os.fsdecode(b"caf\xe9")).mkdir()
    monkeypatch.chdir(folder)
    server = serve("one", "two")
    start("first")
    assert "esumed" in start("second") and server.refusals == [] and len(server.requests) == 2


@pytest.mark.parametrize("bare", [True, False], ids=["of lesson 4", "of today"])
@pytest.mark.parametrize(
    "tail",
    [[user(HALF), says("x")], [user("x"), says(HALF)], [user("x"), asks("a"), result("a", HALF), says("x")]],
    ids=["request", "answer", "result"],
)
def test_an_old_session_with_half_a_character_loads_and_goes_on(tail, bare, serve, start):  # R134
    messages = [SYSTEM, *tail]
    put(messages if bare else {"format": 1, "log_size": 0, "messages": messages})
    server = serve("done")
    assert "done" in start("/resume x", "go on") and server.refusals == []
    assert sum("an emoji" in (m["content"] or "") for m in server.requests[0]["messages"] if "content" in m) == 1


# --- The system prompt -------------------------------------------------------------------------------------------


def test_the_system_prompt_is_of_today_and_the_same_all_session_long(serve, start, workspace, monkeypatch):
    real = time.strftime

    def the_day_is(day):
        monkeypatch.setattr(time, "strftime", lambda form, *rest: day if form == "%Y-%m-%d" else real(form, *rest))

    def midnight(body):
        the_day_is("2031-02-04")
        return "two"

    the_day_is("2031-02-03")
    (workspace / "AGENTS.md").write_text("Old rule.")
    server = serve("one", call("list_files", {}), midnight, "three", "four")
    start("first", "second", "third")
    (workspace / "AGENTS.md").write_text("New rule.")
    start("fourth")
    prompts = [body["messages"][0]["content"] for body in server.requests]
    assert len(set(prompts[:4])) == 1
    assert "2031-02-03" in prompts[0] and "Old rule." in prompts[0] and str(workspace) in prompts[0]
    assert "2031-02-04" in prompts[4] and "2031-02-03" not in prompts[4]
    assert "New rule." in prompts[4] and "Old rule." not in prompts[4]
    assert not re.search(r"\d:\d\d", prompts[0])
    assert [m["role"] for m in server.requests[4]["messages"]].count("system") == 1


# --- No place to save --------------------------------------------------------------------------------------------


def test_without_a_folder_one_line_is_said_and_all_is_saved_when_it_can_be(workspace):  # item 7
    STATE_DIR.write_text("a file, where the folder should be")
    said = []
    session = begin(*turns(1), said=said)
    append(session, *turns(2))
    assert len(said) == 1 and "memory" in said[0] and "\n" not in said[0]
    assert STATE_DIR.read_text() == "a file, where the folder should be"
    STATE_DIR.unlink()
    append(session, *turns(3))
    session.log.close()
    assert len(said) == 1 and plain(session) == [SYSTEM, *turns(1, 2, 3)] == plain(reopen())
    assert logged() == turns(1, 2, 3)  # the log too: it is what a fork is made of


def test_a_second_trouble_is_said_again():
    said = []
    session = begin(*turns(1), said=said)
    for number in (2, 3):
        view_path().unlink()
        view_path().mkdir()
        append(session, *turns(number))
        view_path().rmdir()
        append(session, *turns(number + 10))
    assert len(said) == 2


def test_a_trouble_that_lasts_is_said_once():
    said = []
    session = begin(*turns(1), said=said)
    view_path().unlink()
    view_path().mkdir()
    for number in range(2, 6):
        append(session, *turns(number))
    assert len(said) == 1


@posix_only
def test_a_full_disk_does_not_end_the_conversation():  # item 7, R137
    code = """
import resource, context
from pathlib import Path
session = context.new_session(Path.cwd(), "Be brief.")
session.name = "x"
def say(text):
    context.append(session, {"role": "user", "content": text}, {"role": "assistant", "content": "ok"})
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
say("one")
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))
say("two" * 3000)
say("three" * 3000)
old = context.load_session("x")
print([message["content"][:5] for message in old], len(session.messages))
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
say("four")
"""
    out, err = child(code).communicate(timeout=10)
    first, second = out.splitlines()
    assert "memory" in first and second == "['Be br', 'one', 'ok'] 7" and err == ""
    texts = ["one", "two" * 3000, "three" * 3000, "four"]
    assert [m["content"] for m in logged() if m["role"] == "user"] == texts
    assert plain(reopen()) == [SYSTEM, *(m for text in texts for m in (user(text), says("ok")))]
    assert sorted(path.name for path in view_path().parent.iterdir()) == ["x.json", "x.log.jsonl"]


@posix_only
def test_leaving_while_the_disk_is_full_is_no_traceback():
    code = """
import resource, context
from pathlib import Path
session = context.new_session(Path.cwd(), "Be brief.")
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
context.append(session, {"role": "user", "content": "two" * 3000})
"""
    process = child(code)
    out, err = process.communicate(timeout=10)
    assert out.count("\n") == 1 and (process.returncode, err) == (0, "")


def test_without_a_home_nothing_is_made_here_and_one_line_says_so(serve, start, workspace, monkeypatch):  # item 7
    monkeypatch.delenv("NAMI_STATE_DIR")
    monkeypatch.setattr(context, "STATE_DIR", Path("~/.nami-agent"))
    monkeypatch.setattr(context, "SESSION_DIR", Path("~/.nami-agent/sessions"))
    server = serve("one", "two")
    screen = start("first", "second")
    assert screen.count("NAMI_STATE_DIR") == 1 and "home" in screen
    assert [m["content"] for m in server.requests[1]["messages"][1:]] == ["first", "one", "second"]
    assert list(workspace.iterdir()) == []


def test_a_state_folder_inside_the_workspace_is_refused(workspace):  # item 7
    done = pipe("hello\n", NAMI_STATE_DIR=str(workspace / "state"))
    assert done.code == 2 and "NAMI_STATE_DIR" in done.err and done.err.count("\n") == 1
    assert list(workspace.iterdir()) == []


def test_a_mistyped_resume_does_not_let_go_of_the_session():
    session = begin(*turns(1))
    with pytest.raises(ValueError, match="no sessions begin with 'wrok'"):
        agent.command("/resume wrok", session, agent.make_console())
    assert session.log and not session.log.closed


def test_undo_forgets_how_large_the_request_was_that_it_takes_back():
    session = begin(*turns(1, 2))
    session.usage["prompt_tokens"] = 30_000
    undo(session)
    assert 0 < session.usage["prompt_tokens"] < 200


def test_a_session_of_which_only_the_log_is_left_is_resumed_by_its_name(start):
    saved(*turns(1, 2))
    view_path().unlink()
    assert "2 turns" in start("/new", "/resume x")


@pytest.mark.parametrize("folder", ["aux.d", "con.x", "nul.txt"])
def test_a_folder_named_like_a_device_of_windows_can_hold_sessions(folder):
    session = context.new_session(Path("/tmp", folder), PROMPT)
    append(session, *turns(1))
    assert session_path(session.name).exists()
