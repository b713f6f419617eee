# /// script
# requires-python = ">=3.11"
# dependencies = ["openai>=3.20,<4", "rich>=13.7,<16"]
# ///
"""Lesson 9: a compaction that keeps what matters: facts by code, cuts inside a turn, a say for person and model."""

import argparse
import contextlib
import os
import re
import socket
import sys
import time
from functools import partial
from pathlib import Path

from rich.console import Console

import context
import tools
from context import append, repair_session, sendable
from permissions import PermissionManager, visible

PROVIDERS = {  # key variable: (name, base URL, a model that calls tools); the first that is set wins
    "OPENAI_API_KEY": ("OpenAI", "https://api.openai.com/v1", "gpt-5-mini"),
    "DEEPSEEK_API_KEY": ("DeepSeek", "https://api.deepseek.com", "deepseek-flash"),
    "DASHSCOPE_API_KEY": ("DashScope", "https://dashscope.aliyuncs.com/compatible-mode/v1", "qwen-plus"),
    "MOONSHOT_API_KEY": ("Moonshot", "https://api.moonshot.cn/v1", "kimi-k2.6"),
    "ZHIPUAI_API_KEY": ("Zhipu", "https://open.bigmodel.cn/api/paas/v4", "glm-4.7"),
    "OPENROUTER_API_KEY": ("OpenRouter", "https://openrouter.ai/api/v1", "openai/gpt-5-mini"),
}
SCRIPT = "-p"  # how the names of sessions of -p end: they are not the latest that the person knows
LOCAL_SERVERS = {11434: "Ollama", 1234: "LM Studio", 8080: "llama.cpp"}  # their default ports
LOOPBACK = re.compile(r"https?://(localhost|127\.[\d.]+|\[::1\])(:|/|$)", re.IGNORECASE)


def usage_error(text):
    """A person's mistake: one line that says what to type next, and exit code 2."""
    print(text, file=sys.stderr)
    sys.exit(2)


def whole_number(name, default):
    """Return the environment variable `name` as an int above 0, or `default`."""
    text = os.environ.get(name, "").strip() or str(default)
    if not re.fullmatch("[1-9][0-9]{0,8}", text):
        usage_error(f"{name} is {text!r}: set it to a whole number above 0, such as {default}")
    return int(text)


MODEL = os.environ.get("NAMI_MODEL") or "gpt-5-mini"
TIMEOUT = whole_number("NAMI_TIMEOUT", 600)  # seconds without a byte from the server
SYSTEM = "You are NamiAgent, a coding agent. Look with your tools before you answer. Answer in the user's language."
MAX_STEPS = whole_number("NAMI_MAX_STEPS", 50)  # model calls in one turn: some models never stop by themselves
for name in ("NAMI_WINDOW", "NAMI_SOFT_LIMIT", "NAMI_HARD_LIMIT"):  # read later: a mistake shows now
    whole_number(name, 128_000)
SILENT_OVERFLOW = """The server seems to cut the conversation without a word: its context is smaller than what we send.
Give it a larger one (Ollama: OLLAMA_CONTEXT_LENGTH), or set NAMI_WINDOW to the number of tokens it has."""
tools.TOOLS["load_skill"] = tools.describe_tool(context.load_skill)


def session_tools(session, console):
    """Return the entries of the two tools that act on the session itself."""

    def compact(focus: str = "") -> str:
        """Have the older part of the conversation summarised before the next step, when one part of the task is done.

        focus: what the summary must keep above all
        """
        if session.summaries >= context.MAX_SUMMARIES:
            raise ValueError("this was done often enough for one request")
        session.focus = focus
        return "It will be summarised before the next step, if that makes it shorter."

    def update_plan(steps: list) -> str:
        """Write down the whole plan, each time it changes: the user sees it, and no summary loses it.

        steps: one text for each step; done ones begin with [x]
        """
        if len("".join(steps)) > 4000:
            raise ValueError("the plan is too long: put steps together, at most 4,000 characters in all")
        session.plan = context.clean(steps)
        tell(console, "\n".join(["Plan:", *steps]))
        return "The plan is written down."

    return {function.__name__: tools.describe_tool(function) for function in (compact, update_plan)}


def default_window(model):
    """Return how many tokens the model's window has: nobody tells, so NAMI_WINDOW does, or it is a common size."""
    return whole_number("NAMI_WINDOW", 32_000 if model == "practice" else 128_000)


def handle_call(call, perms, console=None):
    """Run one tool call if it may; return its result. A failure or a denial is a result too: the model reads it."""
    name, arguments = call.function.name, call.function.arguments
    try:
        fields = tools.parse_arguments(name, arguments)
    except ValueError:  # nobody is asked about a call that cannot run; execute says what is wrong with it
        return tools.execute(name, arguments)
    if refusal := perms.check(name, fields):
        return refusal
    with (console or make_console()).status(f"running {name}"):
        return tools.execute(name, fields, limit=None)


def run(user_input, session, perms, client=None, console=None):
    """One turn: append to `session` until the model answers without asking for a tool; return that answer."""
    from openai import OpenAIError  # the import takes half a second: not while the person waits for the first prompt

    client, console = client or make_client(*model_server()[:2]), console or make_console()
    session.model = session.model or MODEL
    session.window, session.futile = session.window or default_window(session.model), 0
    session.summaries = 0
    tools.TOOLS |= session_tools(session, console)
    repair_session(session, closed=True)
    append(session, {"role": "user", "content": user_input})
    try:
        for _ in range(MAX_STEPS):
            reply = ask_model(session, client, console)
            append(session, to_message(reply))
            if not reply.tool_calls:
                return reply.content
            if reply.content:
                console.print(visible(reply.content))
            room = context.room_for_results(session, len(reply.tool_calls))
            for done, call in enumerate(reply.tool_calls):  # there may be several; each gets its own result, in order
                show(console, f"→ {call.function.name} {call.function.arguments}")
                result = handle_call(call, perms, console)
                share = room // (len(reply.tool_calls) - done)  # what one leaves is there for the next
                result = context.fit_result(call.function.name, result, share)
                room -= context.estimate_tokens(result)
                append(session, {"role": "tool", "tool_call_id": call.id, "content": result})
                show(console, f"← {result}")
        console.print(f"Stopped after {MAX_STEPS} steps. Type 'go on' to continue.")
    except context.ContextUnrecoverable as error:
        tell(console, str(error))
    except (OpenAIError, ValueError, RecursionError) as error:  # the last two: an answer that is no JSON
        console.print(visible(explain(error, client)), style="red")
    finally:
        repair_session(session, closed=True, quiet=True)


def ask_model(session, client, console):
    """Return the model's reply to the session. That the window is smaller than believed, a refusal teaches (C13)."""
    from openai import APIStatusError

    schemas = tools.get_schemas()
    for refused in range(3):  # as it is; cleared and compacted for the window that was learned; the last step only
        repair_session(session)
        estimate = context.fit_context(session, client, schemas, console.status, prune=refused == 2)
        messages = list(map(sendable, session.messages))
        tokens = round(estimate * session.drift)
        try:
            with console.status("thinking"):
                response = client.chat.completions.create(model=session.model, messages=messages, tools=schemas)
            reply = first_reply(response)
            note_usage(response, estimate, session, console)
            return reply
        except APIStatusError as error:
            if not context.is_overflow(error, tokens):
                raise
            session.window = context.learn_window(error, tokens)
            tell(console, f"Too long for the model: from now on its window counts as {session.window:,} tokens.")
    raise context.ContextUnrecoverable(context.TOO_LARGE.format(tokens, session.window))


def note_usage(response, estimate, session, console):
    """Show the size of the request in tokens, the provider's number or ours (~), and learn how they differ (C2)."""
    tokens, expected = getattr(response.usage, "prompt_tokens", None), round(estimate * session.drift)
    known = type(tokens) is int and tokens > 0
    reply = response.choices[0]
    cut_off = reply.finish_reason == "length" and len(reply.message.content or "") < 20 and not reply.message.tool_calls
    if cut_off or (known and estimate > 2000 and tokens < 0.4 * estimate):  # R066; no text has tokens that long
        if not session.warned:
            tell(console, SILENT_OVERFLOW)
        session.warned, session.drift = True, 1.0
    elif known:
        session.drift = max(0.4, min(tokens / estimate, 4))
    session.usage["prompt_tokens"] = tokens if known else expected
    show(console, f"prompt_tokens {'' if known else '~'}{session.usage['prompt_tokens']:,}")


def first_reply(response):
    """Return the message in the response; ValueError when there is none: some send an error as if all were well."""
    with contextlib.suppress(AttributeError, IndexError, KeyError, TypeError):
        reply = response.choices[0].message
        texts = [reply.content, *(text for call in reply.tool_calls or [] for text in (call.id, call.function.name))]
        if all(isinstance(text, str | None) for text in texts):
            return reply
    raise ValueError(f"no reply in what the server sent: {response}")


def explain(error, client):
    """Return on one line what went wrong and what to do; never the key, which some providers repeat."""
    body, status = getattr(error, "body", None), getattr(error, "status_code", None)
    reason = body.get("message", body) if isinstance(body, dict) else body
    text = f"Error {status}: {reason or error}" if status else f"{error} {error.__cause__ or ''}"
    text = " ".join(text.replace(client.api_key, "***").split())[:600]
    models = list_models(client) if status in (400, 404) else None
    address = str(client.base_url).rstrip("/")
    hints = [  # (when, what to do); the first that fits is shown
        ("tool" in text and "support" in text, "This model cannot call tools: choose another with /model NAME."),
        (models and "model" in text, f"{models} Choose one with /model NAME."),
        (status == 404, f"The address was {address}/chat/completions; most base URLs end in /v1."),
        (not status, f"Is the server at {address} running? It has {TIMEOUT} seconds (NAMI_TIMEOUT)."),
    ]
    return text + next((f" · {hint}" for fits, hint in hints if fits), "")


def list_models(client):
    """Return the names of the models that the server has as a sentence; None when it does not tell."""
    with contextlib.suppress(Exception):  # whatever it answers: this is only a hint
        names = [model.id for model in client.with_options(timeout=1, max_retries=0).models.list().data]
        return f"It has {', '.join(names[:20])}."


def to_message(reply):
    """The SDK's reply as a plain dict, which JSON can store; only the fields that every provider takes back."""
    if not (reply.content or "").strip():  # providers refuse an empty text, as they refuse an empty list of calls
        reply.content = None if reply.tool_calls else "(empty reply)"
    message = {"role": "assistant", **reply.model_dump(exclude_none=True, include={"content"})}
    if reply.tool_calls:  # a broken call runs nothing, but as it stands no provider takes it back
        message["tool_calls"] = [tools.sendable_call(call) for call in reply.tool_calls]
    return context.clean(message)


def model_server(options=None):
    """Return (base URL, key, model, a line for the person). Flags come first, then variables, then PROVIDERS by key."""
    options = options or parse_options([])
    url, model = clean_url(options.base_url), options.model
    if url and not options.demo:
        key = read_key("OPENAI_API_KEY", url) or usage_error(f"{url} needs OPENAI_API_KEY")
        return url, key, model or MODEL, f"{model or MODEL}, {url}"
    for variable, (name, url, default) in PROVIDERS.items():
        if not options.demo and (key := read_key(variable, url)):
            return url, key, model or default, f"{model or default}, {name} (by {variable})"
    here = Path(__file__).resolve().parent
    sys.path += [str(here / "lessons"), str(here.parent)]
    import practice_server

    line = f"the practice model answers, by fixed rules. Try: {' · '.join(practice_server.suggest(tools.TOOLS))}"
    if not options.demo:
        line = "\n".join([f"No OPENAI_API_KEY, nor another (--help): {line}", *local_servers()])
    return practice_server.start(window=default_window("practice")).url, "no-key", "practice", line


def clean_url(text):
    """Return a base URL as the SDK wants it: people paste it with a slash at the end, or the whole address."""
    url = text.strip().strip("'\"").rstrip("/").removesuffix("/chat/completions")
    if url and not re.match(r"https?://[^\s/@]+(/\S*)?$", url, re.IGNORECASE):
        shown = re.sub("//[^/]*@", "//***@", url)
        usage_error(f"the base URL {shown!r} must look like https://api.example.com/v1 or http://127.0.0.1:11434/v1")
    return url


def read_key(variable, url):
    """Return the key in an environment variable, or "". What cannot be a key is a mistake, unless `url` needs none."""
    key = os.environ.get(variable, "").strip().strip("'\"")
    if LOOPBACK.match(url):
        return key if re.fullmatch("[!-~]+", key) else "no-key"
    if re.search(r"[^!-~]|your[-_]|\.\.\.|xxxx|^x+$|[<>{}]", key, re.IGNORECASE):
        usage_error(f"{variable} holds no key but a placeholder, or one with a space or a foreign letter: set it again")
    return key


def local_servers():
    """Return a line for each model server that listens on this machine: its models, and how to use it."""
    lines = []
    for port, name in LOCAL_SERVERS.items():
        url = f"http://127.0.0.1:{port}/v1"
        with contextlib.suppress(OSError):  # nothing listens
            socket.create_connection(("127.0.0.1", port), timeout=0.2).close()
            if models := list_models(make_client(url, "no-key")):  # else: another program
                lines.append(f"{name} runs here: --base-url {url} --model NAME. {models}")
    return lines


def make_client(url, key):
    """Return the SDK's client. On this machine no proxy is asked, one that cannot be used is a person's mistake."""
    from openai import DefaultHttpxClient, OpenAI

    try:
        http_client = DefaultHttpxClient(trust_env=False) if LOOPBACK.match(url) else None
        return OpenAI(base_url=url, api_key=key, timeout=TIMEOUT, http_client=http_client)
    except Exception as error:  # a SOCKS proxy is an ImportError, a URL nobody can read an error of the transport
        usage_error(f"cannot ask {url}: {error} (look at ALL_PROXY, HTTPS_PROXY and the base URL)")


def make_console(stderr=False):
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False, soft_wrap=True)  # not our markup


def show(console, text):  # one dim line, cut at the edge of the screen
    line = visible(" ".join(text[:1000].split()))
    console.print(line, style="dim", no_wrap=True, overflow="ellipsis", soft_wrap=False)


def tell(console, text):
    console.print(visible(text), style="yellow", soft_wrap=not console.is_terminal)  # break between words


def system_prompt(console):
    """Return SYSTEM with this folder's rules and one line for each skill: read at every start, never summarised."""
    place = f"The workspace is {Path.cwd()}. Today is {time.strftime('%Y-%m-%d')}."  # no clock: it would break caching
    warn = partial(tell, console)
    rules, skills = context.project_rules(Path.cwd(), warn), context.find_skills(warn)
    lines = [f"- {name}: {description}" for name, (description, _) in skills.items()]
    listing = "\n".join(["Skills, to be loaded with load_skill when the task fits:", *lines]) if skills else ""
    text = "\n\n".join(filter(None, [f"{SYSTEM}\n{place}", rules, listing]))
    return context.clean(text)  # the name of the folder may hold a byte that is no character


def new_session(console):
    return context.new_session(Path.cwd(), system_prompt(console), warn=partial(tell, console))


def open_session(name, console, leave=None):
    """Return the session whose name is `name`, or alone begins with it. ValueError says what can be typed instead."""
    files = [path.name for path in context.SESSION_DIR.glob("*.json*") if path.name.startswith(name)]
    names = sorted({file.removesuffix(context.LOG).removesuffix(".json") for file in files})
    if name not in names and len(names) != 1:
        raise ValueError(f"{len(names) or 'no'} sessions begin with {name!r}; --sessions or /sessions lists them")
    name = name if name in names else names[0]
    context.close(leave)  # not before there is somewhere to go: another process could take it
    session = context.open_session(name, system_prompt(console), Path.cwd(), partial(tell, console))
    tell(console, f"Resumed {session.name}: {session.turns} turns, last used {session.updated}. {session.title}")
    if session.workspace != context.clean(str(Path.cwd())):
        tell(console, f"It was held in {session.workspace or '?'}; tools now work in {Path.cwd()}.")
    return session


def latest_session(console):
    """Return the newest session of this folder, or a new one."""
    here, ours = context.clean(str(Path.cwd())), f"{context.folder_name(Path.cwd())}-20"  # 20..: then comes the year
    for path, header in context.saved_sessions():
        # A broken file does not tell its folder, but its name does; its log still has every message.
        mine = header.get("workspace") == here if header else path.stem.startswith(ours)
        if mine and not path.stem.endswith(SCRIPT):
            with contextlib.suppress(ValueError):  # somebody gave the file a name that no session has
                return open_session(path.stem, console)
    return new_session(console)


def list_sessions(console):
    """Show the saved sessions, newest first; * marks those of this folder."""
    here = context.clean(str(Path.cwd()))
    for path, header in context.saved_sessions():
        if header is None:
            console.print(visible(f"  {path.name} cannot be read"))
            continue
        mark = "*" if header.get("workspace") == here else " "
        numbers = f"{header.get('turns', 0)} turns, {header.get('usage', {}).get('prompt_tokens', 0):,} tokens"
        used = f"last used {header.get('updated', '?')} in {header.get('workspace', '?')}"
        console.print(visible(f"{mark} {path.stem}  {numbers}, {used}\n    {header.get('title', '')}"))


COMMANDS = {
    "/help": "show these lines",
    "/model": "NAME: use another model from now on; without a name: say which one it is",
    "/sessions": "list the saved sessions, newest first; * marks those of this folder",
    "/resume": "NAME: go on with a saved session; the beginning of its name is enough",
    "/new": "start a new session",
    "/tree": "show the requests of this session with their ids and branches; * is where you are",
    "/fork": "ID: a new session that goes on after that request, with the original texts",
    "/compact": "FOCUS: summarise the older part now; what is given as focus is kept above all",
    "/undo": "take back the last request and all that followed it; files are not changed",
    "/exit": "leave; exit, quit and Ctrl-D do the same",
}


def command(line, session, console, server=None):
    """Do what a slash command says; return the session to go on with. ValueError: what to type instead."""
    name, _, argument = line.partition(" ")
    argument, model = argument.strip(), session.model
    match name:
        case "/help":
            console.print("\n".join(f"{name:<10} {text}" for name, text in COMMANDS.items()))
        case "/model":
            model = argument or model
            session.window = 0 if argument else session.window  # another model, another window
            console.print(f"The model is {model}.")
        case "/sessions":
            list_sessions(console)
        case "/resume":
            session = open_session(argument, console, leave=session)
        case "/new":
            context.close(session)
            session = new_session(console)
            console.print(f"A new session: {session.name}")
        case "/tree":
            console.print(visible("\n".join(context.tree(session)) or "There are no requests yet."))
        case "/fork":
            session, left = context.fork(session, argument), session
            context.close(left)
            console.print(f"Now in the new session {session.name} with {session.turns} turns.")
        case "/compact":
            session.focus, session.window = argument, session.window or default_window(model)
            session.futile = session.summaries = 0
            context.fit_context(session, make_client(*server), tools.get_schemas(), console.status)
        case "/undo":
            text = context.undo(session)
            console.print(visible(f"Taken back (files stay as they are): {text[:200]}") if text else "Nothing to undo.")
        case _:
            raise ValueError(f"There is no {name}; there are {', '.join(COMMANDS)}")
    session.model = model  # a saved one may have had another, which this server may lack
    return session


EXAMPLES = f"""examples:
  python agent.py                                    go on with the latest session of this folder
  git diff | python agent.py -p "review this diff"   one turn; stdout gets the answer alone
  python agent.py --base-url http://127.0.0.1:11434/v1 --model qwen3:8b
Keys: {", ".join(PROVIDERS)}"""


def parse_options(arguments):
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="agent.py", epilog=EXAMPLES, formatter_class=form, allow_abbrev=False)
    parser.error = lambda message: usage_error(f"{message}; --help shows the options")
    parser.add_argument("-p", dest="prompt", metavar="PROMPT", help="one turn; exit code 0 done, 1 failed, 130 stopped")
    parser.add_argument("--new", action="store_true", help="start a new session")
    parser.add_argument("--session", metavar="NAME", help="go on with this session; with --new: its name")
    parser.add_argument("--sessions", action="store_true", help="list the saved sessions")
    parser.add_argument("--yes", action="store_true", help="approve what would be asked, without showing it")
    parser.add_argument("--demo", action="store_true", help="use the practice model, offline")
    model, url = (os.environ.get(name, "") for name in ("NAMI_MODEL", "OPENAI_BASE_URL"))
    parser.add_argument("--model", metavar="NAME", default=model, help="the model; else NAMI_MODEL")
    parser.add_argument("--base-url", metavar="URL", default=url, help="the model server; else OPENAI_BASE_URL")
    return parser.parse_args(arguments)


def choose_session(options, console):
    """Return the session that the flags ask for. A turn from a script is in a new one unless it is named."""
    if not options.new and options.session is not None:
        return open_session(options.session, console)
    session = new_session(console) if options.new or options.prompt is not None else latest_session(console)
    if options.session and context.session_exists(options.session):
        raise ValueError(f"the session {options.session} exists: leave out --new to go on with it")
    session.name = options.session or (session.name if options.prompt is None else f"{session.name}{SCRIPT}")
    return session


def one_turn(prompt, session, perms, client, console):
    """Answer `prompt`, with what is piped in added; only the answer goes to stdout. Return the exit code."""
    piped = "" if sys.stdin.isatty() else sys.stdin.read()
    request = context.clean("\n\n".join(filter(str.strip, [prompt, piped])))
    if not request:
        usage_error("-p needs a prompt, such as: -p 'what is in this folder?'")
    answer = run(request, session, perms, client, console)
    if answer:
        print(visible(answer) if sys.stdout.isatty() else answer)
    return 0 if answer else 1


def nobody(question):
    raise EOFError  # in a script there is no one to ask


def recall_requests(session):
    """Let the arrow keys bring back the requests of the session, where Python has readline."""
    with contextlib.suppress(ImportError):  # Windows has its own recall
        import readline

        for message in session.messages:
            if message["role"] == "user" and "id" in message:  # a summary has none
                readline.add_history(message["content"])


def repl(session, perms, server, console):
    """Read requests until the person leaves."""
    client, hint = None, ""
    while True:
        try:
            console.print(hint, end="")
            hint = ""
            user_input = input("> ").strip()
            if user_input in ("exit", "quit") or user_input.split()[:1] == ["/exit"]:
                return
            if re.match(r"/\w*( |$)", user_input):  # a request may begin with a path
                session = command(user_input, session, console, server)
            elif user_input:
                client = client or make_client(*server)
                if answer := run(user_input, session, perms, client, console):
                    console.print(visible(answer))
        except EOFError:  # Ctrl-D, or the end of piped input
            return console.print()
        except ValueError as error:  # of a slash command: what to type instead
            console.print(visible(str(error)))
        except KeyboardInterrupt:  # printed in the try above: people press Ctrl-C twice
            hint = "\nStopped. Type 'exit' or press Ctrl-D to leave.\n"


def main(arguments=None):
    """Run the command line; return the exit code."""
    options = parse_options(arguments)
    script = options.prompt is not None
    console = make_console(stderr=script)
    if os.environ.get("NAMI_STATE_DIR") and context.STATE_DIR.resolve().is_relative_to(Path.cwd()):
        usage_error("NAMI_STATE_DIR lies in the workspace, where the agent could rewrite its memory: set another one")
    if options.sessions:
        return list_sessions(console)
    url, key, model, line = model_server(options)
    tell(console, line)
    perms = PermissionManager(ask=(lambda _: "yes") if options.yes else nobody if script else None)
    try:
        session = choose_session(options, console)
        session.model = model
        if script:
            return one_turn(options.prompt, session, perms, make_client(url, key), console)
        if sys.stdin.isatty():
            recall_requests(session)
        repl(session, perms, (url, key), console)
    except ValueError as error:
        usage_error(str(error))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.stdin = sys.stdin or open(os.devnull)  # None when it was closed by whoever started us
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stdin.reconfigure(errors="replace")  # half a character typed or piped in must not end the program
    sys.stdout.reconfigure(errors="replace")  # nor one that this terminal cannot show
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # nobody reads on, as in `| head -1`
        os._exit(1)  # sys.exit would try to write the rest
    sys.exit(code)
