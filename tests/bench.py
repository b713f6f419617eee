"""How fast, how large, how well kept. Nothing here passes or fails; compare within one run.

python tests/bench.py           times and memory of one lesson: the last, or NAMI_LESSON
python tests/bench.py context   what the same work costs in lessons 4, 8 and 9, and with nothing managed; minutes
python tests/bench.py picture   draw prompt_tokens over the steps of one such run, for the pages of lessons 8 and 9
"""

import io
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from conftest import CODE, LESSON, ROOT, STATE_DIR, Terminal, as_session, context, practice_server, run_turn
from rich.console import Console
from rich.table import Table

RUNS = 5
CONSOLE = Console()


def median_of(measure):
    return statistics.median(measure() for _ in range(RUNS))


def time_command(*arguments):
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, cwd="/tmp")
    return time.perf_counter() - start


def time_to_prompt():
    """Seconds from starting the agent at a terminal until it waits for the first request."""
    start = time.perf_counter()
    person = Terminal()
    person.expect("> ")
    seconds = time.perf_counter() - start
    person.press("D")
    person.exit_code()
    person.close()
    return seconds


def time_step(count, size=2000):
    """Seconds of our own code in one step with `count` messages of `size` characters: the turn less its model call."""
    os.environ["NAMI_WINDOW"] = "100000000"  # else it would be compacted from lesson 8 on
    import agent

    with practice_server.start(["fine"], window=10**9) as server:
        client = agent.make_client(server.url, "none")
        waited = time_calls(client)
        conversation = [{"role": "system", "content": "system"}, *texts(count, size)]
        arguments = ["go", as_session(conversation, CONSOLE) if LESSON >= 6 else conversation]
        if LESSON >= 3:
            arguments.append(agent.PermissionManager())
        start = time.perf_counter()
        agent.run(*arguments, client=client, console=Console(file=io.StringIO()))
        return time.perf_counter() - start - sum(waited)


def time_calls(client):
    """Return a list that will hold the seconds of each model call of `client`."""
    create, waited = client.chat.completions.create, []

    def timed(**request):
        start = time.perf_counter()
        try:
            return create(**request)
        finally:
            waited.append(time.perf_counter() - start)

    client.chat.completions.create = timed
    return waited


def peak_memory():
    """MB of one turn at 1,000 messages, the whole process."""
    code = "import bench, resource; bench.time_step(1000); print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT / "tests")
    return int(done.stdout) / (1024 if sys.platform != "darwin" else 1024**2)


def texts(count, size=2000):
    return [{"role": ("user", "assistant")[i % 2], "content": f"{i} ".ljust(size, "x")} for i in range(count)]


def time_saving():
    """Seconds to save one more message in a session of 1,000 messages of 2 kB."""
    session = as_session([{"role": "system", "content": "system"}, *texts(1000)], CONSOLE)
    start = time.perf_counter()
    context.append(session, {"role": "user", "content": "x" * 2000})
    return time.perf_counter() - start


def time_resume(count):
    """Seconds to open a session of ten messages whose log has `count` records before them."""
    session = as_session([{"role": "system", "content": "system"}, *texts(10)], CONSOLE)
    session.log.close()
    log = context.session_path(session.name, context.LOG)
    line = json.dumps({"id": 0, "parent": None, "time": "", "kind": "message", "message": texts(1)[0]}) + "\n"
    old = log.read_bytes()
    log.write_bytes((line * count).encode() + old)
    view = context.session_path(session.name)
    view.write_text(view.read_text().replace(f'"log_size": {len(old)}', f'"log_size": {log.stat().st_size}'))
    start = time.perf_counter()
    again = context.open_session(session.name, "system", CODE)
    seconds = time.perf_counter() - start
    again.log.close()
    return seconds


def time_list(count):
    """Seconds to read the headers of `count` sessions of 200 kB."""
    shutil.rmtree(STATE_DIR)
    session = as_session([{"role": "system", "content": "system"}, *texts(100)], CONSOLE)
    view = context.session_path(session.name)
    for i in range(count):
        shutil.copy(view, view.with_name(f"copy-{i}.json"))
    start = time.perf_counter()
    assert len(list(context.saved_sessions())) == count + 1
    seconds = time.perf_counter() - start
    shutil.rmtree(STATE_DIR)
    return seconds


def session_rows():
    yield "save one message, 1,000 of 2 kB in the session", f"{median_of(time_saving) * 1000:.1f} ms"
    yield "resume, log of 10 messages", f"{median_of(lambda: time_resume(0)) * 1000:.1f} ms"
    yield "resume, log of 100,000 messages", f"{time_resume(100_000) * 1000:.1f} ms"
    yield "list 10,000 sessions of 200 kB", f"{time_list(10_000) * 1000:.0f} ms"


def rows():
    yield "python -c pass", f"{median_of(lambda: time_command('-c', 'pass')) * 1000:.0f} ms"
    yield "python -c 'import openai'", f"{median_of(lambda: time_command('-c', 'import openai')) * 1000:.0f} ms"
    os.environ.update(OPENAI_BASE_URL="http://127.0.0.1:9/v1")
    yield "start to prompt", f"{median_of(time_to_prompt) * 1000:.0f} ms"
    del os.environ["OPENAI_BASE_URL"]
    yield "start to prompt, practice model", f"{median_of(time_to_prompt) * 1000:.0f} ms"
    time_step(2)  # imports
    for count, size in ((10, 2000), (100, 2000), (1000, 2000), (1000, 250)):
        seconds = median_of(lambda count=count, size=size: time_step(count, size))
        yield f"our time in a step, {count:,} messages of {size:,}", f"{seconds * 1000:.1f} ms"
    shutil.rmtree(STATE_DIR, ignore_errors=True)
    yield "peak memory, 1,000 messages", f"{peak_memory():.0f} MB"


# The same work in lessons 4, 8 and 9.

LESSONS = (4, 8, 9)
ENGLISH = "file {} line {}: water the mint, tie up the beans, note heat and wind"
CHINESE = "文件{}第{}行：" + "给薄荷浇水，把豆子绑好，记下今天的气温和风向，再看看番茄上有没有虫子；" * 3
SUMMARY = "This is a summary, no more. " * 80  # about as long as those of real models


@dataclass
class Load:
    """One request: the model reads files, some in each step, writes one, and answers."""

    name: str
    steps: int = 60
    reads: int = 1  # in each step
    size: int = 4000  # characters of a result
    line: str = ENGLISH
    window: int = 32_000  # the server refuses what is larger
    told: int = 32_000  # NAMI_WINDOW
    ratio: float = 4  # ASCII characters a token, as the server counts


LARGE = {"steps": 30, "size": 12_730, "window": 20_000, "ratio": 5.3}  # 12 KB, and the numbers of the lines
LOADS = [
    Load("60 × 1 read of 4,000, English, window 32,000"),
    Load("60 × 4 reads of 4,000, English, window 32,000", reads=4),
    Load("60 × 10 reads of 4,000, English, window 32,000", reads=10),
    Load("60 × 4 reads of 4,000, Chinese, window 32,000", reads=4, line=CHINESE),
    Load("30 × 1 read of 12 KB, window 20,000", told=20_000, **LARGE),
    Load("30 × 1 read of 12 KB, 20,000, told 1,000,000", told=1_000_000, **LARGE),
]
DRAWN = Load("80 steps of 4 reads of 4,000 Chinese characters, window 32,000", 80, reads=4, line=CHINESE)


def write_files(load):
    for number in range(load.steps * load.reads):
        lines, room = [], load.size
        while (room := room - len(f"{len(lines) + 1}\t{load.line.format(number, len(lines))}\n")) > 0:
            lines.append(load.line.format(number, len(lines)))
        Path(f"{number}.txt").write_text("\n".join(lines), encoding="utf-8")


def make_model(load, arrived):
    """Return a script item that plays the model. `arrived` gets the characters of results that each step brought."""
    steps = itertools.count()

    def reply(body):
        if "tools" not in body:
            return SUMMARY
        step = next(steps)
        arrived.append(sum(len(part["content"]) for part in body["messages"][-load.reads :] if part["role"] == "tool"))
        if step < load.steps:
            paths = [f"{step * load.reads + i}.txt" for i in range(load.reads)]
            return {"tool_calls": [{"name": "read_file", "arguments": {"path": path}} for path in paths]}
        done = {"name": "write_file", "arguments": {"path": "out.txt", "content": "found"}}
        return {"tool_calls": [done]} if step == load.steps else "All files are read."

    return reply


def run_load(load, managed):
    """Run a load on this lesson and return its figures. managed: False: nothing is cut, cleared or refused."""
    os.environ.update(NAMI_WINDOW=str(load.told), NAMI_MAX_STEPS=str(load.steps + 5))
    if not managed:
        os.environ.update(NAMI_SOFT_LIMIT="999999999", NAMI_HARD_LIMIT="999999999")
    import agent
    import tools

    if not managed:
        agent.truncate_tool_result = tools.cut = str
    practice_server.count_tokens = partial(count_tokens, ratio=load.ratio)
    write_files(load)
    arrived, answer, fault = [], None, ""
    script = [make_model(load, arrived)] * (load.steps * 3)
    with practice_server.start(script, window=load.window if managed else 10**9) as server:
        client = agent.make_client(server.url, "none")
        waited, start = time_calls(client), time.perf_counter()
        try:
            answer = run_turn("Read all files; leave vendor/ alone.", ask=lambda question: "y", client=client).answer
        except Exception as error:  # a fault of the lesson is a figure too
            fault = f", {type(error).__name__}"
        seconds = time.perf_counter() - start - sum(waited)
    died = "" if answer else f", died at step {len(arrived) + 1}{fault}"
    return figures(server.requests, load) | {"arrived": sum(arrived[1 : load.steps + 1]), "died": died, "own": seconds}


def count_tokens(text, ratio):
    plain = len(text.encode("ascii", "ignore"))
    return round(plain / ratio) + len(text) - plain


def figures(requests, load):
    """Return what the requests alone tell; `steps` has the sizes of those that are not for a summary."""
    bodies = [(body["messages"], body.get("tools")) for body in requests]
    sizes, texts = ([of(*body) for body in bodies] for of in (practice_server.prompt_size, joined))
    loop = [i for i, (_, tools) in enumerate(bodies) if tools]
    return {
        "requests": len(bodies),
        "refused": sum(size > load.window for size in sizes),
        "peak": max(sizes),
        "total": sum(sizes),
        "uncached": sum(new_tokens(text, texts[:i]) for i, text in enumerate(texts)),
        "prefix": statistics.mean(1 - new_tokens(texts[i], [texts[h]]) / sizes[i] for h, i in itertools.pairwise(loop)),
        "steps": [sizes[i] for i in loop],
    }


def joined(messages, tools):
    return "".join(practice_server.serialise(messages, tools))


def new_tokens(text, earlier):
    """Return the tokens of `text` that come after the longest beginning it has in common with an earlier text."""
    return practice_server.count_tokens(text[max((common_prefix(text, other) for other in earlier), default=0) :])


def common_prefix(one, other):
    low, high = 0, min(len(one), len(other))
    while low < high:  # by halves: character by character would take minutes
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def ask_lesson(lesson, load, *unmanaged):
    """Return the figures of a load in a process of its own: the modules of all lessons have the same names."""
    command = [sys.executable, __file__, "load", json.dumps(vars(load)), *unmanaged]
    done = subprocess.run(command, env={**os.environ, "NAMI_LESSON": str(lesson)}, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def context_table():
    notes = (
        "refused: larger than the window · uncached: what no earlier request began with · prefix: what the call before "
    )
    notes += "began with, mean · ms: our own code, a call · read: how much of the files arrived"
    table = Table("", title=f"prompt tokens, Python {sys.version.split()[0]}", caption=notes)
    for name in ("requests", "refused", "peak", "total", "uncached", "prefix", "summaries", "ms", "read"):
        table.add_column(name, justify="right", no_wrap=True)
    for load in LOADS:
        table.add_section()
        table.add_row(load.name, style="bold")
        every = ask_lesson(LESSONS[0], load, "unmanaged")
        for name, found in [("nothing managed", every), *((f"lesson {k}", ask_lesson(k, load)) for k in LESSONS)]:
            steps, keys = len(found["steps"]), ("requests", "refused", "peak", "total", "uncached")
            cells = [*(f"{found[key]:,}" for key in keys), f"{found['prefix']:.0%}", str(found["requests"] - steps)]
            cells += [f"{found['own'] / steps * 1000:.1f}", f"{found['arrived'] / every['arrived']:.0%}"]
            table.add_row(name + found["died"], *cells)
    return table


WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 360, 64, 740, 56, 314  # of the picture, and of the field in it
COLOURS = ["#d55e00", "#3b8ad0", "#009e73"]  # of middle brightness, as the grey is: the page may be dark
SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {} {}" font-family="sans-serif" font-size="13">
{}
</svg>
"""


def draw(load, lines):
    """Return the SVG of the sizes of requests. lines: {name: sizes}."""
    top, last = max(load.window, *map(max, lines.values())) * 1.04, max(map(len, lines.values()))

    def spot(step, tokens):
        return round(LEFT + (RIGHT - LEFT) * step / last, 1), round(BOTTOM - (BOTTOM - TOP) * tokens / top, 1)

    def path(points, colour="#757575", **style):
        style = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in style.items())
        points = " ".join(f"{x},{y}" for x, y in points)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}"{style}/>')

    def text(point, what, anchor="middle", colour="#757575"):
        parts.append(f'<text x="{point[0]}" y="{point[1]}" text-anchor="{anchor}" fill="{colour}">{what}</text>')

    def level(tokens, **style):
        path([spot(0, tokens), spot(last, tokens)], **style)

    parts = []
    text((LEFT, 20), f"prompt_tokens of each model call: {load.name}", "start")
    for tokens in range(0, int(top), 10_000):
        level(tokens, stroke_opacity=0.35)
        text((LEFT - 8, spot(0, tokens)[1] + 4), f"{tokens:,}", "end")
    for step in range(0, last + 1, 10):
        text((spot(step, 0)[0], BOTTOM + 18), step)
    text(((LEFT + RIGHT) / 2, BOTTOM + 38), "model call")
    window = {"stroke_width": 1.5, "stroke_dasharray": "7 5"}
    level(load.window, **window)
    path([(LEFT + 300, 38), (LEFT + 322, 38)], **window)
    text((LEFT + 328, 42), "the window", "start")
    for number, ((name, sizes), colour) in enumerate(zip(lines.items(), COLOURS, strict=True)):
        path([spot(*point) for point in enumerate(sizes, 1)], colour, stroke_width=2)
        path([(LEFT + 100 * number, 38), (LEFT + 100 * number + 22, 38)], colour, stroke_width=3)
        text((LEFT + 100 * number + 28, 42), name, "start", colour)
        if sizes[-1] > load.window:
            x, y = spot(len(sizes), sizes[-1])
            text((x, y - 7), f"refused: {sizes[-1]:,} tokens, the turn is lost", "end", colour)
    return SVG.format(WIDTH, HEIGHT, "\n".join(parts))


def save_picture():
    lines = {f"lesson {lesson}": ask_lesson(lesson, DRAWN)["steps"] for lesson in LESSONS}
    for lesson in LESSONS[1:]:
        path = ROOT / f"lessons/lesson-{lesson:02}/prompt_tokens.svg"
        path.write_text(draw(DRAWN, lines), encoding="utf-8", newline="\n")
        print(f"wrote {path.relative_to(ROOT)}")


def speed_table():
    table = Table("median of 5", "figure", title=f"{CODE.name}, Python {sys.version.split()[0]}")
    for name, figure in [*rows(), *(session_rows() if LESSON >= 6 else [])]:
        table.add_row(name, figure)
    return table


if __name__ == "__main__":
    workspace = STATE_DIR.parent / "workspace"  # not here: the state folder may not lie inside the workspace
    workspace.mkdir()
    os.chdir(workspace)
    match sys.argv[1:]:
        case []:
            CONSOLE.print(speed_table())
        case ["context"]:
            Console(width=144).print(context_table())  # also where it is not a terminal
        case ["picture"]:
            save_picture()
        case ["load", load, *unmanaged]:
            print(json.dumps(run_load(Load(**json.loads(load)), managed=not unmanaged)))
        case _:
            print(__doc__)
    os.chdir(ROOT)
    shutil.rmtree(STATE_DIR.parent)
