"""Lesson 2: the table of tools, arguments as models really send them, and each tool on real files and processes."""

import inspect
import json
import os
import signal
import time
from pathlib import Path

import practice_server
import pytest
import tools
from conftest import LESSON, call, run_turn

LIMIT = 8000  # characters of a result
DEEP = "[" * 100_000
needs_posix = pytest.mark.skipif(os.name != "posix", reason="POSIX shell, signals and named pipes")


def is_error(text):
    return text.startswith("Error") and len(text) < 1000 and bool(text.encode())  # encode: no lone surrogate inside


# --- The table ---


@pytest.mark.parametrize("name", tools.TOOLS)
def test_schema_is_the_signature_of_the_function(name):
    entry = tools.TOOLS[name]
    parameters = inspect.signature(entry["function"]).parameters.values()
    schema = entry["schema"]
    assert entry["name"] == name and entry["description"]
    assert list(schema["properties"]) == [p.name for p in parameters]
    assert schema["required"] == [p.name for p in parameters if p.default is p.empty]
    types = {str: "string", int: "integer", bool: "boolean"}
    assert [schema["properties"][p.name]["type"] for p in parameters] == [types[p.annotation] for p in parameters]
    assert all(field["description"] for field in schema["properties"].values())


@pytest.mark.parametrize(
    "name, required, optional",
    [
        ("read_file", ["path"], ["offset", "limit"]),
        ("write_file", ["path", "content"], []),
        ("edit_file", ["path", "old", "new"], ["replace_all"]),
        ("list_files", [], ["pattern"]),
        ("run_shell", ["command"], ["timeout"]),
    ],
)
def test_tool_takes_the_fields_the_design_names(name, required, optional):
    schema = tools.TOOLS[name]["schema"]
    assert schema["required"] == required and list(schema["properties"]) == required + optional


def test_schemas_are_accepted_by_a_strict_provider_and_never_change():
    practice_server.check_tools(tools.get_schemas())
    assert [schema["function"]["name"] for schema in tools.get_schemas()] == list(tools.TOOLS)
    assert json.dumps(tools.get_schemas()) == json.dumps(tools.get_schemas())


# --- execute: bad arguments are text for the model ---


@pytest.mark.parametrize(
    "name, arguments, told",
    [
        ("read_file", "", "path"),  # R003: blank counts as no fields
        ("read_file", " \n", "path"),
        ("read_file", None, "path"),
        ("read_file", "{}", "path"),
        ("write_file", '{"path": "new"}', "content"),
        ("read_file", "null", "object"),  # R005
        ("read_file", "[]", "object"),
        ("read_file", "3", "object"),
        ("read_file", '"notes.txt"', "object"),
        ("read_file", ["notes.txt"], "object"),
        ("read_file", '{"path": "notes.txt"', "JSON"),  # R001
        ("read_file", "{'path': 'notes.txt'}", "JSON"),
        ("read_file", '{"path": "notes.txt"}}', "JSON"),
        ("read_file", DEEP, "JSON"),
        ("read_file", f'{{"path": {DEEP}', "JSON"),
        ("read_file", f'{{"path": "notes.txt", "limit": {"9" * 5000}}}', "Error"),
        ("read_file", '{"path": null}', "path"),
        ("read_file", '{"path": 3}', "path"),
        ("read_file", {"path": ["notes.txt"]}, "path"),
        ("read_file", {"path": {"name": "notes.txt"}}, "path"),
        ("read_file", {"path": "notes.txt", "line": 3}, "line"),
        ("read_file", {"path": "notes.txt", "line": 3}, "offset"),  # the fields there are
        ("read_file", {"path": "notes.txt", "limit": "many"}, "limit"),  # R023
        ("read_file", {"path": "notes.txt", "limit": "30.5"}, "limit"),
        ("read_file", {"path": "notes.txt", "limit": 1.5}, "limit"),
        ("read_file", {"path": "notes.txt", "limit": True}, "limit"),
        ("read_file", {"path": "notes.txt", "limit": "--5"}, "limit"),
        ("read_file", {"path": "notes.txt", "limit": 0}, "limit"),
        ("read_file", {"path": "notes.txt", "offset": -1}, "offset"),
        ("read_file", {"path": "notes.txt", "offset": 10**400}, "offset"),
        ("read_file", '{"path": "notes.txt", "offset": 1e999}', "offset"),
        ("read_file", '{"path": "notes.txt", "offset": NaN}', "offset"),
        ("edit_file", {"path": "notes.txt", "old": "milk", "new": "tea", "replace_all": "maybe"}, "replace_all"),
        ("edit_file", {"path": "notes.txt", "old": "milk", "new": "tea", "replace_all": 1}, "replace_all"),
        ("run_shell", {"command": "touch made", "timeout": 0}, "timeout"),
        ("run_shell", {"command": "touch made", "timeout": -1}, "timeout"),
        ("run_shell", {"command": ["touch", "made"]}, "command"),
        ("run_shell", '{"command": "touch made', "run_shell"),  # R001: never run from what could be guessed
        ("run_shell", {"command": "touch made \0"}, "null"),
        ("read_file", {"path": ""}, "Error"),
        ("read_file", {"path": "a\0b"}, "Error"),
        ("read_file", {"path": "x" * 300}, "Error"),
        ("read_file", {"path": "\ud800"}, "Error"),
        ("read_file", '{"path": "\\ud800"}', "Error"),
        ("write_file", {"path": "", "content": "x"}, "Error"),
        ("write_file", {"path": "\ud800", "content": "x"}, "Error"),
        ("write_file", {"path": "a\0b", "content": "x"}, "Error"),
    ],
)
def test_bad_arguments_give_a_short_error_and_change_nothing(workspace, name, arguments, told):
    (workspace / "notes.txt").write_bytes(b"buy milk\n")
    result = tools.execute(name, arguments)
    assert is_error(result) and told in result
    assert [path.name for path in workspace.iterdir()] == ["notes.txt"]
    assert (workspace / "notes.txt").read_bytes() == b"buy milk\n"


@pytest.mark.parametrize("name", ["search_web", "Read_File", "", None, 3, "\ud800"])
def test_unknown_tool_is_told_the_real_names(name):  # R022
    result = tools.execute(name, "{}")
    assert is_error(result) and all(real in result for real in tools.TOOLS)


def test_broken_arguments_are_shown_in_part_with_the_fields_of_the_tool():  # R001
    result = tools.execute("run_shell", '{"command": "ls ' + "x" * 100_000)
    assert is_error(result) and all(part in result for part in ("run_shell", "ls xxx", "command", "timeout"))


@pytest.mark.parametrize(
    "name, sent, meant",
    [
        ("run_shell", {"command": "ls", "timeout": "30"}, {"command": "ls", "timeout": 30}),  # R023
        ("run_shell", {"command": "ls", "timeout": 30.0}, {"command": "ls", "timeout": 30}),
        ("list_files", {"pattern": None}, {}),
        ("list_files", None, {}),  # R003
        ("list_files", " ", {}),
        ("read_file", '{"path": "7"}', {"path": "7"}),
    ],
)
def test_arguments_with_one_exact_meaning_are_taken(name, sent, meant):
    assert tools.parse_arguments(name, sent) == meant


@pytest.mark.parametrize("said, meant", [("true", True), ("false", False), ("False", False), (True, True)])
def test_false_as_text_means_false(said, meant):  # R023
    fields = tools.parse_arguments("edit_file", {"path": "a", "old": "b", "new": "c", "replace_all": said})
    assert fields["replace_all"] is meant


def test_long_result_keeps_its_head_and_says_how_much_is_missing(workspace):
    (workspace / "long").write_text("x" * 8998)
    result = tools.execute("read_file", {"path": "long"})  # with its number and the tab: 9,000 characters
    assert result[:LIMIT] == "1\t" + "x" * (LIMIT - 2)
    note = result[LIMIT:]
    assert "1000 characters omitted" in note and "省略 1000 字符" in note and len(note) < 100


def test_result_of_exactly_the_limit_is_whole(workspace):
    (workspace / "long").write_text("字" * (LIMIT - 2))
    assert tools.execute("read_file", {"path": "long"}) == "1\t" + "字" * (LIMIT - 2)


# --- End to end: what the model sent goes into the history as every provider takes it back ---


@pytest.mark.parametrize(
    "sent",
    ['{"path": "notes', "", " ", None, "null", "[]", "3", '"x"', {"path": "notes.txt"}, '{"path": "\\ud800"}', DEEP],
)
def test_arguments_of_any_kind_leave_a_history_that_can_be_sent(serve, workspace, sent):
    made = {"id": "call_1", "type": "function", "function": {"name": "read_file", "arguments": sent}}
    server = serve({"message": {"tool_calls": [made]}}, "done")
    assert run_turn("go").answer == "done" and server.refusals == []
    stored = server.requests[1]["messages"][-2]["tool_calls"][0]["function"]["arguments"]
    assert isinstance(json.loads(stored), dict)


def test_broken_arguments_are_stored_as_an_empty_object(serve):
    server = serve(call("read_file", '{"path": "notes'), "done")
    run_turn("go")
    asked, told = server.requests[1]["messages"][-2:]
    assert asked["tool_calls"][0]["function"]["arguments"] == "{}" and "notes" in told["content"]


def test_arguments_already_decoded_are_run_and_stored_as_text(serve, workspace):  # R006
    (workspace / "notes.txt").write_text("buy milk\n")
    made = {"id": "call_1", "type": "function", "function": {"name": "read_file", "arguments": {"path": "notes.txt"}}}
    server = serve({"message": {"tool_calls": [made]}}, "done")
    run_turn("go")
    asked, told = server.requests[1]["messages"][-2:]
    assert "buy milk" in told["content"]
    assert json.loads(asked["tool_calls"][0]["function"]["arguments"]) == {"path": "notes.txt"}


@pytest.mark.parametrize("name", ["search_web", "Read_File", "", "read file", "x" * 65, None])
def test_unknown_tool_asks_nobody_and_does_not_block_the_session(serve, name):  # R022
    server = serve(call(name, {}), "done")
    turn = run_turn("go", ask=lambda question: pytest.fail(f"asked: {question}"))
    assert turn.answer == "done" and server.refusals == []
    assert "list_files" in server.requests[1]["messages"][-1]["content"]


def test_several_calls_with_failures_are_answered_once_each_in_order(serve, workspace):  # R035, R039
    (workspace / "notes.txt").write_text("buy milk\n")
    (workspace / "folder").mkdir()
    wanted = [
        ("read_file", {"path": "folder"}),
        ("nothing", {}),
        ("read_file", "{"),
        ("read_file", {"path": "notes.txt"}),
    ]
    server = serve({"tool_calls": [{"name": name, "arguments": arguments} for name, arguments in wanted]}, "done")
    assert run_turn("go").answer == "done" and server.refusals == []
    asked, *told = server.requests[1]["messages"][-5:]
    assert [message["tool_call_id"] for message in told] == [made["id"] for made in asked["tool_calls"]]
    assert [message["content"].startswith("Error") for message in told] == [True, True, True, False]


# --- read_file ---


def read(**fields):
    return tools.execute("read_file", {"path": "file", **fields})


@pytest.fixture
def file(workspace):
    return workspace / "file"


def test_read_file_numbers_the_lines(file):
    file.write_text("one\n\n  three\n")
    assert [line.split("\t") for line in read().split("\n")] == [["1", "one"], ["2", ""], ["3", "  three"]]


def test_read_file_shows_a_part_and_says_how_to_read_on(file):
    file.write_text("".join(f"line {number}\n" for number in range(1, 11)))
    *lines, note = read(offset=3, limit=2).split("\n")
    assert lines == ["3\tline 3", "4\tline 4"]
    assert "10 lines" in note and "offset 5" in note
    assert read(offset=9, limit=5).split("\n") == ["9\tline 9", "10\tline 10"]


def test_read_file_past_the_end_says_how_long_the_file_is(file):
    file.write_text("1\n2\n3\n")
    assert read(offset=3) == "3\t3"
    assert is_error(read(offset=4)) and "3" in read(offset=4)


@pytest.mark.parametrize(
    "data, shown",
    [
        (b"no line end", ["1\tno line end"]),
        (b"a\r\nb\r\n", ["1\ta", "2\tb"]),
        (b"a\x0cb\x1cc\nd\n", ["1\ta\x0cb\x1cc", "2\td"]),  # no editor counts these as line ends
        ("a\u2028b\nc".encode(), ["1\ta\u2028b", "2\tc"]),
        (b"\xff\xe9t\xe9\n", ["1\t\ufffd\ufffdt\ufffd"]),
        ("你好\n".encode(), ["1\t你好"]),
    ],
)
def test_read_file_counts_lines_as_editors_do(file, data, shown):
    file.write_bytes(data)
    assert read().split("\n") == shown


def test_read_file_says_that_a_file_is_empty(file):
    file.touch()
    assert "empty" in read() and not is_error(read())


@needs_posix
def test_read_file_refuses_what_is_no_file(workspace):
    os.mkfifo(workspace / "pipe")  # reading it would wait for ever
    (workspace / "folder").mkdir()
    os.symlink("loop", workspace / "loop")
    for path in ("pipe", "folder", "loop", "missing"):
        result = tools.execute("read_file", {"path": path})
        assert is_error(result) and path in result


# --- write_file ---


@pytest.mark.parametrize("text, size", [("a\r\nb\n", 5), ("你好\n", 7), ("", 0), ("\ufeffbom", 6)])
def test_write_file_makes_folders_and_writes_exactly_these_bytes(workspace, text, size):
    result = tools.execute("write_file", {"path": "new/deep/file", "content": text})
    data = (workspace / "new/deep/file").read_bytes()
    assert data == text.encode() and len(data) == size
    assert f"{size} bytes" in result and "new/deep/file" in result


def test_write_file_that_cannot_be_encoded_leaves_the_old_file(file):
    file.write_bytes(b"old")
    assert is_error(tools.execute("write_file", {"path": "file", "content": "half \ud83d"}))
    assert file.read_bytes() == b"old"


@needs_posix
def test_write_file_refuses_what_is_no_file(workspace):
    (workspace / "file").write_bytes(b"old")
    (workspace / "folder").mkdir()
    os.mkfifo(workspace / "pipe")
    reader = os.open(workspace / "pipe", os.O_RDONLY | os.O_NONBLOCK)  # without one, writing would wait for ever
    results = [tools.execute("write_file", {"path": p, "content": "x"}) for p in ("folder", "file/below", "pipe")]
    os.close(reader)
    assert list(map(is_error, results)) == [True, True, True]
    assert (workspace / "file").read_bytes() == b"old"


# --- edit_file ---


def edit(old, new, **more):
    return tools.execute("edit_file", {"path": "file", "old": old, "new": new, **more})


@pytest.mark.parametrize("data", [b"abc\n", b""])
@pytest.mark.parametrize("replace_all", [False, True])
def test_edit_file_refuses_an_empty_old_text(file, data, replace_all):  # R096
    file.write_bytes(data)
    result = edit("", "X", replace_all=replace_all)
    assert is_error(result) and "empty" in result and file.read_bytes() == data


def test_edit_file_counts_the_places_and_refuses_more_than_one(file):  # R097
    file.write_bytes(b"x = 1\ny = 2\nx = 1\n")
    result = edit("x = 1", "x = 3")
    assert is_error(result) and "2 times" in result
    assert file.read_bytes() == b"x = 1\ny = 2\nx = 1\n"


@pytest.mark.parametrize("yes", [True, "true"])
def test_edit_file_replaces_all_when_asked(file, yes):  # R097, R023
    file.write_bytes(b"x = 1\ny = 2\nx = 1\n")
    assert "2" in edit("x = 1", "x = 3", replace_all=yes)
    assert file.read_bytes() == b"x = 3\ny = 2\nx = 3\n"


@pytest.mark.parametrize(
    "before, old, new, after",
    [
        (b"a\nb\nc\n", "b\n", "", b"a\nc\n"),
        (b"a\r\nb\r\nc", "b", "B", b"a\r\nB\r\nc"),  # R086
        (b"\xef\xbb\xbfa\r\nb\r\n", "a", "A", b"\xef\xbb\xbfA\r\nb\r\n"),
        (b"a\x00b\x0cc\n", "b", "B", b"a\x00B\x0cc\n"),
        ("价格：１\n".encode(), "价格", "总价", "总价：１\n".encode()),
    ],
)
def test_edit_file_changes_only_the_bytes_of_the_edit(file, before, old, new, after):
    file.write_bytes(before)
    assert not is_error(edit(old, new)) and file.read_bytes() == after


@pytest.mark.parametrize(
    "data, old, new",
    [
        (b"buy milk\n", "Buy", "x"),  # not there
        (b"caf\xe9 milk\n", "milk", "tea"),  # not UTF-8: writing it back would spoil the other bytes
        (b"buy milk\n", "milk", "half \ud83d"),
        (b"buy milk\n", "1\tbuy", "x"),  # copied with its line number
    ],
)
def test_edit_file_that_cannot_be_done_leaves_the_file(file, data, old, new):
    file.write_bytes(data)
    assert is_error(edit(old, new)) and file.read_bytes() == data


# --- list_files ---


@pytest.fixture
def tree(workspace, tmp_path):
    outside = tmp_path / "outside"
    paths = ["a.py", "b.py", "notes.txt", "src/b.py", "src/ab.py", "src/deep/b.py", "src2/b.py", "app/[id]/page.tsx"]
    hidden = [".git/config", ".venv/b.py", "node_modules/b.py", "src/__pycache__/b.py"]
    for path in (workspace / path for path in [*paths, *hidden, outside / "b.py"]):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    if os.name == "posix":
        os.symlink(outside, workspace / "link")
    return paths


def listed(pattern):
    return tools.execute("list_files", {"pattern": pattern}).splitlines()


@pytest.mark.parametrize("pattern", ["*", ".", "./", "", "**", "**/*"])
def test_list_files_lists_all_but_hidden_folders_and_links_to_elsewhere(tree, pattern):
    assert sorted(listed(pattern)) == sorted(tree)


@pytest.mark.parametrize(
    "pattern, found",
    [
        ("src", ["src/ab.py", "src/b.py", "src/deep/b.py"]),
        ("src/", ["src/ab.py", "src/b.py", "src/deep/b.py"]),
        ("./src", ["src/ab.py", "src/b.py", "src/deep/b.py"]),
        ("src/**/*.py", ["src/ab.py", "src/b.py", "src/deep/b.py"]),
        ("**/*.txt", ["notes.txt"]),
        ("**/b.py", ["b.py", "src/b.py", "src/deep/b.py", "src2/b.py"]),
        ("src/**/b.py", ["src/b.py", "src/deep/b.py"]),
        ("notes.txt", ["notes.txt"]),
        ("app/[id]", ["app/[id]/page.tsx"]),  # a folder's own name, common in web projects
        ("app/[id]/page.tsx", ["app/[id]/page.tsx"]),
    ],
)
def test_list_files_finds_what_the_pattern_says(tree, pattern, found):
    assert sorted(listed(pattern)) == found


def test_list_files_by_ending_lists_files_of_that_ending_only(tree):
    found = listed("*.py")
    assert {"a.py", "b.py"} <= set(found) and all(path.endswith(".py") for path in found)


@pytest.mark.parametrize("pattern", ["*.rs", "missing", "link", "[", "../*"])
def test_list_files_says_that_nothing_matches(tree, pattern):
    (said,) = listed(pattern)
    assert "no files match" in said and pattern in said


@needs_posix
def test_list_files_with_a_name_that_is_not_utf8_stays_text(workspace):  # R134
    Path(os.fsdecode(b"caf\xe9.txt")).touch()
    assert tools.execute("list_files", {}).encode() == b"caf?.txt"


# --- run_shell ---


def shell(command, **more):
    return tools.execute("run_shell", {"command": command, **more})


def read_pid(path):
    for _ in range(500):
        if path.exists() and path.read_text().endswith("\n"):
            return int(path.read_text())
        time.sleep(0.01)
    raise AssertionError(f"{path} was not written")


def is_gone(pid):
    """True once the process has ended; one that its new parent has not yet collected has ended, too."""
    for _ in range(500):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        stat = Path(f"/proc/{pid}/stat")
        if stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.01)
    return False


@needs_posix
@pytest.mark.parametrize(
    "command, said",
    [
        ("true", ["status 0", "no output"]),
        ("false", ["status 1", "no output"]),
        ("exit 3", ["status 3", "no output"]),
        ("no-such-command-here", ["status 127", "not found"]),
        ("echo out; echo err >&2; exit 2", ["status 2", "out\nerr\n"]),
        ("echo before; kill -9 $$", ["SIGKILL", "before"]),
        ("kill -TERM $$", ["SIGTERM"]),
        ("echo before; kill -40 $$", ["40", "before"]),  # a signal without a name
        (r"printf '\377\376\200abc'", ["status 0", "\ufffdabc"]),  # R076
        (r"printf '\304\343\272\303 GBK'", ["status 0", "GBK"]),
        (r"printf 'a\000b'", ["status 0", "a", "b"]),
        ("test -t 0 || pwd", ["status 0", "/workspace"]),
    ],
)
def test_run_shell_states_how_the_command_ended_and_what_it_printed(stage, command, said):  # R075
    result = shell(command, timeout=5)
    assert all(part in result for part in said) and not is_error(result)
    assert json.dumps(result, ensure_ascii=False).encode()


@needs_posix
def test_run_shell_cannot_take_what_the_person_types(stage):
    ours, keyboard = os.dup(0), os.pipe()
    os.write(keyboard[1], b"for the agent\n")
    os.close(keyboard[1])
    os.dup2(keyboard[0], 0)
    try:
        result = shell("cat", timeout=5)
    finally:
        os.dup2(ours, 0)
    assert os.read(keyboard[0], 100) == b"for the agent\n"
    assert "status 0" in result and "no output" in result


@needs_posix
def test_run_shell_output_cut_still_states_the_exit_status(stage):
    result = shell("head -c 20000 /dev/zero | tr '\\0' x; exit 7")
    assert "status 7" in result[:LIMIT] and "省略" in result[LIMIT:]


@needs_posix
def test_run_shell_timeout_kills_the_command_and_all_it_started(workspace):
    script = "echo before; sleep 97 & echo $! > child; sh -c 'echo $$ > grandchild; sleep 97; true' | cat"
    result = shell(script, timeout=1)
    assert "killed" in result and "1 second" in result and "before" in result
    assert is_gone(read_pid(workspace / "child")) and is_gone(read_pid(workspace / "grandchild"))


@needs_posix
def test_run_shell_does_not_wait_for_what_runs_in_the_background(workspace):
    result = shell("sleep 97 & echo $! > child; echo started", timeout=5)
    os.kill(read_pid(workspace / "child"), signal.SIGKILL)
    assert "status 0" in result and "started" in result


@needs_posix
def test_run_shell_with_a_timeout_beyond_all_clocks_leaves_nothing_running(stage):
    result = shell("sleep 0.3", timeout=10**400)
    with pytest.raises(ChildProcessError):  # this process has no child left
        os.waitpid(-1, os.WNOHANG)
    assert result


@needs_posix
def test_ctrl_c_stops_the_command_and_answers_every_call(serve, terminal, workspace):  # R036
    batch = [("run_shell", {"command": "echo $$ > pid; sleep 97; true"}), ("list_files", {})]
    server = serve({"tool_calls": [{"name": name, "arguments": fields} for name, fields in batch]}, "second answer")
    person = terminal()
    person.expect("> ")
    person.type("go")
    if LESSON >= 3:
        person.expect("Allow?")
        person.type("y")
    pid = read_pid(workspace / "pid")
    person.press("C")
    person.expect("Stopped")
    person.expect("> ")
    assert is_gone(pid)
    person.type("again")
    person.expect("second answer")
    asked, *told = [m for m in server.requests[1]["messages"] if m.get("tool_calls") or m["role"] == "tool"]
    assert [message["tool_call_id"] for message in told] == [made["id"] for made in asked["tool_calls"]]
    assert server.refusals == []
