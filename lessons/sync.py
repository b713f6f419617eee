"""Keep the lessons true: every lesson folder is a full copy; what can be derived from them is made or checked here.

  python lessons/sync.py check         report everything that is out of step, change nothing
  python lessons/sync.py write         make the generated text again, copy the last lesson to the top level
  python lessons/sync.py carry K       take the uncommitted edit of lesson K forward through all later lessons
  python lessons/sync.py test [K]      run the numbered tests on every lesson (or on K), and on the lesson before
  python lessons/sync.py diff A [B]    what changes from lesson A to B; `diff 4` means from 3 to 4
  python lessons/sync.py run K [args]  run lesson K's agent in the current folder

Exit code 0: fine, 1: something to repair, 2: wrong arguments.

check  R1 the top level mirrors the last lesson     R2 each lesson declares what it adds, changes and drops
       R3 lessons stay small                        R4 generated text is fresh
       R5 code on a page comes from tested files    R6 pages, links and folders are in order
test   T1 the agent starts and stops without a key  T2 tests numbered up to K pass on lesson K
       T3 tests numbered K fail on lesson K-1: a test that passes there proves nothing about lesson K
"""

import ast
import copy
import difflib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MODULES = ["agent.py", "context.py", "tools.py", "permissions.py"]
PAGES = ["README.md", "README.zh.md"]
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
ROW_TEXTS = ["name", "title", "title_zh", "promise", "promise_zh"]
ROW_LISTS = ["adds", "changes", "drops"]
MAX_CHANGED_LINES, MAX_CHANGED_FUNCTIONS, MAX_TOTAL_LINES, MAX_FUNCTION_LINES = 120, 3, 1500, 50
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
WRITE = "python lessons/sync.py write"

BLOCK = re.compile(r"^<!-- generated: (.+?) -->\n(.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^ *(`{3,}|~{3,})([^`\n]*)\n(.*?)^ *\1[`~]* *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"""\]\(([^)\s]+)[^)]*\)|(?:src|href)="([^"]+)\"""")
# Written so that these patterns do not match themselves: this file is searched too.
PRIVATE = re.compile(r"(?<![\w.])(?:/home/\w|/root[/]|/Users/\w|[A-Za-z]:\\+Users)|\bsk-(?:\w+-)*[A-Za-z0-9]{20,}")


class Fault(Exception):
    """What a person has to put right, shown as one line. A traceback always means a bug in this file."""

    def __init__(self, message, code=1):
        super().__init__(message)
        self.code = code


# ---- reading: lessons, definitions, pages ----


def finding(rule, where, what, fix):
    return f"{rule} {where}: {what} · fix: {fix}"


def label(path):
    """A path the way messages name it: from lessons/ for what is inside a lesson, else from the project folder."""
    inside = path.is_relative_to(HERE) and path.parent != HERE
    return path.relative_to(HERE if inside else ROOT).as_posix()


def read(path):
    """Text of a file with newlines as \\n, so that a Windows checkout gives the same result; "" when there is none."""
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else ""
    except UnicodeDecodeError as error:
        raise Fault(f"{label(path)} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def save(path, text):
    """Write the text if it differs, and say so."""
    if not path.is_file() or read(path) != text:
        path.write_text(text, encoding="utf-8", newline="\n")
        print(f"wrote {path.relative_to(ROOT).as_posix()}")


def rows(text):
    return text.removesuffix("\n").split("\n") if text else []


def written(text):
    """How many lines are not blank: what there is to read, however the functions are spaced."""
    return sum(bool(row.strip()) for row in rows(text))


@functools.cache
def table():
    """lessons.toml as (list of lesson rows, the until table)."""
    try:
        data = tomllib.loads((HERE / "lessons.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Fault(f"R6 lessons/lessons.toml: cannot be read ({error}) · fix: repair the file") from None
    lessons, until = data.get("lesson", []), data.get("until", {})
    are_rows = isinstance(lessons, list) and all(isinstance(row, dict) for row in lessons)
    if not are_rows or not isinstance(until, dict):
        raise Fault("R6 lessons/lessons.toml: wants [[lesson]] tables and an [until] table · fix: repair the file")
    return lessons, until


def last():
    return len(table()[0])


def folder(number):
    return HERE / f"lesson-{number:02d}"


def modules(where):
    """The modules of a folder, {file name: text}, in the order people read them. Lesson 0 is no folder: {}."""
    return {name: read(where / name) for name in MODULES if (where / name).is_file()}


@functools.cache
def definitions(text):
    """Top-level names and methods of a source: {"run" or "Class.method": (nodes, start, end, source)}, lines from 1."""
    found, lines = {}, text.split("\n")

    def note(name, node):
        start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        source = "\n".join(lines[start - 1 : node.end_lineno])
        # The same name twice (a property and its setter, a value built in two steps) is one definition.
        if name in found:
            found[name].nodes.append(node)
            found[name].source += "\n" + source
        else:
            found[name] = SimpleNamespace(nodes=[node], start=start, end=node.end_lineno, source=source)

    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise Fault(f"is not Python: {error}") from None
    for node in tree.body:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            note(node.name, node)
            for method in node.body if isinstance(node, ast.ClassDef) else []:
                if isinstance(method, FUNCTIONS):
                    note(f"{node.name}.{method.name}", method)
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for part in ast.walk(target):  # A, B = 1, 2 has two names
                    if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                        note(part.id, node)
    return found


def same(old, new):
    """Whether two definitions mean the same: positions and comments do not count, docstrings do."""

    def shape(node):
        if isinstance(node, ast.ClassDef):  # methods have names of their own
            node = copy.copy(node)
            node.body = [part for part in node.body if not isinstance(part, FUNCTIONS)]
        return ast.dump(node)

    return old.source == new.source or [*map(shape, old.nodes)] == [*map(shape, new.nodes)]


@functools.cache
def compare(number):
    """What lesson `number` does to the definitions before it.

    Returns adds, changes and drops as lists of "file.py:name", and how many old functions changed.
    A class that is new, gone or changed outside its methods stands for all its methods.
    """
    old, new = (
        {f"{file}:{name}": d for file, text in modules(where).items() for name, d in definitions(text).items()}
        for where in (folder(number - 1), folder(number))
    )
    adds = [name for name in new if name not in old]
    drops = [name for name in old if name not in new]
    changes = [name for name in new if name in old and not same(old[name], new[name])]
    touched = sum(isinstance(new[name].nodes[0], FUNCTIONS) for name in changes)
    whole = {*adds, *drops, *changes}
    adds, changes, drops = ([n for n in names if n.rpartition(".")[0] not in whole] for names in (adds, changes, drops))
    return SimpleNamespace(adds=adds, changes=changes, drops=drops, touched=touched)


def matcher(old, new):
    # A blank line may not hold two versions together, else diffs are cut at every blank line.
    return difflib.SequenceMatcher(lambda line: not line.strip(), rows(old), rows(new), autojunk=False)


@functools.cache
def hunks(old, new):
    """Changed regions with two lines round them, as difflib's grouped opcodes."""
    return [] if old == new else list(matcher(old, new).get_grouped_opcodes(2))


def pairs(a, b):
    """(file, text in lesson a, text in lesson b) for the modules either has; "" where one lacks it."""
    old, new = modules(folder(a)), modules(folder(b))
    return [(name, old.get(name, ""), new.get(name, "")) for name in MODULES if name in old or name in new]


@functools.cache
def size_of_change(number):
    """(lines added, lines removed, changed files) of a lesson; blank lines do not count."""
    plus = minus = 0
    for _, old, new in pairs(number - 1, number):
        for tag, i1, i2, j1, j2 in (step for hunk in hunks(old, new) for step in hunk):
            if tag != "equal":
                minus += sum(bool(line.strip()) for line in rows(old)[i1:i2])
                plus += sum(bool(line.strip()) for line in rows(new)[j1:j2])
    return plus, minus, [name for name, old, new in pairs(number - 1, number) if old != new]


def pages():
    """The README pages that exist, the top level first."""
    folders = [ROOT, *(folder(number) for number in range(1, last() + 1))]
    return [where / name for where in folders for name in PAGES if (where / name).is_file()]


def numbered_tests():
    """The test files that belong to a lesson, by number; the others are for the top level only."""
    return sorted((ROOT / "tests").glob("test_[0-9][0-9]_*.py"))


def fences(text):
    """Code blocks of a page in order: (label after the fence, content)."""
    return [(match[2].strip(), match[3]) for match in FENCE.finditer(text)]


def headings(text):
    return re.findall(r"^(#{1,6}) +(.+?) *$", FENCE.sub("", text), re.MULTILINE)


# ---- making: generated blocks and CHANGES.md ----


def fence(info, text, least=3):
    """A code block whose fence is longer than any run of backticks inside it."""
    marks = "`" * max([least, *(len(run) + 1 for run in re.findall("`{3,}", text))])
    return f"{marks}{info}\n{text.rstrip()}\n{marks}"


def in_language(page, english, chinese):
    return chinese if page.name.endswith(".zh.md") else english


def make_sizes(page, _):
    counts = {name: written(text) for name, text in modules(page.parent).items()}
    unit, total = in_language(page, ("lines that are not blank", "in all"), ("行（不含空行）", "共"))
    parts = [f"`{name}` {count}" for name, count in counts.items()]
    return f"{' · '.join(parts)} · {total} **{sum(counts.values()):,}** {unit}"


def make_lessons(page, _):
    head = in_language(page, "| # | Lesson | What you get | Changed lines |", "| # | 课 | 学完能做什么 | 改动行数 |")
    table_rows = [head, "|---|---|---|---|"]
    for row in table()[0]:
        link = os.path.relpath(folder(row["number"]), page.parent).replace(os.sep, "/")
        link += in_language(page, "/", "/README.zh.md")
        title, promise = (row[in_language(page, key, f"{key}_zh")] for key in ("title", "promise"))
        plus, minus, _ = size_of_change(row["number"])
        table_rows.append(f"| [{row['number']}]({link}) | **{row['name']}** · {title} | {promise} | +{plus} −{minus} |")
    return "\n".join(table_rows)


# agent.py may add tools to the table. What it draws with is not needed for that, and need not be installed to check.
PRINT_SCHEMAS = """
import json, sys, types
sys.path.insert(0, ".")
sys.modules["rich"] = sys.modules["rich.console"] = types.SimpleNamespace(console=None, Console=None)
import agent, tools
print(json.dumps(tools.get_schemas()))
"""


@functools.cache
def schemas(where):
    """The tool schemas of a folder, asked of the code itself in a process of its own: all lessons call it `tools`."""
    command = [sys.executable, "-B", "-c", PRINT_SCHEMAS]
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Fault(f"get_schemas() of tools.py failed: {(done.stderr.strip() or '?').splitlines()[-1]}")
    return [schema["function"] for schema in json.loads(done.stdout.splitlines()[-1])]


def make_tools(page, _):
    table_rows = [in_language(page, "| Tool | What it does | Parameters |", "| 工具 | 作用 | 参数 |"), "|---|---|---|"]
    for tool in schemas(page.parent):
        text = " ".join(tool.get("description", "").split()).replace("|", "\\|")
        given, required = (tool.get("parameters", {}).get(key, ()) for key in ("properties", "required"))
        names = ", ".join(f"`{name}`" if name in required else f"`{name}`?" for name in given)
        table_rows.append(f"| `{tool['name']}` | {text} | {names} |")
    return "\n".join(table_rows)


def make_diffstat(page, _):
    if page.parent == ROOT:
        raise Fault("diffstat works on lesson pages only")
    number = int(page.parent.name[-2:])
    plus, minus, files = size_of_change(number)
    text = f"+{plus} −{minus} {in_language(page, 'lines in ', '行：')}{', '.join(f'`{file}`' for file in files)}"
    words = in_language(page, ("new: ", "changed: ", "dropped: "), ("新增：", "改动：", "去掉："))
    for word, key in zip(words, ROW_LISTS, strict=True):
        if names := getattr(compare(number), key):
            listed = ", ".join(f"`{name}`" for name in names)
            many = in_language(page, f"{len(names)} definitions", f"{len(names)} 个定义")
            text += in_language(page, "; ", "；") + word + (listed if len(names) <= 8 else many)
    return text


def make_code(page, argument):
    """`FILE#SYMBOL` from the folder of the page; `lesson-03/FILE#SYMBOL` stays with that lesson."""
    file, _, symbol = argument.partition("#")
    path = (HERE if re.match(r"lesson-\d\d/", file) else page.parent) / file
    found = definitions(read(path)).get(symbol) if path.suffix == ".py" else None
    if not found:
        raise Fault(f"there is no {symbol or 'symbol'} in {file}")
    return fence("python", textwrap.dedent(found.source))


def make_output(page, argument):
    if not argument or not (page.parent / argument).is_file():
        raise Fault(f"there is no file {argument} next to the page")
    return fence("text", read(page.parent / argument))


MAKERS = {name[5:]: make for name, make in list(globals().items()) if name.startswith("make_")}


def refresh(page):
    """Make the blocks of a page again. Returns the new text, the names of stale blocks, and what could not be made."""
    stale, broken = [], []

    def again(match):
        kind, _, argument = match[1].partition(" ")
        try:
            if kind not in MAKERS:
                raise Fault(f"unknown name; known are {', '.join(MAKERS)}")
            body = MAKERS[kind](page, argument.strip()) + "\n"
        except Fault as fault:
            broken.append(f'block "{match[1]}": {fault}')
            return match[0]
        if body != match[2]:
            stale.append(match[1])
        return f"<!-- generated: {match[1]} -->\n{body}<!-- end -->"

    text = read(page)
    # A marker inside a block means that an end is missing: making the block would eat the text between.
    if len(re.findall("^<!-- generated:", text, re.MULTILINE)) != len(BLOCK.findall(text)):
        return text, [], ["a generated block has no <!-- end --> line of its own"]
    return BLOCK.sub(again, text), stale, broken


def enclosing(text, line):
    """The definition round a line (from 1) as a hunk heading."""
    inside = [(name, d) for name, d in definitions(text).items() if d.start <= line <= d.end]
    if not inside:
        return "top level"
    name, found = inside[-1]  # a method comes after its class
    kind = found.nodes[0]
    return f"def {name}(...)" if isinstance(kind, FUNCTIONS) else f"{'class ' * isinstance(kind, ast.ClassDef)}{name}"


def diff_lines(old, new):
    """A unified diff whose hunk headings name the definition, since readers look for names and not for line numbers."""
    before, after, out = rows(old), rows(new), []
    for hunk in hunks(old, new):
        edits = [step for step in hunk if step[0] != "equal"]
        changed = [(new, j + 1) for _, _, _, j1, j2 in edits for j in range(j1, j2) if after[j].strip()]
        changed += [(old, i + 1) for _, i1, i2, _, _ in edits for i in range(i1, i2)]
        heading = enclosing(*changed[0]) if changed else "blank lines"
        out.append(f"@@ {heading} @@")
        for tag, i1, i2, j1, j2 in hunk:
            out += [f"{' ' if tag == 'equal' else '-'}{line}" for line in before[i1:i2]]
            out += [f"+{line}" for line in after[j1:j2] if tag != "equal"]
    return out


def changes_page(number):
    """Text of a lesson's CHANGES.md: the names first, then the diff, with all that is unchanged left out."""
    plus, minus, files = size_of_change(number)
    first = "Everything is new" if number == 1 else f"Since [lesson {number - 1}](../{folder(number - 1).name}/)"
    first += f": +{plus} −{minus} lines in {', '.join(files) or 'no file'}."
    out = [f"# Lesson {number}: changes", "", first, ""]
    for word, key in zip(("new", "changed", "dropped"), ROW_LISTS, strict=True):
        at = folder(number - 1 if key == "drops" else number)
        prefix = f"../{at.name}/" if key == "drops" else ""
        for file, name in (full.split(":") for full in getattr(compare(number), key)):
            line = definitions(read(at / file))[name].start
            out.append(f"- {word}: [`{file}:{name}`]({prefix}{file}#L{line})")
    for file, old, new in pairs(number - 1, number) if number > 1 else []:
        if lines := diff_lines(old, new):
            out += ["", f"## {file}", "", fence("diff", "\n".join(lines), least=4)]
    out += ["", f"Made by `{WRITE}`; do not edit."]
    return "\n".join(out) + "\n"


# ---- check ----


def layout_faults():
    """R6, first part: what the other rules build on. They only run when this is in order."""
    numbers = [row.get("number") for row in table()[0]]
    if not numbers or numbers != [*range(1, len(numbers) + 1)]:
        yield finding("R6", "lessons/lessons.toml", f"numbers are {numbers}", "number the [[lesson]] rows 1, 2, 3, …")
        return
    for row in table()[0]:
        where = folder(row["number"])
        for key in [key for key in ROW_TEXTS if not isinstance(row.get(key), str) or not row[key]]:
            yield finding("R6", where.name, f"has no {key}", "add it to its row in lessons.toml")
        for key in [key for key in ROW_LISTS if not isinstance(row.get(key, []), list)]:
            yield finding("R6", where.name, f"{key} is not a list", "put it in [ ] in lessons.toml")
        for key, kind in (("budget", int), ("why", str)):
            if not isinstance(row.get(key, kind()), kind):
                fix = f"make it {kind.__name__} in lessons.toml"
                yield finding("R6", where.name, f"{key} is of the wrong type", fix)
        if not (where / "agent.py").is_file():
            yield finding("R6", where.name, "has no agent.py", "add the file, or remove the row from lessons.toml")
    expected = {folder(number).name for number in numbers}
    for path in sorted(path for path in HERE.iterdir() if path.is_dir() and path.name.startswith("lesson")):
        if path.name not in expected:
            yield finding("R6", path.name, "has no row in lessons.toml", "add one, or rename or remove the folder")
    for path in [where / name for where in (ROOT, *map(folder, numbers)) for name in modules(where)]:
        try:
            definitions(read(path))
        except Fault as fault:
            yield finding("R6", label(path), fault, "repair the file")


def mirror_faults():
    """R1: bytes, not text: the copies must be equal for every tool that looks at them."""
    for name in MODULES:
        source, copied = folder(last()) / name, ROOT / name
        if source.is_file() != copied.is_file() or (source.is_file() and source.read_bytes() != copied.read_bytes()):
            yield finding("R1", name, f"differs from {label(source)}", f"edit the lesson, then {WRITE}")
    for path in sorted(ROOT.glob("*.py")):
        if path.name not in MODULES:
            yield finding("R1", path.name, "is no module of the agent", "move it away from the top level")


def declared_faults():
    """R2: names say what happened to them, and the row says what was meant to happen."""
    words = {"adds": "is new", "changes": "changed", "drops": "is gone"}
    for row in table()[0]:
        where, before = folder(row["number"]).name, row["number"] - 1
        for key, word in words.items():
            found = getattr(compare(row["number"]), key)
            # Everything in lesson 1 is new; a list of it would only be one more thing to keep.
            declared = row.get(key, found if before == 0 else [])
            for name in [name for name in found if name not in declared]:
                hint = f", or carry {before} if lesson-{before:02d} was edited" if key == "changes" else ""
                fix = f"add it to {key} in lessons.toml{hint}"
                yield finding("R2", where, f"{name} {word} but is not declared", fix)
            for name in [name for name in declared if name not in found]:
                what = f"{name} is declared in {key} but it is not so"
                yield finding("R2", where, what, f"remove it from {key} in lessons.toml")


def budget_faults():
    """R3: one idea fits into few lines; a lesson that needs more says why."""
    for row in table()[0]:
        number, why = row["number"], row.get("why", "").strip()
        where, texts = folder(number).name, modules(folder(number))
        plus, minus, _ = size_of_change(number)
        budget = row.get("budget", plus if number == 1 else MAX_CHANGED_LINES)
        limit = budget if why or number == 1 else min(budget, MAX_CHANGED_LINES)
        if plus + minus > limit:
            what = f"{plus + minus} changed lines, budget {limit}"
            yield finding("R3", where, what, "split the lesson, or set budget and why in lessons.toml")
        if compare(number).touched > MAX_CHANGED_FUNCTIONS and not why:
            what = f"{compare(number).touched} old functions changed, at most {MAX_CHANGED_FUNCTIONS}"
            yield finding("R3", where, what, "split the lesson, or set why in lessons.toml")
        if (total := sum(map(written, texts.values()))) > MAX_TOTAL_LINES:
            yield finding(
                "R3",
                where,
                f"{total} lines in all that are not blank, at most {MAX_TOTAL_LINES}",
                "make the code shorter",
            )
        for name, text in texts.items():
            for node in [node for node in ast.walk(ast.parse(text)) if isinstance(node, FUNCTIONS)]:
                if (length := node.end_lineno - node.lineno + 1) > MAX_FUNCTION_LINES:
                    yield finding("R3", where, f"{name}:{node.name} has {length} lines", "cut it into functions")


def generated_faults():
    """R4: what a command can make must be what it would make now."""
    for page in pages():
        _, stale, broken = refresh(page)
        yield from (finding("R4", label(page), f'block "{name}" is stale', WRITE) for name in stale)
        yield from (finding("R4", label(page), what, "edit the marker in the page") for what in broken)
    for number in range(1, last() + 1):
        if read(path := folder(number) / "CHANGES.md") != changes_page(number):
            yield finding("R4", label(path), "is stale or missing", WRITE)


def fence_faults():
    """R5: typed code rots, code pulled from tested files does not; both languages show the same code."""
    for page in pages():
        by_hand = BLOCK.sub(lambda match: "" if match[1].startswith("code ") else match[0], read(page))
        for info, body in fences(by_hand):
            if info.split(" ")[0].lower() in ("python", "py", "python3"):
                what = f'python block "{body.strip().splitlines()[0] if body.strip() else ""}" is typed by hand'
                yield finding("R5", label(page), what, "pull it with <!-- generated: code … --> or label it text")
        if page.name == PAGES[0] and (chinese := page.with_name(PAGES[1])).is_file():
            names = [[name for name, _ in BLOCK.findall(read(path))] for path in (page, chinese)]
            if names[0] != names[1]:
                what = f"generated blocks are {', '.join(names[0])}; in {chinese.name} {', '.join(names[1])}"
                yield finding("R5", label(page), what, "give both pages the same blocks")
            ours, theirs = fences(read(page)), fences(read(chinese))
            if ours != theirs:
                at = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False), 1) if a != b), None)
                what = f"code block {at} differs" if at else f"{len(ours)} code blocks here, {len(theirs)}"
                yield finding("R5", label(page), f"{what} in {PAGES[1]}", "make both the same")


def page_faults():
    """R6, pages: both languages, the same shape everywhere, links that lead somewhere."""
    for where in [ROOT, *(folder(row["number"]) for row in table()[0])]:
        for page in [where / name for name in PAGES if not (where / name).is_file()]:
            yield finding("R6", label(page), "is missing", "write it")
        levels = [sorted(level for level, _ in headings(read(where / name))) for name in PAGES]
        if all((where / name).is_file() for name in PAGES) and levels[0] != levels[1]:
            yield finding("R6", label(where / PAGES[1]), f"other headings than {PAGES[0]}", "give both the same levels")
    for page in pages():
        found = [title for level, title in headings(read(page)) if level == "##"]
        if page.parent != ROOT and found != HEADINGS[page.name]:
            yield finding("R6", label(page), f"## headings are {found}", f"use {', '.join(HEADINGS[page.name])}")
        for match in LINK.finditer(re.sub(r"`[^`\n]*`", "", FENCE.sub("", read(page)))):
            target = unquote((match[1] or match[2]).strip("<>").partition("#")[0])
            on_the_web = re.match(r"[A-Za-z][A-Za-z+.-]*:|//", target)
            if target and not on_the_web and not (page.parent / target).exists():
                yield finding("R6", label(page), f"link to {target} leads nowhere", "repair the link")


def file_faults():
    """R6, files: nothing lies about that no page explains, nothing tells whose machine this was."""
    for where in [folder(row["number"]) for row in table()[0]]:
        for path in sorted(where.iterdir()):
            known = path.name in [*MODULES, *PAGES, "CHANGES.md", "__pycache__"]
            if not known and not re.fullmatch(r"transcript.*\.txt|\w+\.svg", path.name):
                yield finding("R6", label(path), "does not belong into a lesson", "move or remove it")
    for path in sorted(path for place in ("README*", "lessons/**/*", "tests/**/*") for path in ROOT.glob(place)):
        if path.is_file() and not re.search(r"__pycache__|\.\w+_cache", path.relative_to(ROOT).as_posix()):
            for number, line in enumerate(path.read_bytes().decode("utf-8", "replace").split("\n"), 1):
                if match := PRIVATE.search(line):
                    what = f'line {number} has a machine path or a key: "{match[0][:9]}…"'
                    yield finding("R6", label(path), what, "remove it")


def test_faults():
    """R6, tests: a number means a lesson, and the until table names tests that exist."""
    for path in [path for path in numbered_tests() if not 1 <= int(path.name[5:7]) <= last()]:
        yield finding("R6", label(path), f"there is no lesson {int(path.name[5:7])}", "correct the number of the file")
    for name, lesson in table()[1].items():
        file, _, test = name.partition("::")
        path = ROOT / "tests" / file
        if not path.is_file() or test.replace("::", ".") not in definitions(read(path)):
            yield finding("R6", "until", f"there is no test {name}", "correct the name in lessons.toml")
        elif not isinstance(lesson, int) or not 1 <= lesson < last():
            yield finding("R6", "until", f"{name} = {lesson}", f"name a lesson from 1 to {last() - 1}")


RULES = [mirror_faults, declared_faults, budget_faults, generated_faults, fence_faults]
RULES += [page_faults, file_faults, test_faults]


def report(faults):
    """Print findings; the exit code is 1 when there is one."""
    faults = list(faults)
    print(*faults, sep="\n", end="\n" if faults else "")
    return int(bool(faults))


def check():
    code = report(layout_faults()) or report(fault for rule in RULES for fault in rule())
    print(f"{last()} lessons: " + ("see above" if code else "in step"))
    return code


# ---- write, carry ----


def mirror():
    """Copy the last lesson to the top level; a module it lacks is removed there."""
    for name in MODULES:
        source, copied = folder(last()) / name, ROOT / name
        if source.is_file() and (not copied.is_file() or source.read_bytes() != copied.read_bytes()):
            copied.write_bytes(source.read_bytes())
            print(f"wrote {name}")
        elif copied.is_file() and not source.is_file():
            copied.unlink()
            print(f"removed {name}")


def write():
    if report(layout_faults()):
        return 1
    mirror()  # first, since the top README shows top-level code
    for row in table()[0]:
        save(folder(row["number"]) / "CHANGES.md", changes_page(row["number"]))
    for page in pages():
        save(page, refresh(page)[0])
    return report(generated_faults())  # what is left could not be made


def git(*arguments):
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)
    except FileNotFoundError:
        raise Fault("carry needs git, and there is none on this machine") from None
    return done.returncode, done.stdout.decode("utf-8", "replace").replace("\r\n", "\n")


def merge(base, theirs, ours, names):
    """Three-way merge of texts, None where there is no file. Returns (text for ours, what happened or "")."""
    if theirs in (base, ours):
        return ours, ""
    if theirs is None or (base is None and ours is not None) or (base is not None and ours is None):
        return ours, "left alone, the file is not on both sides: look at it yourself"
    if ours == base:
        return theirs, "copied"
    with tempfile.TemporaryDirectory() as place:
        paths = [Path(place) / name for name in ("ours", "base", "theirs")]
        for path, text in zip(paths, (ours, base, theirs), strict=True):
            path.write_text(text, encoding="utf-8", newline="\n")
        labels = [part for name in names for part in ("-L", name)]
        code, text = git("merge-file", "-p", *labels, *map(str, paths))
    if code > 127:  # up to 127 it counts conflicts
        raise Fault(f"git merge-file failed on {names[0]}")
    return text, "CONFLICT" if code else "merged" if text != ours else ""


def carry(number):
    """Step by step: what changed in lesson J-1 is merged into J, so a conflict that was settled once stays settled."""
    if git("rev-parse", "--verify", "HEAD")[0]:
        raise Fault("carry compares with the last commit, and there is none: commit first")
    for path in [folder(j) / name for j in range(number, last() + 1) for name in MODULES]:
        if re.search("^<{7} ", read(path), re.MULTILINE):
            raise Fault(f"{label(path)} still has conflict markers: settle them first")
    committed = {name: git("show", f"HEAD:./lessons/{folder(number).name}/{name}") for name in MODULES}
    before = {name: text for name, (code, text) in committed.items() if code == 0}
    after = modules(folder(number))
    if not before:
        raise Fault(f"{folder(number).name} is not in the last commit: commit it before editing it")
    if before == after:
        print(f"{folder(number).name} equals the last commit: nothing to carry")
    for later in range(number + 1, last() + 1):
        ours, merged, conflicts = modules(folder(later)), {}, []
        for name in MODULES:
            names = [f"lesson-{later:02d}", f"lesson-{later - 1:02d} before", f"lesson-{later - 1:02d} edited"]
            text, note = merge(before.get(name), after.get(name), ours.get(name), names)
            if text is not None:
                merged[name] = text
            if text != ours.get(name):
                (folder(later) / name).write_text(text, encoding="utf-8", newline="\n")
            print(f"{folder(later).name}: {name} {note}\n" if note else "", end="")
            conflicts += [f"lessons/{folder(later).name}/{name}"] if note == "CONFLICT" else []
        if conflicts:
            print(f"Stopped. Settle the <<<<<<< marks in {', '.join(conflicts)}", end="")
            print(f", then go on with: python lessons/sync.py carry {later}")
            return 1
        before, after = ours, merged
    mirror()
    print(f"Next: read the carried edits (git diff), then {WRITE}, check, test")
    return 0


# ---- test ----


def clean_environment(lesson, state):
    """The environment without keys and settings of the person, so that a test run is the same everywhere."""
    env = {k: v for k, v in os.environ.items() if not re.search(r"_(API_KEY|TOKEN|BASE_URL)$|^(NAMI|PYTEST)_", k)}
    env |= {"NAMI_LESSON": str(lesson), "NAMI_STATE_DIR": state, "PYTHONDONTWRITEBYTECODE": "1"}
    return env | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONIOENCODING": "utf-8"}


def run_child(lesson, arguments, cwd=None, timeout=600, **settings):
    """Run Python on a lesson with an empty stdin and a state folder of its own. Returns (exit code, output)."""
    with tempfile.TemporaryDirectory() as state, tempfile.TemporaryDirectory() as workspace:
        env = clean_environment(lesson, state) | settings
        how = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        try:
            command = [sys.executable, *arguments]
            done = subprocess.run(command, cwd=cwd or workspace, env=env, timeout=timeout, check=False, **how)
        except subprocess.TimeoutExpired as error:
            return None, f"{(error.stdout or b'')[-2000:].decode('utf-8', 'replace')}\nstopped after {timeout} seconds"
        return done.returncode, done.stdout.decode("utf-8", "replace")


def run_pytest(lesson, files, skipped=()):
    """Run test files on one lesson in a process of its own: module names repeat from lesson to lesson.

    Returns (exit code, names of passed tests, names of failed tests and of files that failed to load, output).
    """
    if not files:  # pytest without a file name would run everything there is
        return 5, [], [], "no test file has such a number"
    # -P keeps the project folder off the path, where a module that the lesson lacks would be found.
    command = ["-P", "-m", "pytest", "-rpfE", "--color=no", "-p", "no:cacheprovider"]
    command += [f"tests/{file}" for file in files] + [f"--deselect=tests/{name}" for name in skipped]
    code, output = run_child(lesson, command, cwd=ROOT)
    summary = output.rpartition("short test summary info")[2]
    found = re.findall(r"^(PASSED|FAILED|ERROR) (?:tests/)?(.+?)(?: - .*)?\r?$", summary, re.MULTILINE)
    return code, [n for word, n in found if word == "PASSED"], [n for word, n in found if word != "PASSED"], output


def test_lesson(number, files):
    """T1, T2 and T3 of one lesson. files: {test file: its number}. Returns what the table shows."""
    start, reports, notes = time.monotonic(), [], []
    # A loopback address needs no key, and nothing answers on port 9.
    agent = str(folder(number) / "agent.py")
    code, output = run_child(number, [agent], timeout=20, OPENAI_BASE_URL="http://127.0.0.1:9/v1")
    checks = [code == 0]
    reports += [] if checks[-1] else [f"T1 lesson {number}: agent.py ended with {code}, not 0\n{output}"]
    over = [name for name, until in table()[1].items() if until < number]
    code, passed, failed, output = run_pytest(number, [f for f, first in files.items() if first <= number], over)
    checks.append(code == 0)
    reports += [] if checks[-1] else [f"T2 lesson {number}: exit code {code}\n{output}"]
    before = []
    for file in [file for file, first in files.items() if first == number > 1]:
        code, proving_nothing, red, output = run_pytest(number - 1, [file])
        checks.append(code != 5 and bool(red))
        before.append(f"{len(red)} of {len(red) + len(proving_nothing)} fail")
        reports += [] if checks[-1] else [f"T3 {file} must fail on lesson {number - 1}, but does not\n{output}"]
        notes += [f"note: passes on lesson {number - 1} too, proves nothing there: {name}" for name in proving_nothing]
    cells = [number, len(passed), len(failed), "ok" if checks[0] else "FAILED", ", ".join(before) or "-"]
    cells.append(time.monotonic() - start)
    return SimpleNamespace(cells=cells, checks=checks, reports=reports, notes=notes)


def test(only=None):
    if report([*layout_faults(), *test_faults()]):
        return 1
    files = {path.name: int(path.name[5:7]) for path in numbered_tests()}
    numbers = [only] if only else range(1, last() + 1)
    print(f"{'lesson':>6} {'passed':>7} {'failed':>7} {'starts':>7}  {'on the lesson before':<22} {'seconds':>7}")
    results = []
    with ThreadPoolExecutor(max_workers=2) as pool:
        for result in pool.map(lambda number: test_lesson(number, files), numbers):
            print("{:>6} {:>7} {:>7} {:>7}  {:<22} {:>7.1f}".format(*result.cells), flush=True)
            results.append(result)
    for line in [line for kind in ("notes", "reports") for result in results for line in getattr(result, kind)]:
        print(line)
    checks = [ok for result in results for ok in result.checks]
    print(f"{sum(checks)} passed, {len(checks) - sum(checks)} failed")
    return int(not all(checks))


# ---- diff, run, the command line ----


def folded_rows(old, new):
    """(mark, text) of each line of a diff for the screen; an unchanged definition of some length is one "…" row."""
    before, after = rows(old), rows(new)
    long = {d.start - 1: d for name, d in definitions(new).items() if "." not in name and d.end - d.start > 2}
    for tag, i1, i2, j1, j2 in matcher(old, new).get_opcodes():
        if tag != "equal":
            yield from (("-", line) for line in before[i1:i2])
            yield from (("+", line) for line in after[j1:j2])
            continue
        while j1 < j2:
            if j1 in long and long[j1].end <= j2:
                yield "…", f"{after[long[j1].nodes[0].lineno - 1]} … {long[j1].end - j1} unchanged lines"
                j1 = long[j1].end
            else:
                yield " ", after[j1]
                j1 += 1


def diff(a, b=None):
    a, b = (a - 1, a) if b is None else (a, b)
    changed = [(name, old, new) for name, old, new in pairs(a, b) if old != new]
    if not sys.stdout.isatty():
        for name, old, new in changed:
            print(f"--- {folder(a).name}/{name}", f"+++ {folder(b).name}/{name}", *diff_lines(old, new), sep="\n")
        return 0
    from rich.console import Console  # only here: everything else runs on the standard library
    from rich.text import Text

    console, styles = Console(highlight=False), {"-": "red", "+": "green", "…": "dim", " ": ""}
    for name, old, new in changed:
        console.print(Text(f"\n{name}: lesson {a} → {b}", "bold"))
        for mark, line in folded_rows(old, new):
            console.print(Text(f"{mark} {line}", styles[mark]), soft_wrap=True)
    console.print(Text(f"{len(pairs(a, b)) - len(changed)} of {len(pairs(a, b))} modules unchanged", "dim"))
    return 0


def run(number, *arguments):
    # Ctrl-C belongs to the agent. A handler, unlike SIG_IGN, is not inherited by the child.
    signal.signal(signal.SIGINT, lambda *_: None)
    code = subprocess.call([sys.executable, str(folder(number) / "agent.py"), *arguments])
    return code if code >= 0 else 128 - code


def lesson_number(text):
    if not text.isdecimal() or not 1 <= int(text) <= last():
        raise Fault(f"{text!r} is not a lesson: type a number from 1 to {last()}", 2)
    return int(text)


# How many lesson numbers each command takes, at least and at most.
COMMANDS = {check: (0, 0), write: (0, 0), carry: (1, 1), test: (0, 1), diff: (1, 2), run: (1, 1)}


def main(arguments):
    """Run one command of the list above. Returns the exit code."""
    for stream in (sys.stdout, sys.stderr):  # Windows consoles may not know the arrows and the Chinese
        stream.reconfigure(encoding="utf-8", errors="replace")
    name, *rest = arguments or ["nothing"]
    if {"-h", "--help", "help"} & {name, *rest[:1]}:
        print(__doc__.strip())
        return 0
    try:
        command = {command.__name__: command for command in COMMANDS}.get(name)
        if not command:
            raise Fault(f"no command {name!r}: use check, write, carry, test, diff or run (--help explains them)", 2)
        least, most = COMMANDS[command]
        numbers, extra = rest[:most], rest[most:]
        if len(numbers) < least or (extra and command is not run):
            wanted = {(0, 0): "no lesson number", (1, 1): "1 lesson number"}.get((least, most))
            raise Fault(f"{name} takes {wanted or f'{least} to {most} lesson numbers'} (see --help)", 2)
        return command(*map(lesson_number, numbers), *extra)
    except Fault as fault:
        print(f"sync.py: {fault}", file=sys.stderr)
        return fault.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
