"""What the model sees and what is kept: rules and skills, long results cut, old ones cleared, summaries, sessions."""

import contextlib
import json
import os
import re
import secrets
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

MAX_TOOL_CHARS = 4000
KEEP_RECENT_TOOL_RESULTS = 3
KEEP_LAST_TURNS = 2
STATE_DIR = Path(os.path.expanduser(os.environ.get("NAMI_STATE_DIR") or "~/.nami-agent"))
SESSION_DIR = STATE_DIR / "sessions"  # outside the workspace: the agent must not read or rewrite its own memory
MAX_RULES_CHARS = 8000  # of one AGENTS.md: it is sent with every request
MAX_DESCRIPTION_CHARS = 1024  # the convention's own limit
SKILL_FOLDERS = [Path(".nami/skills"), Path(".agents/skills"), STATE_DIR / "skills"]
LOG = ".log.jsonl"
INTERRUPTED = "(This call was interrupted: it may not have run, or only in part.)"
UNANSWERED = "(This turn stopped before an answer.)"
PLACEHOLDER = "[old tool result cleared 旧的工具结果已清除; call the tool again if you need it 需要时可再次调用]"
SUMMARY_PROMPT = """Summarise the conversation below so that the work can go on from your summary alone.
Keep: the user's goal and rules, what is done, what was found out, file paths and parameters, open problems.
Drop: greetings, repetitions, raw tool output. Short points, at most 500 characters, in the user's language.
Answer with the summary only.

"""


def project_rules(workspace, warn=print):
    """Return the AGENTS.md files that hold in the folder `workspace`, each with its path, as one text.

    The most general comes first: the state folder's, then from the root of the git repository down to the workspace.
    """
    folders = [workspace, *workspace.parents]
    root = next((folder for folder in folders if (folder / ".git").exists()), workspace)
    paths = [folder / "AGENTS.md" for folder in [STATE_DIR, *reversed(folders[: folders.index(root) + 1])]]
    parts = []
    for path in filter(os.path.lexists, paths):
        try:
            text = read_inside(path, path.parent.resolve() if path.parent == STATE_DIR else root)
            parts.append(f"Rules from {path}:\n{truncate_tool_result(text, MAX_RULES_CHARS)}")
        except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: links in a loop
            warn(f"Skipped {path}: {error}")
    return "\n\n".join(parts)


def find_skills(warn=print):
    """Return the skills as {name: (description, text)}; a broken one is skipped with a word."""
    skills = {}
    for place in SKILL_FOLDERS:
        for folder in sorted(place.glob("[!.]*/")):
            try:
                # Those of the workspace may not lead out of it; the person's own may be links to anywhere.
                root = folder.resolve() if STATE_DIR in folder.parents else Path.cwd()
                name, description, text = parse_skill(read_inside(folder / "SKILL.md", root))
                if name in skills:
                    raise ValueError(f"there is a skill {name} already")
                skills[name] = description[:MAX_DESCRIPTION_CHARS], f"(from {folder})\n{text}"
            except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: links in a loop
                warn(f"Skipped the skill in {folder}: {error}")
    return skills


def parse_skill(text):
    """Return (name, description, body) of a SKILL.md: lines `key: value` between two lines of ---, then the body."""
    parts = re.match(r"---\s*\n(.*?)^---\s*\n(.*)", text, re.DOTALL | re.MULTILINE)
    fields = dict(re.findall(r"^(\w+):((?:.*\n)(?:[ \t]+.*\n)*)", parts[1] if parts else "", re.MULTILINE))
    name, description = (" ".join(fields.get(key, "").strip(" >|-\"'\n").split()) for key in ("name", "description"))
    if not re.fullmatch(r"[\w-]{1,64}", name) or not description:
        raise ValueError("SKILL.md must begin with ---, name: (letters, digits, -), description:, ---")
    return name, description, parts[2].strip()


def read_inside(path, root):
    """Return the text of the file `path`; ValueError when a link leads out of the folder `root`."""
    if not path.resolve().is_relative_to(root.resolve()):
        raise ValueError("it is a link that leads out of its folder")
    if not path.is_file():
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
        if len(message["content"]) > len(PLACEHOLDER):
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
        warn(f"no summary, the history stays as it is: {error}")
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


# Sessions: NAME.json is the view, what the model sees; NAME.log.jsonl keeps every original message, for ever.


@dataclass
class Session:
    """One conversation. append, change and undo are the only ways to alter it: they keep memory and disk in step."""

    name: str
    workspace: str = ""  # the folder it was held in
    model: str = ""
    created: str = ""
    updated: str = ""
    title: str = ""  # how the first request begins
    turns: int = 0
    usage: dict = field(default_factory=lambda: {"prompt_tokens": 0})  # of the last request
    plan: list = field(default_factory=list)
    last_id: int = 0  # the newest record of the log
    log_size: int = 0  # how many bytes of the log this view knows
    messages: list = field(default_factory=list)  # dicts; their "id" is the record in the log, and is never sent
    lines: list = field(default_factory=list)  # each message as JSON text: made once, not at every saving
    log: object = None  # the open log file; also the lock
    warn: object = print
    problem: str = ""  # why the last saving failed


SAVED = [name for name in Session.__dataclass_fields__ if name not in ("name", "messages", "lines", "log", "warn", "problem")]


def append(session, *messages):
    """Add messages to the log and the view. Whatever kills us, only the one in flight is lost."""
    lines = []
    for message in map(without_id, messages):
        lines.append(log_line(session, "message", message=message))
        session.messages.append({**message, "id": session.last_id})
        session.lines.append(to_text(session.messages[-1]))
        if message["role"] == "user":
            session.turns += 1
            session.title = session.title or " ".join(message["content"].split())[:80]
    if len(messages) > 1:  # taken over from elsewhere: nobody has counted them yet
        session.usage["prompt_tokens"] = estimate_tokens(session.messages)
    store(session, lines)


def change(session, kind, messages, **details):
    """Make `messages` the view, after clearing, a summary, a repair or undo; the log keeps what was there before."""
    session.messages, session.lines = messages, []
    store(session, [log_line(session, kind, **details)])


def log_line(session, kind, **data):
    """Return the next record of the log. Its parent is the newest message of the view: so branches form a tree."""
    session.last_id += 1
    return {"id": session.last_id, "parent": tip(session.messages), "time": now(), "kind": kind, **data}


def store(session, lines):
    """Write the log first, then the view. A full disk must not end the conversation: say so once, go on in memory."""
    session.updated = now()
    if len(session.lines) != len(session.messages):
        session.lines = list(map(to_text, session.messages))
    try:
        session.log = session.log or open_log(session.name)
        for line in lines:
            session.log.write(to_text(line).encode(errors="replace") + b"\n")
        session.log.flush()
        session.log_size = session.log.tell()
        write_view(session.name, session.lines, {name: getattr(session, name) for name in SAVED})
    except OSError as error:
        if str(error) != session.problem:
            session.warn(f"Not saved, the conversation goes on in memory only: {error}")
        session.problem = str(error)


def tip(messages):
    """Return the id of the newest message that is in the log; summaries are not."""
    return next((message["id"] for message in reversed(messages) if "id" in message), None)


def without_id(message):
    return {key: value for key, value in message.items() if key != "id"}


def now():
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def open_log(name):
    """Open the log of session `name` for appending, and claim it: BlockingIOError when another process has it.

    The system lets go of the claim when the process ends, however it ends.
    """
    make_folders()
    log = open(session_path(name, LOG), "ab", opener=lambda path, flags: os.open(path, flags, 0o600))
    try:
        import fcntl

        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # Windows: there a claimed byte keeps readers out too, so it is one that nobody reads
        import msvcrt

        log.seek(2**30)
        msvcrt.locking(log.fileno(), msvcrt.LK_NBLCK, 1)
        log.seek(0, os.SEEK_END)
    if log.tell():
        log.write(b"\n")  # should a crash have torn the last line, it must not swallow the next one
    return log


def make_folders():
    if STATE_DIR.parts[0] == "~":
        raise OSError("there is no home folder; set NAMI_STATE_DIR to a folder")
    for folder in (SESSION_DIR.parent, SESSION_DIR):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    SESSION_DIR.chmod(0o700)  # also where it is older than this rule


def session_path(name, ending=".json"):
    """Return the file of session `name`. ValueError: a name is a file name on any system, never a path."""
    if not re.fullmatch(r"\w[\w.-]{0,79}", name) or re.match(r"(con|prn|aux|nul|com\d|lpt\d)(\.|$)", name, re.I):
        raise ValueError(f"{name!r} is no session name: use up to 80 letters, digits, '.', '_' or '-'")
    return SESSION_DIR / f"{name}{ending}"


def new_session(workspace, system, model="", warn=print):
    """Return an empty session named after the folder, the time and chance: two started at once must differ."""
    folder = re.sub(r"[^\w.-]|^[^\w]+", "-", workspace.name)[:40].lstrip("-.") or "root"
    name = f"{folder}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    messages = [{"role": "system", "content": system}]
    return Session(name, str(workspace), model, created=now(), messages=messages, warn=warn)


def save_session(name, messages):
    """Write `messages` as the view of session `name`."""
    write_view(name, map(to_text, messages), {})


def write_view(name, lines, header):
    """Write the view whole or not at all: a crash in between leaves the old file. OSError when it cannot.

    The first line holds all but the messages, so that a list of sessions reads one line of each.
    """
    make_folders()
    first = to_text({"format": 1, "name": name, **header})[:-1] + ', "messages": [\n'
    temp = tempfile.NamedTemporaryFile(dir=SESSION_DIR, prefix=".", delete=False)  # made with mode 0600
    try:
        with temp:
            temp.write((first + ",\n".join(lines) + "\n]}\n").encode(errors="replace"))
            temp.flush()
            os.fsync(temp.fileno())
        os.replace(temp.name, session_path(name))
    finally:
        Path(temp.name).unlink(missing_ok=True)  # still there only when writing failed


def to_text(value):
    return json.dumps(value, ensure_ascii=False)


def load_session(name, warn=print):
    """Return the saved messages of session `name`, or None."""
    view = load_view(name, warn)
    return view and list(map(without_id, view["messages"]))


def load_view(name, warn=print):
    """Return what was saved, as a dict, or None. A file that cannot be used is set aside, never overwritten."""
    path = session_path(name)
    if not path.exists():
        return None
    try:
        view = json.loads(path.read_text(encoding="utf-8"))
        view = {"messages": view} if isinstance(view, list) else view  # lesson 4 saved the bare messages
        if not isinstance(view, dict) or not all(map(is_message, view.get("messages", [None]))):
            raise ValueError("it is not a session")
        if not all(isinstance(view.get(name, kind()), kind) for name, kind in {"usage": dict, "log_size": int}.items()):
            raise ValueError("it is not a session")
        return view
    except (OSError, ValueError, TypeError, RecursionError) as error:
        aside = path.with_suffix(f".broken-{time.time_ns()}")
        path.rename(aside)
        warn(f"The session {path} cannot be read ({error}). It is kept as {aside.name}.")
        return None


def open_session(name, system, workspace, warn=print):
    """Return the saved session `name`, repaired, under today's system prompt; None when there is none.

    Where another process holds it, what comes back is a branch under a new name: two writers would lose messages.
    """
    view = load_view(name, warn)
    records = read_log(name, view.get("log_size", 0) if view else 0)
    if view is None and not records:
        return None
    # The view is gone: the log has everything.
    view = view or {"messages": originals(records, records[-1]["id"]), "log_size": 0, "workspace": str(workspace)}
    session = Session(name, **{key: view[key] for key in SAVED if key in view}, warn=warn)
    messages = [message for message in view["messages"] if message["role"] != "system"]
    for line in records:  # what was logged when we were killed before the view was saved
        session.last_id = max(session.last_id, line["id"])
        if line["kind"] == "message" and line["parent"] == tip(messages) and line["id"] != tip(messages):
            messages.append({**line["message"], "id": line["id"]})
    session.messages = [{"role": "system", "content": system}]
    try:
        session.log = open_log(name)
    except BlockingIOError:
        branch = new_session(workspace, system, session.model, warn)
        warn(f"Another process uses the session {name}: this goes on in a branch, {branch.name}")
        append(branch, *messages)
        return branch
    except OSError as error:
        warn(f"Not saved: {error}")
    if "log_size" not in view:  # from lesson 4: its messages are not in a log yet
        append(session, *messages)
    else:
        session.messages += messages
    repair_session(session)
    return session


def read_log(name, start=0):
    """Return the records of a session's log from byte `start` on; lines that are no record are skipped."""
    records = []
    with contextlib.suppress(OSError), open(session_path(name, LOG), "rb") as file:
        file.seek(start)
        for line in file:
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(line)
                if isinstance(value, dict) and isinstance(value.get("id"), int):
                    records.append(value)
    return records


def originals(records, identity):
    """Return the messages as they were said, from the first to the record `identity`, along the parents."""
    by_id = {line["id"]: line for line in records}
    chain, line = [], by_id.get(identity)
    while line:
        if line["kind"] == "message":
            chain.append({**line["message"], "id": line["id"]})
        line = by_id.get(line["parent"])
    return chain[::-1]


def undo(session):
    """Take the last request and all after it out of the view; return its text, None when there is none to take."""
    starts = [i for i, message in enumerate(session.messages) if message["role"] == "user" and "id" in message]
    if not starts:
        return None
    request = session.messages[starts[-1]]["content"]
    session.turns -= 1
    change(session, "undo", session.messages[: starts[-1]])
    return request


def fork(session, identity):
    """Return a new session with the original messages up to the end of the turn of request `identity`, a text."""
    records = read_log(session.name)
    end = next((line["id"] for line in records if str(line["id"]) == identity and line["kind"] == "message"), None)
    if end is None:
        raise ValueError(f"There is no request {identity} in this session; /tree shows the ids.")
    for line in records:
        if line["kind"] == "message" and line["parent"] == end and line["message"]["role"] != "user":
            end = line["id"]
    branch = new_session(Path(session.workspace), session.messages[0]["content"], session.model, session.warn)
    append(branch, *originals(records, end))
    return branch


def tree(session):
    """Return the requests of the session's log as lines: id, then text, indented by branch; * is on today's path."""
    records = read_log(session.name)
    path = {message["id"] for message in originals(records, tip(session.messages))}
    request, depth, children, lines = {None: None}, {None: 0}, {}, []  # request: of a message, the request it follows
    for line in records:
        before = request.get(line["parent"])
        request[line["id"]] = before
        if line["kind"] == "compact":
            lines.append("      (compacted here)")
        elif line["kind"] == "message" and line["message"]["role"] == "user":
            request[line["id"]] = line["id"]
            children[before] = children.get(before, -1) + 1
            depth[line["id"]] = depth[before] + children[before]
            mark = "*" if line["id"] in path else " "
            title = " ".join(line["message"]["content"].split())[:80]
            lines.append(f"{'    ' * depth[line['id']]}{mark} {line['id']:>4}  {title}")
    return lines


def saved_sessions():
    """Yield (path, header) of every saved session, newest first; header is a dict, None where the file is broken."""
    entries = (
        [entry for entry in os.scandir(SESSION_DIR) if entry.name.endswith(".json")] if SESSION_DIR.is_dir() else []
    )
    for entry in sorted(entries, key=lambda entry: entry.stat().st_mtime_ns, reverse=True):
        try:
            yield Path(entry.path), read_header(entry.path)
        except (OSError, ValueError, RecursionError):
            yield Path(entry.path), None


def read_header(path):
    """Return all but the messages of a view: from its first line, as save_session wrote it, else from the whole."""
    with open(path, "rb") as file:
        first = file.readline(100_000)
        file.seek(-3, os.SEEK_END)
        if file.read() == b"]}\n":
            return json.loads(first.rpartition(b', "messages"')[0] + b"}")
        file.seek(0)
        view = json.load(file)  # from lesson 4, or edited by hand
        return view if isinstance(view, dict) else {}


def repair_session(session):
    """Make the session sendable; tell the person, once, what was wrong."""
    messages, faults = repair(session.messages)
    if faults:
        session.warn(f"Repaired the conversation: {', '.join(sorted(set(faults)))}.")
        change(session, "repair", messages, faults=faults)


def repair(messages):
    """Return (messages that every provider takes, what was wrong: a list of texts). A second time changes nothing."""
    fixed, faults, rest = [], [], messages[::-1]
    while rest:
        message = rest.pop()
        last, role, calls = fixed[-1] if fixed else {"role": ""}, message["role"], message.get("tool_calls")
        if role == "tool" or (role == "system" and fixed):
            faults.append(f"a {role} message out of place left out")
        elif not calls and not message["content"].strip():
            faults.append("an empty message left out")
        elif role == "assistant" and last["role"] == "assistant":  # one with calls is followed by its results
            faults.append("two answers in a row joined")
            rest.append({**message, "content": f"{last['content']}\n{message.get('content') or ''}"})
            fixed.pop()
        elif role == "assistant" and last["role"] in ("", "system"):
            faults.append("an answer without a request left out")
        elif role == "user" and last["role"] in ("user", "tool"):
            faults.append("a turn without an answer closed")
            rest += [message, {"role": "assistant", "content": UNANSWERED}]
        else:
            fixed.append(message)
            results = {}
            while calls and rest and rest[-1]["role"] == "tool":
                result = rest.pop()
                results.setdefault(result["tool_call_id"], result)
            for call in calls or []:
                if call["id"] not in results:
                    faults.append("a call without a result answered")
                fixed.append(
                    results.pop(call["id"], {"role": "tool", "tool_call_id": call["id"], "content": INTERRUPTED})
                )
            faults += ["a result without its call left out"] * len(results)
    return fixed, faults


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
