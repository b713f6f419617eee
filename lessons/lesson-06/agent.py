# /// script
# requires-python = ">=3.11"
# dependencies = ["openai>=3.20,<4", "rich>=13.7,<16"]
# ///
"""Lesson 6: a session loses nothing: every message is logged, a crash is repaired, and earlier points can be forked."""

import contextlib
import os
import re
import sys
import time
from functools import partial
from pathlib import Path

from rich.console import Console

import context
import tools
from context import append, change, estimate_tokens, repair_session, sendable, truncate_tool_result
from permissions import PermissionManager, visible


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
SYSTEM = "You are NamiAgent, a coding agent. Look with your tools before you answer. Answer in the user's language."
MAX_STEPS = whole_number("NAMI_MAX_STEPS", 50)  # model calls in one turn: some models never stop by themselves
SOFT_LIMIT = whole_number("NAMI_SOFT_LIMIT", 16000)  # tokens; small, so that you see it happen
HARD_LIMIT = whole_number("NAMI_HARD_LIMIT", 24000)
tools.TOOLS["load_skill"] = tools.describe_tool(context.load_skill)


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
        return tools.execute(name, fields)


def run(user_input, session, perms, client=None, console=None):
    """One turn: append to `session` until the model answers without asking for a tool; return that answer."""
    from openai import OpenAIError  # the import takes half a second: not while the person waits for the first prompt

    client, console = client or make_client(*model_server()), console or make_console()
    repair_session(session, closed=True)
    append(session, {"role": "user", "content": user_input})
    try:
        for _ in range(MAX_STEPS):
            fit_context(session, client, console)
            repair_session(session)
            messages = list(map(sendable, session.messages))
            with console.status("thinking"):
                response = client.chat.completions.create(model=MODEL, messages=messages, tools=tools.get_schemas())
            reply = response.choices[0].message
            session.usage["prompt_tokens"] = prompt_tokens(response, messages, console)
            append(session, to_message(reply))
            if reply.content:
                console.print(visible(reply.content))
            if not reply.tool_calls:
                return reply.content
            for call in reply.tool_calls:  # there may be several; each gets its own result, in the same order
                show(console, f"→ {call.function.name} {call.function.arguments}")
                result = handle_call(call, perms, console)
                if call.function.name != "load_skill":  # instructions must arrive whole
                    result = truncate_tool_result(result)
                append(session, {"role": "tool", "tool_call_id": call.id, "content": result})
                show(console, f"← {result}")
        console.print(f"Stopped after {MAX_STEPS} steps. Type 'go on' to continue.")
    except OpenAIError as error:
        reason = f"{client.base_url} {error} {error.__cause__ or ''}"
        console.print(visible(reason.replace(client.api_key, "***")), style="red")  # some providers repeat the key
    finally:
        repair_session(session, closed=True, quiet=True)


def prompt_tokens(response, messages, console):
    """Return and show how large the request was in tokens: the provider's number; where it sends none, an estimate."""
    tokens = getattr(response.usage, "prompt_tokens", None)
    mark = "" if isinstance(tokens, int) and tokens > 0 else "~"
    tokens = estimate_tokens([messages, tools.get_schemas()]) if mark else tokens
    show(console, f"prompt_tokens {mark}{tokens:,}")
    return tokens


def fit_context(session, client, console):
    """Before each model call: clear above SOFT_LIMIT, compact above HARD_LIMIT: independent steps, see lesson 4."""
    tokens = session.usage.get("prompt_tokens", 0)
    if tokens > SOFT_LIMIT:
        copies = [dict(message) for message in session.messages]
        replace_view(session, "clear", context.clear_old_tool_results(copies), console)
    if tokens > HARD_LIMIT:
        with console.status("compacting"):
            messages = context.compact(client, MODEL, session.messages, warn=partial(show, console))
        replace_view(session, "compact", messages, console)


def replace_view(session, kind, messages, console):
    before, after = estimate_tokens(session.messages), estimate_tokens(messages)
    if after != before:
        change(session, kind, messages)
        show(console, f"context ~{before:,} → ~{after:,} tokens · {kind}")


def to_message(reply):
    """The SDK's reply as a plain dict, which JSON can store; only the fields that every provider takes back."""
    if not (reply.content or "").strip():  # providers refuse an empty text, as they refuse an empty list of calls
        reply.content = None if reply.tool_calls else "(empty reply)"
    message = {"role": "assistant", **reply.model_dump(exclude_none=True, include={"content"})}
    if reply.tool_calls:  # a broken call runs nothing, but as it stands no provider takes it back
        message["tool_calls"] = [tools.sendable_call(call) for call in reply.tool_calls]
    return context.clean(message)


def model_server():
    """Return (base URL, key) from the environment; with neither set, those of the practice model, offline."""
    url, key = (os.environ.get(name, "").strip() for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY"))
    if not url and not key:
        here = Path(__file__).resolve().parent
        sys.path += [str(here / "lessons"), str(here.parent)]
        import practice_server

        url = practice_server.start().url
        lines = practice_server.suggest(tools.TOOLS)
        print(f"No OPENAI_API_KEY: the practice model answers, by fixed rules. Try: {' · '.join(lines)}")
    return url or "https://api.openai.com/v1", key or "no-key"  # a server on your own machine needs none


def make_client(url, key):
    from openai import OpenAI

    return OpenAI(base_url=url, api_key=key)


def make_console():
    return Console(markup=False, emoji=False, highlight=False, soft_wrap=True)  # a model's text is not our markup


def show(console, text):  # one dim line, cut at the edge of the screen
    line = visible(" ".join(text[:1000].split()))
    console.print(line, style="dim", no_wrap=True, overflow="ellipsis", soft_wrap=False)


def tell(console, text):
    """Print `text`, which may hold anything, as a word to the person."""
    console.print(visible(text), style="yellow")


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
        raise ValueError(f"{len(names) or 'no'} sessions begin with {name!r}; /sessions lists them")
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
        if mine:
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
    "/sessions": "list the saved sessions, newest first; * marks those of this folder",
    "/resume": "NAME: go on with a saved session; the beginning of its name is enough",
    "/new": "start a new session",
    "/tree": "show the requests of this session with their ids and branches; * is where you are",
    "/fork": "ID: a new session that goes on after that request, with the original texts",
    "/undo": "take back the last request and all that followed it; files are not changed",
}


def command(line, session, console):
    """Do what a slash command says; return the session to go on with. ValueError: what to type instead."""
    name, _, argument = line.partition(" ")
    argument = argument.strip()
    match name:
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
        case "/undo":
            text = context.undo(session)
            console.print(visible(f"Taken back (files stay as they are): {text[:200]}") if text else "Nothing to undo.")
        case _:
            raise ValueError(f"There is no {name}; there are {', '.join(COMMANDS)}")
    return session


def main():
    if os.environ.get("NAMI_STATE_DIR") and context.STATE_DIR.resolve().is_relative_to(Path.cwd()):
        usage_error(
            "NAMI_STATE_DIR lies in the workspace, where the agent could rewrite its own memory: set another one"
        )
    server, client, console, hint = model_server(), None, make_console(), ""
    perms, session = PermissionManager(), latest_session(console)
    while True:
        try:
            console.print(hint, end="")
            hint = ""
            user_input = input("> ").strip()
            if user_input in ("exit", "quit"):
                return
            if re.match(r"/\w*( |$)", user_input):  # a request may begin with a path
                session = command(user_input, session, console)
            elif user_input:
                client = client or make_client(*server)
                run(user_input, session, perms, client, console)
        except EOFError:  # Ctrl-D, or the end of piped input
            return console.print()
        except ValueError as error:  # of a slash command: what to type instead
            console.print(visible(str(error)))
        except KeyboardInterrupt:  # printed in the try above: people press Ctrl-C twice
            hint = "\nStopped. Type 'exit' or press Ctrl-D to leave.\n"


if __name__ == "__main__":
    sys.stdin.reconfigure(errors="replace")  # half a character typed or piped in must not end the program
    sys.stdout.reconfigure(errors="replace")  # nor one that this terminal cannot show
    main()
