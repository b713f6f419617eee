"""How fast, how large: python tests/bench.py prints one table. Nothing here passes or fails; compare within one run."""

import os
import statistics
import subprocess
import sys
import time

from conftest import CODE, Terminal, practice_server, run_turn

RUNS = 5


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
    from agent import make_client

    with practice_server.start(["fine"], window=10**9) as server:
        client = make_client(server.url, "none")
        create, waited = client.chat.completions.create, []

        def timed(**request):
            start = time.perf_counter()
            response = create(**request)
            waited.append(time.perf_counter() - start)
            return response

        client.chat.completions.create = timed
        texts = [{"role": ("user", "assistant")[i % 2], "content": f"{i} ".ljust(2000, "x")} for i in range(count)]
        messages = [{"role": "system", "content": "system"}, *texts]
        start = time.perf_counter()
        run_turn("go", messages, client=client)
        return time.perf_counter() - start - sum(waited)


def peak_memory():
    """MB of one turn at 1,000 messages, the whole process."""
    code = "import bench, resource; bench.time_step(1000); print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="tests")
    return int(done.stdout) / (1024 if sys.platform != "darwin" else 1024**2)


def rows():
    yield "python -c pass", f"{median_of(lambda: time_command('-c', 'pass')) * 1000:.0f} ms"
    yield "python -c 'import openai'", f"{median_of(lambda: time_command('-c', 'import openai')) * 1000:.0f} ms"
    os.environ.update(OPENAI_BASE_URL="http://127.0.0.1:9/v1")
    yield "start to prompt", f"{median_of(time_to_prompt) * 1000:.0f} ms"
    del os.environ["OPENAI_BASE_URL"]
    yield "start to prompt, practice model", f"{median_of(time_to_prompt) * 1000:.0f} ms"
    time_step(1)  # imports
    for count in (10, 100, 1000):
        yield f"our time in a step, {count:,} messages", f"{median_of(lambda count=count: time_step(count)) * 1000:.1f} ms"
    yield "peak memory, 1,000 messages", f"{peak_memory():.0f} MB"


if __name__ == "__main__":
    from rich.console import Console
    from rich.table import Table

    table = Table("median of 5", "figure", title=f"{CODE.name}, Python {sys.version.split()[0]}")
    for name, figure in rows():
        table.add_row(name, figure)
    Console().print(table)
