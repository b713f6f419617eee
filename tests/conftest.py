"""The stage for every test: which lesson is tested, a private folder, no network, no keys, and a person at a terminal.

NAMI_LESSON=3 tests lesson 3; without it the top level is tested, which is the last lesson.
"""

import io
import os
import re
import select
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAST_LESSON = len(list(ROOT.glob("lessons/lesson-*")))
LESSON = int(os.environ.get("NAMI_LESSON") or LAST_LESSON)
CODE = ROOT / f"lessons/lesson-{LESSON:02}" if os.environ.get("NAMI_LESSON") else ROOT
PRIVATE = re.compile(r"^(OPENAI|NAMI)_|_API_KEY$|_PROXY$|^NO_COLOR$", re.IGNORECASE)

# Only the lesson's own modules: pytest run as a module would bring in the top level's for those that a lesson lacks.
sys.path[:] = [str(CODE), str(ROOT / "lessons"), *(path for path in sys.path if path not in ("", str(ROOT)))]
for name in [name for name in os.environ if PRIVATE.search(name) and name != "NAMI_LESSON"]:
    del os.environ[name]
# Before the agent's modules are imported: they read it once.
STATE_DIR = Path(tempfile.mkdtemp(prefix="nami-tests-")).resolve() / "state"
os.environ["NAMI_STATE_DIR"] = str(STATE_DIR)

import practice_server  # noqa: E402

if LESSON >= 4:
    import context  # noqa: E402


# Every client loads the certificates, 25 ms each time; on loopback there is nothing to verify.
ssl.SSLContext.load_verify_locations = lambda *args, **options: None


def pytest_collection_modifyitems(config, items):
    """Leave out the tests of what a later lesson does otherwise: [until] in lessons.toml has their last lessons."""
    until = tomllib.loads((ROOT / "lessons/lessons.toml").read_text(encoding="utf-8")).get("until", {})
    over = [item for item in items if until.get(f"{item.path.name}::{item.originalname}", LESSON) < LESSON]
    config.hook.pytest_deselected(items=over)
    items[:] = [item for item in items if item not in over]


def pytest_unconfigure():
    shutil.rmtree(STATE_DIR.parent, ignore_errors=True)


@pytest.fixture(autouse=True)
def stage(tmp_path, monkeypatch):
    """An empty workspace as the current folder, an empty state folder, a HOME of its own, only loopback as network."""
    connect = socket.socket.connect

    def loopback_only(self, address):
        if self.family != getattr(socket, "AF_UNIX", None) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise PermissionError(f"tests do not reach {address}")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", loopback_only)
    shutil.rmtree(STATE_DIR, ignore_errors=True)
    for folder in ("workspace", "home"):
        (tmp_path / folder).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "workspace")


@pytest.fixture
def workspace(stage):
    return Path.cwd()


@pytest.fixture
def serve(monkeypatch):
    """Return a function that starts the practice server (with a script of replies) as the model of this test."""
    servers = []

    def start(*script, **options):
        servers.append(practice_server.start(list(script) if script else None, **options))
        monkeypatch.setenv("OPENAI_BASE_URL", servers[-1].url)
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def call(name, arguments, **more):
    """A script item: the model asks for one tool."""
    return {"tool_calls": [{"name": name, "arguments": arguments}], **more}


def status_error(status, text, **more):
    """The real client's error for a refusal, made from a whole response: newer versions read more of it."""
    import httpx2
    from openai import OpenAI

    request = httpx2.Request("POST", "http://127.0.0.1:9/v1/chat/completions")
    response = httpx2.Response(status, json={"error": {"message": text, **more}}, request=request)
    return OpenAI(api_key="no-key", base_url="http://127.0.0.1:9/v1")._make_status_error_from_response(response)


def connection_error():
    import httpx2
    from openai import APIConnectionError

    return APIConnectionError(request=httpx2.Request("POST", "http://127.0.0.1:9/v1/chat/completions"))


def run_turn(user_input, messages=None, ask=None, **options):
    """Run one turn in this process, whatever the lesson's run() takes; return its answer, messages and screen text.

    ask: what the person answers to a permission question: a function (question) -> str, or a list of answers
    """
    import agent
    from rich.console import Console

    screen = io.StringIO()
    console = Console(file=screen, markup=False, emoji=False, highlight=False, soft_wrap=True, width=200)
    messages = [{"role": "system", "content": agent.SYSTEM}] if messages is None else messages
    arguments = [user_input, as_session(messages, console) if LESSON >= 6 else messages]
    if LESSON >= 3:
        from permissions import PermissionManager

        answers = iter(ask) if isinstance(ask, list) else None
        arguments.append(PermissionManager(ask=(lambda question: next(answers)) if answers else ask or nobody))
    try:
        answer = agent.run(*arguments, console=console, **options)
    finally:
        if LESSON >= 6:
            messages[:] = map(context.sendable, arguments[1].messages)
    if answer and LESSON >= 7:  # from then on the caller shows the answer
        console.print(answer)
    return SimpleNamespace(answer=answer, messages=messages, screen=screen.getvalue())


def as_session(messages, console):
    session = context.new_session(Path.cwd(), messages[0]["content"], warn=console.print)
    context.append(session, *messages[1:])
    return session


def nobody(question):
    raise EOFError


def agent_command():
    return [sys.executable, str(CODE / "agent.py")]


def pipe(text, *arguments, timeout=20, **env):
    """Run the agent with `text` (str or bytes) piped in; return the finished process, output decoded."""
    data = text if isinstance(text, bytes) else text.encode()
    done = subprocess.run(
        [*agent_command(), *arguments],
        input=data,
        capture_output=True,
        timeout=timeout,
        env={**os.environ, **env},
    )
    return SimpleNamespace(code=done.returncode, out=done.stdout.decode(), err=done.stderr.decode())


def repl(text):
    """Run the whole program in this process with `text` piped in: a process of its own costs half a second more."""
    import agent

    out, err = io.StringIO(), io.StringIO()
    with mock.patch.multiple(sys, stdin=io.StringIO(text), stdout=out, stderr=err, argv=["agent.py"]):
        code = agent.main() or 0
    return SimpleNamespace(code=code, out=out.getvalue(), err=err.getvalue())


class Terminal:
    """A person at a real terminal (a pty): type, press keys, and wait for what the screen must show."""

    def __init__(self, **env):
        import pty

        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ.update(env, TERM="dumb", COLUMNS="120")
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with it ignored
            os.execv(sys.executable, agent_command())
        self.screen = ""

    def read(self, seconds):
        """Add what arrives within `seconds` to the screen; return False at the end of the program."""
        if not select.select([self.fd], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self.fd, 65536)
        except OSError:  # Linux: the program has closed its terminal
            return False
        self.screen += data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)

    def expect(self, text, seconds=15):
        """Wait until `text` stands on the screen after what was expected before; return the screen up to its end."""
        limit = time.monotonic() + seconds
        while text not in self.screen:
            if time.monotonic() > limit or not self.read(0.1):
                raise AssertionError(f"no {text!r} on the screen:\n{self.screen}")
        seen, self.screen = self.screen.split(text, 1)
        return seen + text

    def type(self, line):
        os.write(self.fd, f"{line}\n".encode())

    def press(self, key):
        """key: "C" for Ctrl-C, "D" for Ctrl-D."""
        os.write(self.fd, bytes([ord(key) - 64]))

    def exit_code(self, seconds=15):
        """Wait for the program's end; return its exit code."""
        limit = time.monotonic() + seconds
        while time.monotonic() < limit and self.read(0.1):
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]) if self.finished(limit) else None

    def finished(self, limit):
        while time.monotonic() < limit:
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return True
            time.sleep(0.01)
        return False

    def close(self):
        try:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
        os.close(self.fd)


@pytest.fixture
def terminal():
    """Return a function that starts the agent at a terminal."""
    if sys.platform == "win32":
        pytest.skip("there are no pseudo-terminals here")
    opened = []

    def start(**env):
        opened.append(Terminal(**env))
        return opened[-1]

    yield start
    for one in opened:
        one.close()
