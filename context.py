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
TIME = "%Y-%m-%dT%H:%M:%S%z"
INTERRUPTED = "(This call was interrupted: it may not have run, or only in part.)"
UNANSWERED = "(This turn stopped before an answer.)"
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
            text = read_inside(path, path.parent.resolve() if path.parent == STATE_DIR else root)
            parts.append(f"Rules from {path}:\n{truncate_tool_result(text, MAX_RULES_CHARS)}")
        except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: links in a loop
            warn(f"Skipped {path}: {error}")
    return "\n\n".join(parts)


def find_skills(warn=print):
    """Return the skills as {name: (description, text)}; a broken one is skipped with a word."""
    skills = {}
    for place in SKILL_FOLDERS:
        folders = sorted(place.iterdir()) if place.is_dir() and os.access(place, os.R_OK) else []
        for folder in (path for path in folders if path.is_dir() and not path.name.startswith(".")):
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
    parts = re.match(r"---[ \t]*\n(.*?)^---[ \t]*\n(.*)", text, re.DOTALL | re.MULTILINE)
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
    messages: list = field(default_factory=list)  # dicts; "id" is their record, a summary's "parent" the one it follows
    lines: list = field(default_factory=list)  # each message as JSON bytes: made once, not at every saving
    pending: list = field(default_factory=list)  # records that are not in the log yet
    log: object = None  # the open log file; also the lock
    warn: object = print
    problem: str = ""  # why the last saving failed


SAVED = list(Session.__dataclass_fields__)[1:11]  # workspace to log_size


def append(session, *messages):
    """Add messages to the log and the view. Whatever kills us, only the one in flight is lost."""
    for message in map(sendable, messages):
        add_record(session, "message", message=message)
        session.messages.append({**message, "id": session.last_id})
        session.lines.append(to_bytes(session.messages[-1]))
        if message["role"] == "user":
            session.turns += 1
            session.title = session.title or " ".join(message["content"].split())[:80]
    save(session)


def change(session, kind, messages, **details):
    """Make `messages` the view, after clearing, a summary, a repair or undo; the log keeps what was there before."""
    if kind == "compact":  # the summary stands for messages that are gone: what is said next follows the last of them
        kept = {message.get("id") for message in messages}
        last = tip([message for message in session.messages if message.get("id") not in kept])
        messages = [messages[0], *({"parent": last, **message} for message in messages[1:3]), *messages[3:]]
    session.messages, session.lines = messages, []
    add_record(session, kind, **details)
    save(session)


def add_record(session, kind, **data):
    """Queue the next record of the log. Its parent is the newest message of the view: so branches form a tree."""
    session.last_id += 1
    record = {"id": session.last_id, "parent": tip(session.messages), "time": time.strftime(TIME), "kind": kind, **data}
    session.pending.append(record)


def save(session):
    """Write the log first, then the view. A full disk must not end the conversation: say so once, go on in memory."""
    session.updated = time.strftime(TIME)
    if len(session.lines) != len(session.messages):
        session.lines = list(map(to_bytes, session.messages))
    try:
        session.log = session.log or open_log(session)
        write_log(session)
        write_view(session.name, session.lines, {name: getattr(session, name) for name in SAVED})
        session.problem = ""
    except OSError as error:
        if not session.problem:
            session.warn(f"Not saved, the conversation goes on in memory only: {error}")
        session.problem = str(error)


def write_log(session):
    """Append the queued records; a line torn by a crash or a full disk is ended first, so that it spoils no other."""
    data = b"".join(to_bytes(record) + b"\n" for record in session.pending)
    if session.log.seek(0, os.SEEK_END) and session.log.seek(-1, os.SEEK_END) and session.log.read(1) != b"\n":
        data = b"\n" + data
    if session.log.write(data) < len(data):
        raise OSError("the disk is full")
    session.pending, session.log_size = [], session.log.tell()


def open_log(session):
    """Open the session's log and claim it for this process; BlockingIOError when another has it. A new one is new."""
    make_folders()
    if not session.log_size and session_exists(session.name):  # since we chose the name
        session.name += f"-{secrets.token_hex(2)}"
    path = session_path(session.name, LOG)
    log = open(path, "a+b", buffering=0, opener=lambda path, flags: os.open(path, flags, 0o600))
    path.chmod(0o600)  # also where it is older than this rule
    try:
        import fcntl

        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # Windows: there a claimed byte keeps readers out too, so it is one that nobody reads
        import msvcrt

        log.seek(2**30)
        msvcrt.locking(log.fileno(), msvcrt.LK_NBLCK, 1)
    return log


def close(session):
    """Let go of the session, so that it can be opened again."""
    if session and session.log:
        session.log.close()
        session.log = None


def tip(messages):
    """Return the id of the newest message that is in the log."""
    ids = (message.get("id") or message.get("parent") for message in reversed(messages))
    return next(filter(None, ids), None)


def sendable(message):
    """Return the message as a provider gets it: with the keys of the API, and none of ours."""
    return {key: message[key] for key in ("role", "content", "tool_calls", "tool_call_id") if key in message}


def clean(value):
    """Return text, or what JSON can hold, without half characters (lone surrogates), which nobody can send or save."""
    return json.loads(to_bytes(value))


def make_folders():
    if STATE_DIR.parts[0] == "~":
        raise OSError("there is no home folder; set NAMI_STATE_DIR to a folder")
    SESSION_DIR.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    SESSION_DIR.mkdir(mode=0o700, exist_ok=True)
    SESSION_DIR.chmod(0o700)  # also where it is older than this rule


def session_path(name, ending=".json"):
    """Return the file of session `name`. ValueError: a name is a file name on any system, never a path."""
    reserved = re.match(r"(con|prn|aux|nul|com\d|lpt\d)(\.|$)", name, re.IGNORECASE)  # on Windows
    if not re.fullmatch(r"\w[\w.-]{0,79}", name) or len(name.encode()) > 200 or reserved:
        raise ValueError(f"{name!r} is no session name: use up to 80 letters, digits, '.', '_' or '-'")
    return SESSION_DIR / f"{name}{ending}"


def session_exists(name):
    return any(session_path(name, ending).exists() for ending in (".json", LOG))


def folder_name(workspace):
    """Return how the names of a folder's sessions begin."""
    return re.sub(r"[^\w-]", "-", clean(workspace.name))[:40].lstrip("-") or "root"


def new_session(workspace, system, model="", warn=print):
    """Return an empty session named after the folder, the time and chance: two started at once must differ."""
    start = f"{folder_name(workspace)}-{time.strftime('%Y%m%d-%H%M%S')}"
    while session_exists(name := f"{start}-{secrets.token_hex(2)}"):
        pass
    messages = [{"role": "system", "content": system}]
    return Session(name, clean(str(workspace)), model, created=time.strftime(TIME), messages=messages, warn=warn)


def save_session(name, messages):
    """Write `messages` as the view of session `name`."""
    write_view(name, map(to_bytes, messages), {})


def write_view(name, lines, header):
    """Write the view, whole or not at all. Its first line is all but the messages: a list of sessions needs no more."""
    make_folders()
    first = to_bytes({"format": 1, "name": name, **header})[:-1] + b', "messages": [\n'
    temp = tempfile.NamedTemporaryFile(dir=SESSION_DIR, prefix=".", delete=False)  # made with mode 0600
    try:
        with temp:
            temp.write(b"".join([first, b",\n".join(lines), b"\n]}\n"]))
            temp.flush()
            os.fsync(temp.fileno())
        os.replace(temp.name, session_path(name))
    finally:
        Path(temp.name).unlink(missing_ok=True)  # still there only when writing failed


def to_bytes(value):
    return json.dumps(value, ensure_ascii=False).encode(errors="replace")


def load_session(name, warn=print):
    """Return the saved messages of session `name`, or None."""
    view = load_view(name, warn)
    return view and list(map(sendable, view["messages"]))


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
        return clean(view)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        aside = path.with_suffix(f".broken-{time.time_ns()}")
        with contextlib.suppress(OSError):
            path.rename(aside)
        warn(f"The session {path} cannot be read ({error}). It is kept as {aside.name}.")
        return None


def header_of(view):
    """Return the Session fields in a saved view; one of the wrong type, as in a file edited by hand, is left out."""
    blank = Session("")
    header = {name: view[name] for name in SAVED if type(view.get(name)) is type(getattr(blank, name))}
    if not isinstance(header.get("usage", {}).get("prompt_tokens", 0), int):
        del header["usage"]
    return header


def open_session(name, system, workspace, warn=print):
    """Return the saved session `name`, or None; a branch where another process holds it: two would lose messages."""
    session = Session(name, clean(str(workspace)), log_size=1, warn=warn)  # not 0: it is not a new one
    if not session_exists(name):
        return None
    try:
        session.log = open_log(session)  # before reading: from here on nobody else writes
    except BlockingIOError:
        session = new_session(workspace, system, warn=warn)
        warn(f"Another process uses the session {name}: this goes on in a branch, {session.name}.")
    except OSError as error:
        warn(f"Not saved: {error.strerror or error}")
    load_into(session, name, system)
    return session


def load_into(session, name, system):
    """Fill `session` from the view of session `name`, and from the log with what is newer or not in the view."""
    view = load_view(name, session.warn)
    header, own = header_of(view or {}), session.name == name
    records = read_log(name, header.get("log_size", 0))
    messages = [message for message in (view or {"messages": []})["messages"] if message["role"] != "system"]
    logged = own and "log_size" in header and os.path.getsize(session_path(name, LOG)) >= header["log_size"]
    if view is None and records:  # the log has everything
        end = records[-1]
        messages, logged = originals(records, end["id"] if end["kind"] == "message" else end["parent"]), own
    elif "log_size" in header:
        messages = catch_up(messages, records)
    kept = messages if logged else []
    if own and view and not logged:  # from lesson 4; should we have been killed while logging it, not all is new
        said = originals(records, records[-1]["id"]) if records else []
        kept = [old for old, new in zip(said, messages, strict=False) if sendable(old) == sendable(new)]
    for key, value in header.items() if own else []:
        setattr(session, key, value)
    ids = [record["id"] for record in records] + [message.get("id", 0) for message in messages]
    session.last_id = max([session.last_id, *ids]) if own else 0
    session.messages = [{"role": "system", "content": system}, *kept]
    if view is None or not logged:
        requests = [message["content"] for message in kept if message["role"] == "user"]
        session.turns, session.title = len(requests), " ".join(" ".join(requests[:1]).split())[:80]
        session.usage = {"prompt_tokens": estimate_tokens(messages)}
        append(session, *messages[len(kept) :])
    repair_session(session, closed=True)


def catch_up(messages, records):
    """Return the view's messages with what the log has since: we were killed before the view was saved."""
    for record in records:
        ids = [message.get("id") or message.get("parent") for message in messages]
        if record["kind"] == "message" and record["parent"] == tip(messages) and record["id"] not in ids:
            messages = [*messages, {**record["message"], "id": record["id"]}]
        elif record["kind"] == "undo" and record["parent"] in [None, *ids]:
            messages = messages[: len(ids) - ids[::-1].index(record["parent"])] if record["parent"] else []
    return messages


def read_log(name, start=0):
    """Return the records of a session's log from byte `start` on; lines that are no record are skipped."""
    records = {}
    with contextlib.suppress(OSError), open(session_path(name, LOG), "rb") as file:
        file.seek(start)
        for line in file:
            with contextlib.suppress(ValueError, RecursionError):
                record = json.loads(line)
                if is_record(record):
                    records[record["id"]] = record
    return list(records.values())


def originals(records, identity):
    """Return the messages as they were said, from the first to the record `identity`, along the parents."""
    by_id = {record["id"]: record for record in records}
    chain, record = [], by_id.get(identity)
    while record:
        if record["kind"] == "message":
            chain.append({**record["message"], "id": record["id"]})
        parent = record["parent"]
        record = by_id.get(parent) if parent and parent < record["id"] else None  # a damaged log could go in circles
    return chain[::-1]


def undo(session):
    """Take the last request and all after it out of the view; return its text, None when there is none to take."""
    starts = [i for i, message in enumerate(session.messages) if message["role"] == "user" and "id" in message]
    if not starts:
        return None
    request, rest = session.messages[starts[-1]]["content"], session.messages[: starts[-1]]
    session.turns, session.usage = max(session.turns - 1, 0), {"prompt_tokens": estimate_tokens(rest)}
    change(session, "undo", rest)
    return request


def fork(session, identity):
    """Return a new session with the original messages up to the end of the turn of request `identity`, a text."""
    records = read_log(session.name)
    end = next((record["id"] for record in records if str(record["id"]) == identity and "message" in record), None)
    if end is None:
        raise ValueError(f"There is no request {identity} in this session; /tree shows the ids.")
    for record in records:
        if record["kind"] == "message" and record["parent"] == end and record["message"]["role"] != "user":
            end = record["id"]
    branch = new_session(Path(session.workspace), session.messages[0]["content"], session.model, session.warn)
    branch.plan = list(session.plan)
    branch.usage["prompt_tokens"] = estimate_tokens(messages := originals(records, end))
    append(branch, *messages)
    repair_session(branch, closed=True)
    return branch


def tree(session):
    """Return the requests of the session's log as lines: id, then text, indented by branch; * is on today's path."""
    records = read_log(session.name)
    path = {message["id"] for message in originals(records, tip(session.messages))}
    request, depth, children, lines = {None: None}, {None: 0}, {}, []  # request: the one that a record belongs to
    for record in records:
        before = request.get(record["parent"])
        request[record["id"]] = before
        if record["kind"] == "compact":
            lines.append("      (compacted here)")
        elif record["kind"] == "message" and record["message"]["role"] == "user":
            request[record["id"]] = record["id"]
            children[before] = children.get(before, -1) + 1
            depth[record["id"]] = depth[before] + children[before]
            mark = "*" if record["id"] in path else " "
            title = " ".join(record["message"]["content"].split())[:80]
            lines.append(f"{'    ' * depth[record['id']]}{mark} {record['id']:>4}  {title}")
    return lines


def saved_sessions():
    """Yield (path, header) of every saved session, newest first; header is a dict, None where the file is broken."""
    entries = os.scandir(SESSION_DIR) if SESSION_DIR.is_dir() and os.access(SESSION_DIR, os.R_OK) else []
    entries = [entry for entry in entries if entry.name.endswith(".json")]
    for entry in sorted(entries, key=lambda entry: entry.stat(follow_symlinks=False).st_mtime_ns, reverse=True):
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
            return header_of(json.loads(first.rpartition(b', "messages"')[0] + b"}"))
        file.seek(0)
        view = json.load(file)  # from lesson 4, or edited by hand
        return header_of(view if isinstance(view, dict) else {})


def repair_session(session, closed=False, quiet=False):
    """Make the session sendable, or `closed`: ready for the next request. Tell the person what was wrong."""
    messages, faults = repair(session.messages)
    if closed and messages[-1]["role"] in ("user", "tool"):
        messages.append({"role": "assistant", "content": UNANSWERED})
        faults.append("a turn without an answer closed")
    if messages != session.messages:
        faults = sorted(set(faults)) or ["results put in order"]
        if not quiet:
            session.warn(f"Repaired the conversation: {', '.join(faults)}.")
        change(session, "repair", messages, faults=faults)


def repair(messages):
    """Return (messages that every provider takes, what was wrong: a list of texts). A second time changes nothing."""
    fixed, faults, seen, rest = [], [], set(), messages[::-1]
    while rest:
        message = rest.pop()
        role, calls, text = message["role"], message.get("tool_calls") or [], message.get("content") or ""
        last = fixed[-1]["role"] if fixed else ""
        if role == "tool" or (role == "system" and fixed):
            faults.append(f"a {role} message out of place left out")
        elif not calls and not text.strip():
            faults.append("an empty message left out")
        elif role == "assistant" and last in ("", "system"):
            faults.append("an answer without a request left out")
        elif role == "assistant" and last == "assistant":  # one with calls is followed by its results
            faults.append("two answers in a row joined")
            rest.append({**message, "content": f"{fixed.pop()['content']}\n{text}"})
        elif role == "user" and last in ("user", "tool"):
            faults.append("a turn without an answer closed")
            rest += [message, {"role": "assistant", "content": UNANSWERED}]
        elif calls:
            results = []
            while rest and rest[-1]["role"] == "tool":
                results.append(rest.pop())
            fixed += repair_calls(message, results, seen, faults)
        else:
            fixed.append({key: value for key, value in message.items() if key != "tool_calls"})
    return fixed, faults


def repair_calls(message, results, seen, faults):
    """Return an assistant message with calls, followed by exactly one result for each. seen: the ids used before."""
    calls, answers = [], []
    for call in message["tool_calls"]:
        own = next((result for result in results if result["tool_call_id"] == call["id"]), None)
        if own is None:
            faults.append("a call without a result answered")
        else:
            results.remove(own)
        identity = call["id"] or "call"
        while identity in seen:  # providers want each id once; some models count from 0 in every reply
            identity += f"-{len(seen)}"
        seen.add(identity)
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        with contextlib.suppress(ValueError, RecursionError):
            arguments = arguments if isinstance(json.loads(arguments), dict) else "{}"
        calls.append({"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}})
        answers.append({**(own or {"role": "tool", "content": INTERRUPTED}), "tool_call_id": identity})
    faults += ["a result without its call left out"] * len(results)
    message = {key: value for key, value in message.items() if key != "content" or value}
    return [{**message, "tool_calls": calls}, *answers]


def is_message(value):
    match value:
        case {"id": identity} if type(identity) is not int:
            return False
        case {"role": "tool", "tool_call_id": str(), "content": str()} | {"role": "system" | "user", "content": str()}:
            return True
        case {"role": "assistant"}:
            calls = value.get("tool_calls") or []
            return isinstance(value.get("content") or "", str) and isinstance(calls, list) and all(map(is_call, calls))
    return False


def is_call(value):
    match value:
        case {"id": str(), "function": {"name": str(), "arguments": str()}}:
            return True
    return False


def is_record(value):
    match value:
        case {"id": int(), "parent": int() | None, "kind": str(kind)}:
            return kind != "message" or is_message(value.get("message"))
    return False
