"""How fast, how large: python tests/bench.py prints one table. Nothing here passes or fails; compare within one run."""

import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import time

from conftest import CODE, LESSON, ROOT, STATE_DIR, Terminal, as_session, context, practice_server
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


def time_step(count):
    """Seconds of our own code in one step with `count` messages of 2,000 characters: the turn less its model call."""
    import agent

    with practice_server.start(["fine"], window=10**9) as server:
        client = agent.make_client(server.url, "none")
        create, waited = client.chat.completions.create, []

        def timed(**request):
            start = time.perf_counter()
            response = create(**request)
            waited.append(time.perf_counter() - start)
            return response

        client.chat.completions.create = timed
        conversation = [{"role": "system", "content": "system"}, *texts(count)]
        arguments = ["go", as_session(conversation, CONSOLE) if LESSON >= 6 else conversation]
        if LESSON >= 3:
            arguments.append(agent.PermissionManager())
        start = time.perf_counter()
        agent.run(*arguments, client=client, console=Console(file=io.StringIO()))
        return time.perf_counter() - start - sum(waited)


def peak_memory():
    """MB of one turn at 1,000 messages, the whole process."""
    code = "import bench, resource; bench.time_step(1000); print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT / "tests")
    return int(done.stdout) / (1024 if sys.platform != "darwin" else 1024**2)


def texts(count):
    return [{"role": ("user", "assistant")[i % 2], "content": f"{i} ".ljust(2000, "x")} for i in range(count)]


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
    for count in (10, 100, 1000):
        seconds = median_of(lambda count=count: time_step(count))
        yield f"our time in a step, {count:,} messages", f"{seconds * 1000:.1f} ms"
    shutil.rmtree(STATE_DIR, ignore_errors=True)
    yield "peak memory, 1,000 messages", f"{peak_memory():.0f} MB"


if __name__ == "__main__":
    workspace = STATE_DIR.parent / "workspace"  # not here: the state folder may not lie inside the workspace
    workspace.mkdir()
    os.chdir(workspace)
    table = Table("median of 5", "figure", title=f"{CODE.name}, Python {sys.version.split()[0]}")
    for name, figure in [*rows(), *(session_rows() if LESSON >= 6 else [])]:
        table.add_row(name, figure)
    CONSOLE.print(table)
    os.chdir(ROOT)
    shutil.rmtree(STATE_DIR.parent)
