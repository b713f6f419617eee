# /// script
# requires-python = ">=3.11"
# dependencies = ["openai>=3.20,<4", "rich>=13.7,<16"]
# ///
"""Lesson 4: the window is finite: truncate, clear, compact off the real prompt_tokens, and save what was said."""

import os
import re
import sys
from pathlib import Path

from rich.console import Console

import tools
from context import (
    clear_old_tool_results,
    compact,
    estimate_tokens,
    load_session,
    save_session,
    truncate_tool_result,
)
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
SESSION = "default"
STOPPED = "(This turn stopped early. A call without a result above may not have run, or only in part.)"


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


def run(user_input, messages, perms, client=None, console=None, usage=None):
    """One turn: append to `messages` until the model answers without asking for a tool; return that answer.

    usage: a dict whose "prompt_tokens", the size of the last request, is carried from turn to turn
    """
    from openai import OpenAIError  # the import takes half a second: not while the person waits for the first prompt

    client, console = client or make_client(*model_server()), console or make_console()
    usage = {"prompt_tokens": 0} if usage is None else usage
    messages.append({"role": "user", "content": user_input})
    try:
        for _ in range(MAX_STEPS):
            fit_context(messages, usage["prompt_tokens"], client, console)
            with console.status("thinking"):
                response = client.chat.completions.create(model=MODEL, messages=messages, tools=tools.get_schemas())
            reply = response.choices[0].message
            usage["prompt_tokens"] = prompt_tokens(response, messages, console)
            messages.append(to_message(reply))
            if reply.content:
                console.print(visible(reply.content))
            if not reply.tool_calls:
                return reply.content
            for call in reply.tool_calls:  # there may be several; each gets its own result, in the same order
                show(console, f"→ {call.function.name} {call.function.arguments}")
                result = truncate_tool_result(handle_call(call, perms, console))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
                show(console, f"← {result}")
        console.print(f"Stopped after {MAX_STEPS} steps. Type 'go on' to continue.")
    except OpenAIError as error:
        reason = f"{client.base_url} {error} {error.__cause__ or ''}"
        console.print(visible(reason.replace(client.api_key, "***")), style="red")  # some providers repeat the key
    finally:
        close_turn(messages)


def prompt_tokens(response, messages, console):
    """Return and show how large the request was in tokens: the provider's number; where it sends none, an estimate."""
    tokens = getattr(response.usage, "prompt_tokens", None)
    mark = "" if isinstance(tokens, int) and tokens > 0 else "~"
    tokens = estimate_tokens([messages, tools.get_schemas()]) if mark else tokens
    show(console, f"prompt_tokens {mark}{tokens:,}")
    return tokens


def fit_context(messages, tokens, client, console):
    """Before each model call: clear above SOFT_LIMIT, compact above HARD_LIMIT, in place.

    Two independent steps: where there is nothing to compact, above HARD_LIMIT as well, clearing must still be done.
    """
    if tokens > SOFT_LIMIT:
        before = estimate_tokens(messages)
        clear_old_tool_results(messages)
        show_change(console, "cleared old tool results", before, messages)
    if tokens > HARD_LIMIT:
        before = estimate_tokens(messages)
        with console.status("compacting"):
            messages[:] = compact(client, MODEL, messages, warn=lambda text: show(console, text))
        show_change(console, "compacted", before, messages)


def show_change(console, what, before, messages):
    after = estimate_tokens(messages)
    if after != before:
        show(console, f"context ~{before:,} → ~{after:,} tokens · {what}")


def to_message(reply):
    """The SDK's reply as a plain dict, which JSON can store; only the fields that every provider takes back."""
    if not (reply.content or "").strip():  # providers refuse an empty text, as they refuse an empty list of calls
        reply.content = None if reply.tool_calls else "(empty reply)"
    message = {"role": "assistant", **reply.model_dump(exclude_none=True, include={"content"})}
    if reply.tool_calls:  # a broken call runs nothing, but as it stands no provider takes it back
        message["tool_calls"] = [tools.sendable_call(call) for call in reply.tool_calls]
    return message


def close_turn(messages):
    """Keep `messages` sendable after Ctrl-C or an error: every call gets a result, the turn ends with the assistant."""
    done = 0
    while messages[-1 - done]["role"] == "tool":
        done += 1
    for call in messages[-1 - done].get("tool_calls", [])[done:]:
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": STOPPED})
    if messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": STOPPED})


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


def show(console, text):
    """Print `text` as one dim line, cut at the edge of the screen."""
    line = visible(" ".join(text[:1000].split()))
    console.print(line, style="dim", no_wrap=True, overflow="ellipsis", soft_wrap=False)


def resume(console):
    """Return the messages of the last run, under today's system prompt; only that when there are none."""
    try:
        saved = load_session(SESSION, console.print) or []
    except OSError as error:
        console.print(f"Cannot read saved sessions: {error}", style="red")
        saved = []
    messages = [{"role": "system", "content": SYSTEM}, *(m for m in saved if m["role"] != "system")]
    if saved:
        close_turn(messages)
        console.print(f"Resumed the session '{SESSION}' with {len(saved)} messages.")
    return messages


def save(messages, console):
    try:
        save_session(SESSION, messages)
    except OSError as error:  # a full disk must not end the conversation
        console.print(f"Not saved, the conversation goes on in memory only: {error}", style="red")


def main():
    server, client, console, hint = model_server(), None, make_console(), ""
    perms, messages = PermissionManager(), resume(console)
    usage = {"prompt_tokens": estimate_tokens(messages)}
    while True:
        try:
            console.print(hint, end="")
            hint = ""
            user_input = input("> ").strip()
            if user_input in ("exit", "quit"):
                return
            if user_input:
                client = client or make_client(*server)
                try:
                    run(user_input, messages, perms, client, console, usage)
                finally:
                    save(messages, console)
        except EOFError:  # Ctrl-D, or the end of piped input
            return console.print()
        except KeyboardInterrupt:  # printed in the try above: people press Ctrl-C twice
            hint = "\nStopped. Type 'exit' or press Ctrl-D to leave.\n"


if __name__ == "__main__":
    sys.stdin.reconfigure(errors="replace")  # half a character typed or piped in must not end the program
    sys.stdout.reconfigure(errors="replace")  # nor one that this terminal cannot show
    main()
