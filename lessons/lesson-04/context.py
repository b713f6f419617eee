"""What the model sees and what is kept: cut long results, clear old ones, summarise the early conversation, save it."""

import json
import os
import tempfile
import time
from pathlib import Path

MAX_TOOL_CHARS = 4000
KEEP_RECENT_TOOL_RESULTS = 3
KEEP_LAST_TURNS = 2
STATE_DIR = Path(os.path.expanduser(os.environ.get("NAMI_STATE_DIR") or "~/.nami-agent"))
SESSION_DIR = STATE_DIR / "sessions"  # outside the workspace: the agent must not read or rewrite its own memory
PLACEHOLDER = "[old tool result cleared 旧的工具结果已清除; call the tool again if you need it 需要时可再次调用]"
SUMMARY_PROMPT = """Summarise the conversation below so that the work can go on from your summary alone.
Keep: the user's goal and rules, what is done, what was found out, file paths and parameters, open problems.
Drop: greetings, repetitions, raw tool output. Short points, at most 500 characters, in the user's language.
Answer with the summary only.

"""


def truncate_tool_result(text, limit=MAX_TOOL_CHARS):
    """Layer 1. Keep head and tail of `text`, together `limit` characters: errors and totals stand at the end."""
    half = limit // 2
    left = len(text) - 2 * half
    if len(text) <= limit:
        return text
    # Without the note the model takes what it sees for the whole, and concludes wrongly.
    return f"{text[:half]}\n[… {left} characters omitted 中间省略 {left} 字符 …]\n{text[len(text) - half :]}"


def clear_old_tool_results(messages, keep=KEEP_RECENT_TOOL_RESULTS):
    """Layer 2. Blank all but the newest `keep` tool results, in place; no message goes, each call needs its result."""
    results = [message for message in messages if message["role"] == "tool"]
    for message in results[: max(0, len(results) - keep)]:
        message["content"] = PLACEHOLDER
    return messages


def split_for_compact(messages, keep_turns=KEEP_LAST_TURNS):
    """Return (old, recent), cut where a user message starts a turn, so no result loses its call; None: too short."""
    turns = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if len(turns) <= keep_turns:
        return None
    cut = turns[-keep_turns]
    return messages[1:cut], messages[cut:]  # messages[0] is the system prompt


def render_for_summary(msgs):
    """Return the messages as plain text: the model must read them, not continue them."""
    lines = []
    for message in msgs:
        if message.get("content"):
            lines.append(f"[{message['role']}] {message['content']}")
        for call in message.get("tool_calls", []):
            lines.append(f"[call] {call['function']['name']}({call['function']['arguments']})")
    return "\n".join(lines)


def compact(client, model, messages, warn=print):
    """Layer 3. Return [system, summary, acknowledgement, *recent turns]; `messages` itself if that is not possible."""
    parts = split_for_compact(messages)
    if parts is None:
        warn(f"nothing to compact: the last {KEEP_LAST_TURNS} requests are always kept")
        return messages
    old, recent = parts
    summary = summarise(client, model, old, warn)
    if not summary:
        return messages
    return [
        messages[0],
        {"role": "user", "content": f"[Summary of the conversation so far 此前对话的摘要]\n{summary}"},
        {"role": "assistant", "content": "Understood; I go on from there."},  # roles must alternate
        *recent,
    ]


def summarise(client, model, old, warn):
    """Return the model's summary of the messages `old`; None, with a warning, when it is not fit to replace them."""
    prompt = SUMMARY_PROMPT + render_for_summary(old)
    try:
        response = client.chat.completions.create(model=model, messages=[{"role": "user", "content": prompt}])
        choice = response.choices[0]
        text = (choice.message.content or "").strip()
    except Exception as error:  # whatever went wrong, the history stays and the work goes on
        warn(f"no summary ({type(error).__name__}), the history stays as it is")  # its text may repeat the key
        return None
    finish = getattr(choice, "finish_reason", "stop")
    if not text or finish in ("length", "content_filter") or getattr(choice.message, "tool_calls", None):
        warn(f"the summary came back empty or cut (finish_reason {finish}), the history stays as it is")
        return None
    return text


def estimate_tokens(value):
    """Return about how many tokens `value` (anything JSON can hold) takes: ASCII characters / 4 + 1 for each other."""
    text = json.dumps(value, ensure_ascii=False)
    ascii_length = len(text.encode("ascii", "ignore"))
    return ascii_length // 4 + len(text) - ascii_length


def save_session(name, messages):
    """Write the session whole or not at all: a crash in between leaves the old file. OSError when it cannot."""
    if STATE_DIR.parts[0] == "~":
        raise OSError("there is no home folder; set NAMI_STATE_DIR to a folder")
    for folder in (SESSION_DIR.parent, SESSION_DIR):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    SESSION_DIR.chmod(0o700)  # also where it is older than this rule
    data = json.dumps(messages, ensure_ascii=False, indent=1).encode(errors="replace")
    temp = tempfile.NamedTemporaryFile(dir=SESSION_DIR, prefix=".", delete=False)  # made with mode 0600
    try:
        with temp:
            temp.write(data)
            temp.flush()
            os.fsync(temp.fileno())
        os.replace(temp.name, SESSION_DIR / f"{name}.json")
    finally:
        Path(temp.name).unlink(missing_ok=True)  # still there only when writing failed


def load_session(name, warn=print):
    """Return the saved messages, or None. A file that cannot be used is set aside, so that saving never destroys it."""
    path = SESSION_DIR / f"{name}.json"
    if not path.exists():
        return None
    try:
        messages = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(messages, list) or not all(map(is_message, messages)):
            raise ValueError("it is not a list of messages")
        return messages
    except (OSError, ValueError, RecursionError) as error:
        aside = path.with_suffix(f".broken-{time.time_ns()}")
        path.rename(aside)
        warn(f"The session {path} cannot be read ({error}). It is kept as {aside.name}; a new one starts.")
        return None


def is_message(value):
    match value:
        case {"role": "assistant", "tool_calls": [*calls]}:
            return all(map(is_call, calls))
        case {"role": "tool", "tool_call_id": str(), "content": str()}:
            return True
        case {"role": "system" | "user" | "assistant", "content": str()}:
            return True
    return False


def is_call(value):
    match value:
        case {"id": str(), "function": {"name": str(), "arguments": str()}}:
            return True
    return False
