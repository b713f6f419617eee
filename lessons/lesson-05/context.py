"""What the model sees and what is kept: rules and skills, long results cut, old ones cleared, summaries, sessions."""

import json
import os
import re
import tempfile
import time
from pathlib import Path

MAX_TOOL_CHARS = 4000
KEEP_RECENT_TOOL_RESULTS = 3
KEEP_LAST_TURNS = 2
STATE_DIR = Path(os.path.expanduser(os.environ.get("NAMI_STATE_DIR") or "~/.nami-agent"))
SESSION_DIR = STATE_DIR / "sessions"  # outside the workspace: the agent must not read or rewrite its own memory
MAX_RULES_CHARS = 8000  # of one AGENTS.md: it is sent with every request
MAX_DESCRIPTION_CHARS = 1024  # the convention's own limit
SKILL_FOLDERS = [Path(".nami/skills"), Path(".agents/skills"), STATE_DIR / "skills"]
PLACEHOLDER = "[old tool result cleared 旧的工具结果已清除; call the tool again if you need it 需要时可再次调用]"
SUMMARY_PROMPT = """Summarise the conversation below so that the work can go on from your summary alone.
Keep: the user's goal and rules, what is done, what was found out, file paths and parameters, open problems.
Drop: greetings, repetitions, raw tool output. Short points, at most 500 characters, in the user's language.
Answer with the summary only.

"""


def project_rules(workspace, warn=print):
    """Return the AGENTS.md of the state folder and of all folders from the git root down to `workspace`, with paths."""
    folders = [workspace, *workspace.parents]
    root = next((folder for folder in folders if (folder / ".git").exists()), workspace)
    paths = [folder / "AGENTS.md" for folder in [STATE_DIR, *reversed(folders[: folders.index(root) + 1])]]
    parts = []
    for path in filter(os.path.lexists, paths):
        try:
            text = read_inside(path, root)
            parts.append(f"Rules from {path}:\n{truncate_tool_result(text, MAX_RULES_CHARS)}")
        except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: links in a loop
            warn(f"Skipped {path}: {error}")
    return "\n\n".join(parts)


def find_skills(warn=print):
    """Return the skills as {name: (description, text)}; a broken one is skipped with a word."""
    skills = {}
    for place in SKILL_FOLDERS:
        for folder in filter(Path.is_dir, sorted(place.glob("[!.]*"))):
            try:
                name, description, text = parse_skill(read_inside(folder / "SKILL.md", Path.cwd()))
                if name in skills:
                    raise ValueError(f"there is a skill {name} already")
                skills[name] = description[:MAX_DESCRIPTION_CHARS], f"(from {folder})\n{text}"
            except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: links in a loop
                warn(f"Skipped the skill in {folder}: {error}")
    return skills


def parse_skill(text):
    """Return (name, description, body) of a SKILL.md: lines `key: value` between two lines of ---, then the body."""
    parts = re.match(r"---[ \t]*\n(.*?)^---[ \t]*\n(.*)", text, re.DOTALL | re.MULTILINE)
    fields = dict(re.findall(r"^(\w+):((?:.*\n)(?:[ \t]+.*\n)*)", parts[1] if parts else "", re.MULTILINE))
    name, description = (" ".join(fields.get(key, "").strip(" >|-\"'\n").split()) for key in ("name", "description"))
    if not re.fullmatch(r"[\w-]{1,64}", name) or not description:
        raise ValueError("SKILL.md must begin with ---, name: (letters, digits, -), description:, ---")
    return name, description, parts[2].strip()


def read_inside(path, root):
    """Return the text of `path`. ValueError: it is a link out of `root`; only the person's own may lead anywhere."""
    if STATE_DIR not in path.parents and not path.resolve().is_relative_to(root.resolve()):
        raise ValueError("it is a link that leads out of its folder")
    if not path.is_file():  # a named pipe would let us wait for ever
        raise ValueError(f"there is no file {path.name}")
    return path.read_text(encoding="utf-8-sig", errors="replace")


def load_skill(name: str) -> str:
    """Bring in the instructions of one of the skills that the system prompt lists.

    name: the name of the skill
    """
    skills = find_skills(warn=lambda text: None)  # the person was told at the start
    if name not in skills:
        raise ValueError(f"there is no skill {name}; there are {', '.join(skills) or 'none'}")
    return skills[name][1]


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
