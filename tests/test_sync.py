"""lessons/sync.py on toy lessons made in a temporary folder: each finding appears when broken, and not before."""

import contextlib
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SYNC = Path(__file__).resolve().parent.parent / "lessons" / "sync.py"

HELLO = 'def hello():\n    """Greet."""\n    return "hello"\n'
TAIL = '\n\nif __name__ == "__main__":\n    print(hello())\n'
FILLER = "\n\ndef filler():\n    a = 1\n    b = 2\n    c = 3\n    return a + b + c\n"
ASK = '\n\nclass Ask:\n    def yes(self):\n        return hello() == "hello"\n'
TOOLS = """
def get_schemas():
    properties = {"path": {"type": "string"}, "limit": {"type": "integer"}}
    parameters = {"type": "object", "properties": properties, "required": ["path"]}
    return [{"type": "function", "function": {"name": "read", "description": "Read | it", "parameters": parameters}}]
"""
CODE = {
    1: {"agent.py": HELLO + FILLER + TAIL},
    2: {"agent.py": HELLO + FILLER + ASK + TAIL},
    3: {"agent.py": HELLO + FILLER + ASK.replace("yes", "no") + TAIL, "tools.py": TOOLS.lstrip()},
}
ROW = """
[[lesson]]
number = {n}
name = "{name}"
title = "The {name}"
title_zh = "第{n}课"
promise = "You see {name}"
promise_zh = "看到{name}"
{lists}
"""
LISTS = {
    1: "",
    2: 'adds = ["agent.py:Ask"]',
    3: 'adds = ["agent.py:Ask.no", "tools.py:get_schemas"]\ndrops = ["agent.py:Ask.yes"]',
}
HEADINGS = {
    "README.md": [
        "The problem",
        "The idea",
        "The diff",
        "How it works",
        "Try it",
        "What can go wrong",
        "Exercise",
        "Next",
    ],
    "README.zh.md": ["问题", "思路", "改动", "工作原理", "试一试", "可能出错的地方", "练习", "下一课"],
}
TOP_PAGE = "# Toy\n\n" + "".join(
    f"<!-- generated: {name} -->\n<!-- end -->\n\n"
    for name in ("sizes", "lessons", "code agent.py#hello", "code lesson-02/agent.py#Ask.yes")
)


def put(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")


def edit(path, old, new):
    text = path.read_text(encoding="utf-8")
    assert old in text
    put(path, text.replace(old, new, 1))


def sync(root, *arguments, cwd=None):
    """Run sync.py of a toy tree in this process, fresh each time. Returns (exit code, output)."""
    if "run" in arguments:
        return sync_process(root, *arguments, cwd=cwd)
    spec = importlib.util.spec_from_file_location("toy_sync", root / "lessons" / "sync.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with contextlib.chdir(cwd or root.parent), contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = module.main(list(arguments))
    out.flush()
    return code, out.buffer.getvalue().decode("utf-8")


def sync_process(root, *arguments, cwd=None):
    """The same as a program of its own: what a child prints goes straight to the screen."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("COV")}
    done = subprocess.run(
        [sys.executable, "-B", str(root / "lessons" / "sync.py"), *arguments],
        cwd=cwd or root.parent,
        env=env,
        check=False,
        capture_output=True,
        encoding="utf-8",
        stdin=subprocess.DEVNULL,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """A tree of three lessons that is in step; tests work on copies of it."""
    root = tmp_path_factory.mktemp("whole") / "toy"
    lessons = root / "lessons"
    put(lessons / "sync.py", SYNC.read_text(encoding="utf-8"))
    put(lessons / "lessons.toml", "".join(ROW.format(n=n, name=f"step{n}", lists=LISTS[n]) for n in LISTS))
    for number, files in CODE.items():
        where = lessons / f"lesson-{number:02d}"
        for name, text in files.items():
            put(where / name, text)
        put(where / "transcript.txt", "> hi\nhello\n")
        put(where / "curve.svg", "<svg/>\n")
        for page, titles in HEADINGS.items():
            blocks = "<!-- generated: diffstat -->\n<!-- end -->\n\n<!-- generated: output transcript.txt -->\n<!-- end -->\n"
            put(where / page, "# Lesson\n\n" + "".join(f"## {title}\n\n" for title in titles) + blocks)
    put(root / "README.md", TOP_PAGE)
    put(root / "README.zh.md", TOP_PAGE)
    code, output = sync(root, "write")
    assert code == 0, output
    return root


@pytest.fixture
def toy(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "toy"))


def git(root, *arguments):
    identity = ["-c", "user.name=toy", "-c", "user.email=toy@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True)


@pytest.fixture
def committed(toy):
    git(toy, "init", "-q")
    git(toy, "add", "-A")
    git(toy, "commit", "-qm", "toy")
    return toy


def test_a_whole_tree_is_green_and_write_changes_nothing_more(toy):
    assert sync(toy, "check") == (0, "3 lessons: in step\n")
    assert sync(toy, "write") == (0, "")


def test_generated_text_says_what_the_code_says(toy):
    edit(toy / "README.md", "# Toy\n", "# Toy\n\n<!-- generated: tools -->\n<!-- end -->\n")
    assert sync(toy, "write") == (0, "wrote README.md\n")
    page = (toy / "README.md").read_text(encoding="utf-8")
    assert "`agent.py` 13 · `tools.py` 4 · in all **17** lines that are not blank" in page
    assert "| [2](lessons/lesson-02/) | **step2** · The step2 | You see step2 | +3 −0 |" in page
    assert "| `read` | Read \\| it | `path`, `limit`? |" in page
    assert '```python\ndef hello():\n    """Greet."""\n    return "hello"\n```' in page
    assert "```python\ndef yes(self):\n" in page
    chinese = (toy / "README.zh.md").read_text(encoding="utf-8")
    assert "| [2](lessons/lesson-02/README.zh.md) | **step2** · 第2课 | 看到step2 | +3 −0 |" in chinese
    lesson = (toy / "lessons/lesson-03/README.md").read_text(encoding="utf-8")
    assert "+5 −1 lines in `agent.py`, `tools.py`; new: `agent.py:Ask.no`, `tools.py:get_schemas`; " in lesson
    assert "```text\n> hi\nhello\n```" in lesson


def test_changes_page_folds_what_is_unchanged(toy):
    page = (toy / "lessons/lesson-03/CHANGES.md").read_text(encoding="utf-8")
    assert "- new: [`agent.py:Ask.no`](agent.py#L14)\n" in page
    assert "- dropped: [`agent.py:Ask.yes`](../lesson-02/agent.py#L14)\n" in page
    assert "````diff\n@@ def Ask.no(...) @@\n \n class Ask:\n-    def yes(self):\n+    def no(self):\n" in page
    assert "filler" not in page
    first = (toy / "lessons/lesson-01/CHANGES.md").read_text(encoding="utf-8")
    assert "Everything is new" in first
    assert "````" not in first


def test_a_line_changed_in_one_middle_copy_names_both_lessons(toy):
    edit(toy / "lessons/lesson-02/agent.py", "b = 2", "b = 20")
    code, output = sync(toy, "check")
    assert code == 1
    for number in (2, 3):
        expected = (
            f"R2 lesson-0{number}: agent.py:filler changed but is not declared · fix: add it to changes in lessons.toml"
        )
        assert expected in output


def test_comments_are_no_change_but_docstrings_are(toy):
    for number in (2, 3):
        edit(toy / f"lessons/lesson-0{number}/agent.py", "a = 1", "a = 1  # why")
    assert "R2" not in sync(toy, "check")[1]
    edit(toy / "lessons/lesson-03/agent.py", "Greet.", "Greet them.")
    assert "R2 lesson-03: agent.py:hello changed" in sync(toy, "check")[1]


def new_function(toy):
    edit(toy / "lessons/lesson-03/agent.py", "class Ask", "def extra():\n    pass\n\n\nclass Ask")


def false_claim(toy):
    edit(toy / "lessons/lessons.toml", '"agent.py:Ask"', '"agent.py:Ask", "agent.py:Gone"')


def broken_mirror(toy):
    edit(toy / "agent.py", "c = 3", "c = 4")


def lost_module(toy):
    (toy / "tools.py").unlink()


def stray_module(toy):
    put(toy / "common.py", "")


def long_lesson(toy):
    put(toy / "lessons/lesson-03/permissions.py", "".join(f"A{n} = {n}\n" for n in range(130)))


def long_function(toy):
    put(toy / "lessons/lesson-03/permissions.py", "def f():\n" + "    pass\n" * 50)


def many_changes(toy):
    for number in (2, 3):
        text = "".join(f"\n\ndef f{n}():\n    return {number}\n" for n in range(4))
        edit(toy / f"lessons/lesson-0{number}/agent.py", ASK[:10], text + ASK[:10])


def stale_block(toy):
    edit(toy / "README.md", 'return "hello"', 'return "hallo"')


def stale_changes(toy):
    edit(toy / "lessons/lesson-02/CHANGES.md", "+class Ask", "+class Asks")


def unknown_block(toy):
    edit(toy / "README.md", "generated: sizes", "generated: size")


def unknown_symbol(toy):
    edit(toy / "README.md", "agent.py#hello", "agent.py#hallo")


def open_block(toy):
    edit(toy / "README.md", "<!-- end -->\n", "")


def typed_python(toy):
    for page in ("README.md", "README.zh.md"):
        edit(toy / page, "# Toy", "# Toy\n\n```python\nprint(1)\n```\n")


def other_fence(toy):
    edit(toy / "README.zh.md", "# Toy", "# Toy\n\n```sh\npython agent.py\n```\n")


def no_chinese(toy):
    (toy / "lessons/lesson-02/README.zh.md").unlink()


def other_heading(toy):
    edit(toy / "lessons/lesson-02/README.md", "## The idea", "## Idea")


def fewer_headings(toy):
    edit(toy / "README.zh.md", "# Toy", "# Toy\n\n## Toy\n")


def stray_file(toy):
    put(toy / "lessons/lesson-02/notes.txt", "")


def machine_path(toy):
    put(toy / "tests/notes.txt", "fine\nsee " + "/ho" + "me/ann/x\n")


def key(toy):
    put(toy / "tests/notes.txt", "s" + "k-" + "a1" * 12)


def dead_link(toy):
    edit(toy / "README.md", "# Toy", "# Toy\n\n[web](https://example.org) [top](#toy) [gone](docs/gone.md)\n")


def gap(toy):
    edit(toy / "lessons/lessons.toml", "number = 2", "number = 4")


def odd_folder(toy):
    (toy / "lessons/lesson-4").mkdir()


def no_promise(toy):
    edit(toy / "lessons/lessons.toml", 'promise_zh = "看到step2"', "")


def broken_code(toy):
    put(toy / "lessons/lesson-02/agent.py", "def (:\n")


def lost_test(toy):
    put(toy / "tests/test_04_more.py", "")


def unknown_until(toy):
    edit(toy / "lessons/lessons.toml", "\n", '[until]\n"test_01_step1.py::test_gone" = 2\n')


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (new_function, "R2 lesson-03: agent.py:extra is new but is not declared · fix: add it to adds"),
        (false_claim, "R2 lesson-02: agent.py:Gone is declared in adds but"),
        (broken_mirror, "R1 agent.py: differs from lesson-03/agent.py · fix: "),
        (lost_module, "R1 tools.py: differs from lesson-03/tools.py · fix: "),
        (stray_module, "R1 common.py: "),
        (long_lesson, "R3 lesson-03: 136 changed lines, budget 120 · fix: "),
        (long_function, "R3 lesson-03: permissions.py:f has 51 lines · fix: "),
        (many_changes, "R3 lesson-03: 4 old functions changed, at most 3 · fix: "),
        (stale_block, 'R4 README.md: block "code agent.py#hello" is stale · fix: python lessons/sync.py write'),
        (stale_changes, "R4 lesson-02/CHANGES.md: is stale or missing · fix: python lessons/sync.py write"),
        (unknown_block, 'R4 README.md: block "size": unknown name'),
        (unknown_symbol, 'R4 README.md: block "code agent.py#hallo": there is no hallo in agent.py'),
        (open_block, "R4 README.md: a generated block has no <!-- end -->"),
        (typed_python, 'R5 README.md: python block "print(1)" is typed by hand · fix: pull it with'),
        (other_fence, "R5 README.md: code block 1 differs in README.zh.md"),
        (no_chinese, "R6 lesson-02/README.zh.md: is missing"),
        (other_heading, "R6 lesson-02/README.md: ## headings are "),
        (fewer_headings, "R6 README.zh.md: other headings than README.md"),
        (stray_file, "R6 lesson-02/notes.txt: does not belong"),
        (machine_path, "R6 tests/notes.txt: line 2 has a machine path or a key"),
        (key, "R6 tests/notes.txt: line 1 has a machine path or a key"),
        (dead_link, "R6 README.md: link to docs/gone.md leads nowhere"),
        (gap, "R6 lessons/lessons.toml: numbers are [1, 4, 3]"),
        (odd_folder, "R6 lesson-4: has no row in lessons.toml"),
        (no_promise, "R6 lesson-02: has no promise_zh"),
        (broken_code, "R6 lesson-02/agent.py: is not Python: "),
        (lost_test, "R6 tests/test_04_more.py: there is no lesson 4"),
        (unknown_until, "R6 until: there is no test test_01_step1.py::test_gone"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_check_finds(toy, damage, expected):
    damage(toy)
    before = {path: path.read_bytes() for path in toy.rglob("*") if path.is_file()}
    code, output = sync(toy, "check")
    assert code == 1
    assert [line for line in output.splitlines() if line.startswith(expected)], output
    assert before == {path: path.read_bytes() for path in toy.rglob("*") if path.is_file()}


def test_a_reason_lifts_the_budget(toy):
    long_lesson(toy)
    edit(toy / "lessons/lessons.toml", 'name = "step3"', 'name = "step3"\nbudget = 150')
    assert "budget 120" in sync(toy, "check")[1]
    edit(toy / "lessons/lessons.toml", "budget = 150", 'budget = 150\nwhy = "a table"')
    assert "R3" not in sync(toy, "check")[1]


def test_write_repairs_the_mirror_and_the_text(toy):
    for damage in (broken_mirror, stale_block, stale_changes):
        damage(toy)
    put(toy / "context.py", "")
    code, output = sync(toy, "write")
    assert code == 0
    lines = ["wrote agent.py", "removed context.py", "wrote lessons/lesson-02/CHANGES.md", "wrote README.md"]
    assert output.splitlines() == lines
    assert sync(toy, "check")[0] == 0


def test_write_leaves_a_page_with_an_open_block_alone(toy):
    open_block(toy)
    before = (toy / "README.md").read_bytes()
    assert sync(toy, "write")[0] == 1
    assert (toy / "README.md").read_bytes() == before


def test_carry_takes_a_fix_to_the_last_lesson_and_the_top(committed):
    edit(committed / "lessons/lesson-01/agent.py", '"hello"', '"hello there"')
    code, output = sync(committed, "carry", "1")
    assert code == 0, output
    assert "lesson-02: agent.py merged\nlesson-03: agent.py merged\nwrote agent.py\n" in output
    for where in ("lessons/lesson-02", "lessons/lesson-03", "."):
        assert 'return "hello there"' in (committed / where / "agent.py").read_text()
    assert "class Ask" in (committed / "agent.py").read_text()
    assert "merged" not in sync(committed, "carry", "1")[1]  # a second time there is nothing left to do


def test_carry_copies_equal_files_and_new_modules(committed):
    put(committed / "lessons/lesson-02/context.py", "A = 1\n")
    edit(committed / "lessons/lesson-03/tools.py", "integer", "number")
    git(committed, "commit", "-qam", "more")
    code, output = sync(committed, "carry", "2")
    assert (code, "lesson-03: context.py copied" in output) == (0, True), output
    assert (committed / "context.py").read_text() == "A = 1\n"


def test_carry_stops_at_a_conflict_and_goes_on_after_it(committed):
    edit(committed / "lessons/lesson-02/agent.py", 'hello() == "hello"', 'hello() == "other"')
    git(committed, "commit", "-qam", "lesson 2 reads differently")
    for text in ('"hello"\n', '"hi"\n'):
        put(committed / "lessons/lesson-03/agent.py", CODE[3]["agent.py"].replace('"hello"\n', text, 1))
    git(committed, "commit", "-qam", "lesson 3 says hi")
    edit(committed / "lessons/lesson-01/agent.py", 'return "hello"', 'return "hello there"')
    code, output = sync(committed, "carry", "1")
    assert code == 1
    assert "lesson-02: agent.py merged\nlesson-03: agent.py CONFLICT\n" in output
    assert "lessons/lesson-03/agent.py, then go on with: python lessons/sync.py carry 3\n" in output
    broken = (committed / "lessons/lesson-03/agent.py").read_text()
    assert "<<<<<<< lesson-03" in broken
    assert "hello there" not in (committed / "agent.py").read_text()
    code, output = sync(committed, "carry", "3")
    assert (code, "lesson-03/agent.py still has conflict markers" in output) == (1, True), output
    put(committed / "lessons/lesson-03/agent.py", CODE[3]["agent.py"].replace('"hello"', '"hi there"', 1))
    assert sync(committed, "carry", "3")[0] == 0
    assert '"hi there"' in (committed / "agent.py").read_text()


def test_carry_needs_a_commit(toy):
    git(toy, "init", "-q")
    assert sync(toy, "carry", "1") == (
        1,
        "sync.py: carry compares with the last commit, and there is none: commit first\n",
    )


CONFTEST = """import os, sys
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "lessons", "lesson-0" + os.environ["NAMI_LESSON"]))
"""
TEST_1 = """import agent, os
def test_hello():
    assert agent.hello() == "hello"
def test_old():
    assert not hasattr(agent, "Ask")
def test_no_keys():
    assert "OPENAI_API_KEY" not in os.environ
"""
TEST_2 = "import agent\ndef test_ask():\n    agent.Ask()\ndef test_easy():\n    pass\n"
TEST_3 = "import tools\ndef test_tools():\n    assert tools.get_schemas()\n"


@pytest.fixture
def tested(toy):
    for name, text in {"conftest": CONFTEST, "test_01_a": TEST_1, "test_02_b": TEST_2, "test_03_c": TEST_3}.items():
        put(toy / f"tests/{name}.py", text)
    edit(toy / "lessons/lessons.toml", "\n", '[until]\n"test_01_a.py::test_old" = 1\n')
    return toy


def test_numbered_tests_run_in_both_directions(tested, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    code, output = sync(tested, "test")
    assert code == 0, output
    lines = output.splitlines()
    assert [line.split()[:4] for line in lines[1:4]] == [
        ["1", "3", "0", "ok"],
        ["2", "4", "0", "ok"],
        ["3", "5", "0", "ok"],
    ]
    assert "1 of 2 fail" in lines[2]
    assert "note: passes on lesson 1 too, proves nothing there: test_02_b.py::test_easy" in output
    assert lines[-1] == "8 passed, 0 failed"


def test_each_kind_of_failure_is_reported(tested):
    put(tested / "tests/test_02_b.py", "def test_easy():\n    pass\n")  # proves nothing about lesson 2
    edit(tested / "lessons/lesson-02/agent.py", "print(hello())", "raise SystemExit(3)")
    edit(tested / "lessons/lesson-02/agent.py", 'return "hello"', 'return "bye"')
    code, output = sync(tested, "test", "2")
    assert code == 1
    assert "T1 lesson 2: agent.py ended with 3, not 0" in output
    assert "T2 lesson 2: exit code 1" in output
    assert "assert 'bye' == 'hello'" in output
    assert "T3 test_02_b.py must fail on lesson 1, but does not" in output
    assert output.endswith("0 passed, 3 failed\n")


def test_an_empty_test_file_is_a_fault(tested):
    put(tested / "tests/test_03_c.py", "")
    code, output = sync(tested, "test", "3")
    assert (code, "T3 test_03_c.py must fail on lesson 2" in output) == (1, True), output


def test_a_lesson_without_tests_is_a_fault(toy):
    code, output = sync(toy, "test", "1")
    assert (code, output.splitlines()[-1]) == (1, "1 passed, 1 failed"), output
    assert "no test file has such a number" in output


def test_diff_without_a_terminal_is_plain_text(toy):
    code, output = sync(toy, "diff", "2")
    assert code == 0
    assert output.startswith("--- lesson-01/agent.py\n+++ lesson-02/agent.py\n@@ ")
    assert "+class Ask:\n" in output
    assert sync(toy, "diff", "1", "2") == (0, output)
    assert "+++ lesson-03/tools.py" in sync(toy, "diff", "1", "3")[1]


def test_diff_on_a_screen_folds_unchanged_functions(toy, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(toy / "lessons"))
    monkeypatch.delitem(sys.modules, "sync", raising=False)
    sync_module = __import__("sync")
    try:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        assert sync_module.diff(3) == 0
    finally:
        del sys.modules["sync"]
    output = re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out)
    assert "def filler(): … 5 unchanged lines" in output
    assert "-     def yes(self):\n+     def no(self):\n" in output
    assert "a = 1" not in output


def test_run_passes_arguments_and_the_exit_code_through(toy, tmp_path):
    put(toy / "lessons/lesson-02/agent.py", "import os, sys\nprint(os.getcwd(), sys.argv[1:])\nsys.exit(7)\n")
    here = tmp_path / "work"
    here.mkdir()
    code, output = sync(toy, "run", "2", "--help", "a b", cwd=here)
    assert (code, output) == (7, f"{here.resolve()} ['--help', 'a b']\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["carry"], "carry takes 1 lesson number"),
        (["carry", "x"], "'x' is not a lesson: type a number from 1 to 3"),
        (["test", "4"], "'4' is not a lesson: type a number from 1 to 3"),
        (["diff", "1", "2", "3"], "diff takes 1 to 2 lesson numbers"),
        (["check", "1"], "check takes no lesson number"),
        (["paint"], "no command 'paint'"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(whole, arguments, message):
    code, output = sync(whole, *arguments)
    assert (code, len(output.splitlines())) == (2, 1)
    assert output.startswith(f"sync.py: {message}")


def test_help_and_nothing(whole):
    assert sync(whole, "--help")[0] == sync(whole, "check", "--help")[0] == 0
    assert "carry K" in sync(whole, "--help")[1]
    assert sync(whole)[0] == 2
