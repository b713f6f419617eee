"""The practice model: an OpenAI-compatible server on loopback that follows fixed rules instead of thinking.

It lets the agent run with no key and no network, really uses the offered tools, refuses malformed requests as a strict
provider does, and plays back scripted replies for tests. By hand: `python lessons/practice_server.py --port 8099`.
"""

import itertools
import json
import os
import re
import sys
import threading
import weakref
import zlib

WINDOW = 32_000  # tokens
CJK = re.compile(r"[\u3400-\u9fff]")
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
BASE = {"role", "content"}
KEYS = {"system": BASE, "user": BASE, "assistant": BASE | {"tool_calls"}, "tool": BASE | {"tool_call_id"}}


def count_tokens(text):
    """Estimate the tokens of a str: a quarter per ASCII character, one per other character, rounded up (int)."""
    plain = len(text.encode("ascii", "ignore"))
    return -(-plain // 4) + len(text) - plain


def serialise(messages, tools):
    """Return the two texts whose tokens a request costs, tools first: the prefix that a provider would cache."""
    return [json.dumps(part, ensure_ascii=False) for part in (tools, messages) if part]


def prompt_size(messages, tools):
    return sum(count_tokens(text) for text in serialise(messages, tools))


# --- The strict checks -------------------------------------------------------------------------------------------


def require(condition, text):
    if not condition:
        raise ValueError(text)


def is_text(value):
    return isinstance(value, str) and value != ""


def check_request(body):
    """Check a chat request (dict) as the strictest providers do; raises ValueError with the text for the client."""
    require(is_text(body.get("model")), "'model' must be a non-empty string.")
    messages = body.get("messages")
    require(isinstance(messages, list) and messages, "'messages' must be a non-empty list.")
    ids = set()
    for number, message in enumerate(messages):
        check_message(f"messages[{number}]", message, ids)
    check_order(messages)
    if body.get("tools") is not None:
        check_tools(body["tools"])
    surrogate = re.search("[\ud800-\udfff]", json.dumps(body, ensure_ascii=False))
    require(not surrogate, "The request holds a lone surrogate, which is not valid Unicode text.")


def check_message(where, message, ids):
    role = message.get("role") if isinstance(message, dict) else None
    require(isinstance(role, str) and role in KEYS, f"{where}: the role must be one of {', '.join(KEYS)}.")
    extra = sorted(set(message) - KEYS[role])
    require(not extra, f"{where}: unknown key {extra} in a message with role '{role}'.")
    content = message.get("content")
    if role == "assistant":
        calls = message.get("tool_calls")
        require("tool_calls" not in message or (isinstance(calls, list) and calls), f"{where}: 'tool_calls' is empty.")
        allowed = is_text(content) or (calls and content is None)
        require(allowed, f"{where}: assistant content must be a non-empty string, or null beside 'tool_calls'.")
        for number, call in enumerate(calls or []):
            check_call(f"{where}.tool_calls[{number}]", call, ids)
    else:
        require(isinstance(content, str), f"{where}: the content must be a string.")
        require(content or role != "user", f"{where}: the content of a user message must not be empty.")
        require(role != "tool" or is_text(message.get("tool_call_id")), f"{where}: 'tool_call_id' is missing.")


def check_call(where, call, ids):
    require(isinstance(call, dict) and set(call) == {"id", "type", "function"}, f"{where}: needs id, type, function.")
    require(call["type"] == "function", f"{where}: the type must be 'function'.")
    function = call["function"]
    shaped = isinstance(function, dict) and set(function) == {"name", "arguments"}
    require(shaped, f"{where}: 'function' needs exactly a name and arguments.")
    require(is_text(function["name"]) and NAME.fullmatch(function["name"]), f"{where}: the name is not valid.")
    try:
        arguments = json.loads(function["arguments"])
    except (TypeError, ValueError, RecursionError):
        arguments = None
    is_object = isinstance(function["arguments"], str) and isinstance(arguments, dict)
    require(is_object, f"{where}: 'arguments' must be a string with a JSON object.")
    require(is_text(call["id"]) and call["id"] not in ids, f"{where}: the id is empty or not unique.")
    ids.add(call["id"])


def check_order(messages):
    open_ids, before = [], "system"
    for number, message in enumerate(messages):
        role, where = message["role"], f"messages[{number}]"
        if role == "tool":
            require(open_ids, f"{where}: must be a response to a preceding message with 'tool_calls'.")
            require(message["tool_call_id"] == open_ids[0], unanswered(open_ids))
            open_ids.pop(0)
        else:
            require(not open_ids, unanswered(open_ids))
            require(role != "system" or number == 0, f"{where}: only the first message may be a system message.")
            require(role != "user" or before in ("system", "assistant"), f"{where}: user must not follow {before}.")
            require(role != "assistant" or before in ("user", "tool"), f"{where}: assistant must not follow {before}.")
            open_ids = [call["id"] for call in message.get("tool_calls", [])]
        before = role
    require(not open_ids, unanswered(open_ids))
    require(before in ("user", "tool"), "The last message must be a user or a tool message.")


def unanswered(ids):
    return f"Every 'tool_calls' must be followed by tool messages, one for each id in order; missing next: {ids}."


def check_tools(tools):
    require(isinstance(tools, list) and tools, "'tools' must be a non-empty list.")
    names = set()
    for number, tool in enumerate(tools):
        where = f"tools[{number}]"
        function = tool.get("function") if isinstance(tool, dict) else None
        require(isinstance(function, dict) and tool.get("type") == "function", f"{where}: must be a function.")
        name, schema = function.get("name"), function.get("parameters")
        require(is_text(name) and NAME.fullmatch(name), f"{where}: the name is not valid.")
        require(name not in names, f"{where}: the name '{name}' is not unique.")
        names.add(name)
        require(isinstance(function.get("description"), str), f"{where}: the description must be a string.")
        shaped = isinstance(schema, dict) and schema.get("type") == "object"
        shaped = shaped and isinstance(schema.get("properties", {}), dict)
        require(shaped, f"{where}: 'parameters' must be the schema of an object.")
        for field, spec in schema.get("properties", {}).items():
            told = spec.get("type") != "array" or isinstance(spec.get("items"), dict)
            require(told, f"{where}: array schema of '{field}' missing items.")


# --- The server --------------------------------------------------------------------------------------------------


def start(script=None, window=WINDOW, port=0, stall=None, strict=True):
    """Serve on 127.0.0.1 in a daemon thread and return the server, also usable as a context manager.

    script: None for the rule-based model, else a list of replies (see make_reply), one per chat request.
    window: tokens; a larger request is refused. port: int, 0 picks a free one. strict: False skips check_request.
    stall: seconds, or a threading.Event to wait for, before every chat reply.
    The server has url, requests, paths, authorizations, refusals (lists), script (what is left of it) and close().
    Raises OSError when the port is taken.
    """
    import http.server  # 50 ms that a session with a real model does not pay
    import socketserver

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        do_GET = do_POST = answer
        disable_nagle_algorithm = True  # headers and body are two writes: without this each reply waits 40 ms

        def setup(self):
            super().setup()
            self.server.connections.add(self.connection)  # a weak set: it forgets what was closed

        def log_message(self, *args):
            pass

    class Server(http.server.ThreadingHTTPServer):
        allow_reuse_address = os.name != "nt"  # on Windows it would let two servers share one port
        close = __exit__ = close_server

        def server_bind(self):  # the inherited one looks up the host's full name, which can take seconds
            socketserver.TCPServer.server_bind(self)

        def handle_error(self, request, client_address):
            if not isinstance(sys.exc_info()[1], ConnectionError):  # a client that hung up is no news
                super().handle_error(request, client_address)

    server = Server(("127.0.0.1", port), Handler)
    server.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.script = None if script is None else list(script)
    server.window, server.stall, server.strict = window, stall, strict
    server.requests, server.paths, server.authorizations, server.refusals = [], [], [], []
    server.connections, server.closed = weakref.WeakSet(), threading.Event()
    server.ids, server.cached = itertools.count(1), ""
    server.thread = threading.Thread(target=serve, args=(server,), daemon=True)
    server.thread.start()
    return server


def serve(server):
    while not server.closed.is_set():
        server.handle_request()
    server.server_close()


def close_server(server, *exc_info):
    """Stop a server made by start(), with its open connections; a second call does nothing."""
    import contextlib
    import socket

    if server.closed.is_set():
        return
    server.closed.set()
    # Connecting once wakes handle_request; serve_forever would poll, and make every test wait for the poll.
    with contextlib.suppress(OSError):  # it may have seen the flag already
        socket.create_connection(server.server_address).close()
    for connection in list(server.connections):
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
    server.thread.join(1)


def answer(handler):
    server, path = handler.server, handler.path.split("?")[0]
    data = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))  # also on 404: keep-alive needs it
    if server.closed.is_set():
        handler.close_connection = True
        return
    server.paths.append(path)
    server.authorizations.append(handler.headers.get("Authorization"))
    if (handler.command, path) == ("POST", "/v1/chat/completions"):
        answer_chat(server, handler, data)
    elif (handler.command, path) == ("GET", "/v1/models"):
        model = {"id": "practice", "object": "model", "created": 0, "owned_by": "local"}
        send(handler, 200, {"object": "list", "data": [model]})
    else:
        send(handler, 404, error_body(f"There is no {handler.command} {path} here."))


def answer_chat(server, handler, data):
    try:
        body = json.loads(data)
        require(isinstance(body, dict), "not an object")
    except (ValueError, RecursionError):
        return refuse(server, handler, "The body of the request is not a JSON object.")
    server.requests.append(body)
    try:
        if server.strict:
            check_request(body)
    except ValueError as error:
        return refuse(server, handler, str(error))
    size = prompt_size(body.get("messages"), body.get("tools"))
    if size + (body.get("max_completion_tokens") or body.get("max_tokens") or 0) > server.window:
        text = (
            f"This model's maximum context length is {server.window} tokens. However, your messages resulted in {size} "
            "tokens. Please reduce the length of the messages."
        )
        return refuse(server, handler, text, "context_length_exceeded")
    if server.script == []:
        # Not a 5xx, which clients retry: a test that asks too often should fail at once.
        return refuse(server, handler, f"the script of this test has no reply left (request {len(server.requests)})")
    send_item(server, handler, body, next_item(server, body))


def next_item(server, body):
    if server.script is None:
        return practice_reply(body["messages"], body.get("tools") or [], server.window)
    item = server.script.pop(0)
    while callable(item):
        item = item(body)
    return {"content": item} if isinstance(item, str) else item


def send_item(server, handler, body, item):
    awake = hold(server, server.stall) and hold(server, item.get("wait"))
    status, headers = item.get("status", 200), item.get("headers", {})
    if not awake or (item.get("drop") and "chunks" not in item):
        handler.close_connection = True
    elif "chunks" in item:
        send_events(server, handler, item["chunks"], item)
    elif "raw" in item or "body" in item:
        send(handler, status, item.get("raw", item.get("body")), headers, item.get("content_type"))
    elif status != 200:
        send(handler, status, error_body(item.get("content") or f"scripted status {status}"), headers)
    elif body.get("stream"):
        options = body.get("stream_options") or {}
        send_events(server, handler, stream_chunks(make_reply(server, body, item), options.get("include_usage")), item)
    else:
        send(handler, 200, make_reply(server, body, item), headers)


def hold(server, wait):
    """Wait for seconds or an Event; False when the server was closed meanwhile."""
    if wait is None or isinstance(wait, int | float):
        return not server.closed.wait(wait or 0)
    while not wait.wait(0.02):
        if server.closed.is_set():
            return False
    return True


def error_body(text, code=None):
    return {"error": {"message": text, "type": "invalid_request_error", "param": None, "code": code}}


def refuse(server, handler, text, code=None):
    server.refusals.append(text)
    send(handler, 400, error_body(text, code))


def send(handler, status, payload, headers=None, content_type=None):
    data = payload.encode("utf-8", "replace") if isinstance(payload, str) else payload
    data = data if isinstance(data, bytes) else json.dumps(data).encode()
    handler.send_response(status)
    fixed = {"Content-Type": content_type or "application/json", "Content-Length": str(len(data))}
    for key, value in {**fixed, **(headers or {})}.items():
        handler.send_header(key, value)
    handler.end_headers()
    handler.wfile.write(data)


def send_events(server, handler, chunks, item):
    def write(text):
        data = text.encode()
        handler.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    handler.send_response(item.get("status", 200))
    fixed = {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"}
    for key, value in {**fixed, **item.get("headers", {})}.items():
        handler.send_header(key, value)
    handler.end_headers()
    for chunk in chunks:
        if not isinstance(chunk, dict):  # an Event in the list: the stream stops here until it is set
            if not hold(server, chunk):
                break
            continue
        write(f"data: {json.dumps(chunk)}\n\n")
    if item.get("drop") or server.closed.is_set():
        handler.close_connection = True  # without the empty last chunk the client sees a broken stream
        return
    if item.get("done", True):
        write("data: [DONE]\n\n")
    handler.wfile.write(b"0\r\n\r\n")


def make_reply(server, body, item):
    """Build the chat.completion dict for a script item, a dict with any of:

    content, reasoning_content: str. tool_calls: list of {"name", "arguments", "id"}; a dict of arguments becomes JSON
    text, all else is sent as it is; no "id" key: one is made up. finish_reason: str. message: merged into the message.
    usage: a dict sent as it is, None for no such key, "null" for JSON null; counted when absent.
    """
    message = {"role": "assistant", "content": item.get("content")}
    if "reasoning_content" in item:
        message["reasoning_content"] = item["reasoning_content"]
    if item.get("tool_calls"):
        message["tool_calls"] = [make_call(server, call) for call in item["tool_calls"]]
    message.update(item.get("message", {}))
    reason = item.get("finish_reason", "tool_calls" if message.get("tool_calls") else "stop")
    reply = {"id": f"chatcmpl-practice-{len(server.requests)}", "object": "chat.completion", "created": 0}
    reply["model"] = body.get("model")
    reply["choices"] = [{"index": 0, "message": message, "finish_reason": reason}]
    usage = item.get("usage", counted_usage(server, body, message))
    if usage is not None:
        reply["usage"] = None if usage == "null" else usage
    return reply


def make_call(server, call):
    arguments = call.get("arguments", {})
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    identifier = call["id"] if "id" in call else f"call_made_{next(server.ids)}"
    return {"id": identifier, "type": "function", "function": {"name": call.get("name"), "arguments": arguments}}


def counted_usage(server, body, message):
    prompt = prompt_size(body.get("messages"), body.get("tools"))
    completion = count_tokens(json.dumps(message, ensure_ascii=False))
    text = "".join(serialise(body.get("messages"), body.get("tools")))
    cached = count_tokens(os.path.commonprefix([server.cached, text]))
    server.cached = text
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {**usage, "prompt_tokens_details": {"cached_tokens": cached}}


def stream_chunks(reply, include_usage):
    """Yield the chat.completion.chunk dicts that carry a whole reply in pieces."""
    choice = reply["choices"][0]
    chunk = {**{key: reply[key] for key in ("id", "created", "model")}, "object": "chat.completion.chunk"}
    for delta in deltas(choice["message"]):
        yield {**chunk, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    yield {**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]}
    if include_usage and "usage" in reply:
        yield {**chunk, "choices": [], "usage": reply["usage"]}


def deltas(message):
    yield {"role": "assistant", "content": ""}
    for key, value in message.items():
        if key == "role" or value is None:
            continue
        if key == "tool_calls":
            for index, call in enumerate(value):
                function = call["function"]
                head = {"name": function["name"], "arguments": ""}
                yield {"tool_calls": [{**call, "index": index, "function": head}]}
                for piece in pieces(function["arguments"]):
                    yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}
        else:
            yield from ({key: piece} for piece in pieces(value))


def pieces(value):
    if not isinstance(value, str):
        return [value]
    size = max(8, len(value) // 20)
    return [value[at : at + size] for at in range(0, len(value), size)]


# --- The rules: what the practice model makes of a conversation --------------------------------------------------

DEFAULT_COMMAND = "echo hello from the practice model"
DEFAULT_NOTE = "A note from the practice model.\nIt was written by fixed rules.\nNothing was thought.\n"
INTENTS = {  # the word that stands first in the request decides; at the same place the row that stands first
    "long": r"long session|长会话",
    "three": r"\bread (?:three|3|some|a few|several) files|读取?(?:三|3|几)个?文件",
    "write": r"\bwrite\b|写",
    "edit": r"\bedit\b|编辑|修改",
    "run": r"\brun\b|\bexecute\b|运行|执行",
    "list": r"\blist\b.*\bfiles?\b|\bwhat files\b|列出|哪些文件",
    "read": r"\b(?:read|show|open|cat|what|look)\b|读|看|打开|内容|什么",
}
OTHER_WORDS = {"compact": "|压缩", "update_plan": r"|\bplan\b|计划"}
KNOWN_TOOLS = {"list_files", "read_file", "write_file", "edit_file", "run_shell"}
QUOTED = re.compile(r"`([^`]+)`|\"([^\"]+)\"|“([^”]+)”|「([^」]+)」|(?<!\w)'([^']+)'")
FILE = re.compile(
    r"(?<![\w/.:\\])(?!https?:|e\.g|i\.e)(?:[A-Za-z]:)?[/\\]?(?:[\w.~-]+[/\\])*"
    r"(?:[\w.-]*[\w-]\.[A-Za-z][A-Za-z0-9]{0,9}|README|LICENSE|Makefile|Dockerfile)(?!\w*://)|(?<!\S)[.~]*/[\w./-]*\w"
)
# Chinese puts no spaces round a name.
GLUE = re.compile(r"[，、。；：！？和与里]|读一下|读取?|查?看看?|打开|写入?|帮我|请")
KINDS = "md|txt|py|toml|json|rst|cfg|ini|ya?ml|js|ts|css|html|sh|c|h|rs|go|java|csv"
TEXT_FILE = re.compile(rf"(\.({KINDS})|README|LICENSE|Makefile)$", re.IGNORECASE)
SKIPPED = re.compile(r"\block\b|\.lock|\.min\.|(^|/)(\.\w|__pycache__|node_modules)", re.IGNORECASE)
FAILED = re.compile(r"(?i)\W*(?:tool |the |user )*(?:error|denied|refused|blocked|no such|cannot|错误|失败|.{0,6}拒绝)")
DENIED = re.compile(r"(?<!permission )denied|refused by|拒绝", re.IGNORECASE)
SUMMARY = re.compile(r"\bsummary\b|摘要|概要", re.IGNORECASE)


def suggest(tool_names):
    """Return the lines (list of str) that a newcomer can type when these tools (iterable of str) are offered."""
    names = set(tool_names)
    rows = [
        ({"list_files"}, "list the files"),
        ({"read_file"}, "read three files" if "list_files" in names else "read README.md"),
        ({"run_shell"}, "run a command"),
        ({"write_file"}, "write a note"),
        ({"read_file", "list_files"}, "a long session"),
    ]
    return [line for needed, line in rows if needed <= names]


def practice_reply(messages, tools, window=WINDOW):
    """Return the reply to a conversation (list of message dicts, list of tool dicts) as a script item (dict).

    The same conversation always gets the same reply. Every rule ends after a bounded number of steps, since it looks at
    the newest tool calls to see how far it is.
    """
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    if not schemas and is_summary_request(messages):
        return {"content": summarise(messages)}
    request, steps, folded = current_turn(messages, schemas)
    turn = {"request": request, "steps": steps, "schemas": schemas, "messages": messages, "window": window}
    turn |= {"size": prompt_size(messages, tools), "chinese": bool(CJK.search(request)), "folded": folded}
    intent = find_intent(request, schemas)
    rule = RULES.get(intent, use_named_tool if intent else introduce)
    if intent and folded and not steps and sum(message["role"] == "user" for message in messages) == 1:
        rule = say_done  # the steps went into the summary; starting over could go round in circles
    reply = rule(turn)
    return {"content": reply} if isinstance(reply, str) else {"tool_calls": with_ids(reply, turn)}


def current_turn(messages, schemas):
    """Return the latest request (str), the steps since (lists of call dicts), and whether a summary comes first."""
    users = [number for number, message in enumerate(messages) if message["role"] == "user"]
    opening, latest = messages[users[0]]["content"].strip(), messages[users[-1]]["content"]
    folded = "\n" in opening and bool(SUMMARY.search(opening.split("\n")[0]))
    lines = [line for line in latest.splitlines() if line.strip()] or [latest]
    if folded and len(users) == 1:  # the running request stands at the end of the summary message
        lines = [line for line in reversed(lines) if not SUMMARY.search(line)] or lines
    request = next((line for line in lines if find_intent(line, schemas)), lines[0])
    steps = []
    for message in messages[users[-1] + 1 :]:
        if message.get("tool_calls"):
            steps.append([read_call(call) for call in message["tool_calls"]])
        for call in steps[-1] if message["role"] == "tool" else []:
            if call["id"] == message["tool_call_id"]:
                call["result"] = message["content"]
    return request, steps, folded


def read_call(call):
    function = call["function"]
    return {"id": call["id"], "name": function["name"], "arguments": json.loads(function["arguments"]), "result": ""}


def find_intent(request, schemas):
    patterns = dict(INTENTS)
    for name in set(schemas) - KNOWN_TOOLS:
        patterns[name] = rf"\b(?:{re.escape(name)})\b" + OTHER_WORDS.get(name, "")
    found = []
    for rank, (intent, pattern) in enumerate(patterns.items()):
        match = re.search(pattern, request, re.IGNORECASE | re.ASCII)  # ASCII: a Chinese character is a word boundary
        if match and (intent != "read" or file_names(request)):
            found.append((match.start(), rank, intent))
    return min(found)[2] if found else None


def quoted_parts(request):
    return [next(filter(None, match.groups())) for match in QUOTED.finditer(request)]


def file_names(request):
    bare = FILE.findall(GLUE.sub(" ", QUOTED.sub(" ", request)))
    return list(dict.fromkeys(quoted_parts(request) + bare))


def say(turn, english, chinese):
    return chinese if turn["chinese"] else english


def call(turn, name, text=".", **hints):
    """Fill a tool's arguments from its schema: hints go where the names begin alike, text where one is required."""
    schema, arguments = turn["schemas"][name], {}
    for key, spec in schema.get("properties", {}).items():
        hint = next((value for start, value in hints.items() if key.startswith(start)), None)
        if hint is not None:
            arguments[key] = hint
        elif key in schema.get("required", []):
            arguments[key] = sample(spec, text)
    return {"name": name, "arguments": arguments}


def sample(spec, text):
    kind = spec.get("type")
    if kind == "array":
        return [sample(spec.get("items", {}), text)]
    if kind == "object":
        return {key: sample(value, text) for key, value in spec.get("properties", {}).items()}
    return {"integer": 1, "number": 1, "boolean": False}.get(kind, spec.get("enum", [text])[0])


def step_number(steps):
    """Return how many steps the turn has had. The ids say it, since compaction may have removed the first steps."""
    match = re.match(r"call_(\d+)_", steps[-1][0]["id"]) if steps else None
    return int(match[1]) if match else len(steps)


def with_ids(calls, turn):
    text = json.dumps(turn["messages"])
    # From the whole conversation: a count would repeat after compaction. The size in front is for long_rule.
    mark = min(turn["size"], 0xFFFF) << 16 | zlib.crc32(text.encode()) & 0xFFFF
    while f"_{mark:08x}_" in text:
        mark = (mark + 1) % 2**32
    step = turn.get("step", step_number(turn["steps"]) + 1)
    return [{**call, "id": f"call_{step}_{mark:08x}_{number}"} for number, call in enumerate(calls, 1)]


def say_done(turn):
    return say(turn, "Done; the steps are in the summary.", "已完成，步骤已收入摘要。")


def introduce(turn):
    lines = "\n".join(f"  {line}" for line in suggest(turn["schemas"])) or "  (nothing)"
    english = (
        f"I am the practice model: fixed rules that run offline; I do not think. What I can do here:\n{lines}\n"
        "For a real model set OPENAI_API_KEY, or OPENAI_BASE_URL to a local server, and start again."
    )
    chinese = (
        f"我是练习模型：离线运行的固定规则，不会思考。这里我能做（也可用中文，如“列出文件”）：\n{lines}\n"
        "要用真正的模型，请设置 OPENAI_API_KEY，或把 OPENAI_BASE_URL 指向本地服务器，然后重新启动。"
    )
    return say(turn, english, chinese)


def clip(text, limit=600):
    return text if len(text) <= limit else text[:limit].rstrip() + " …"


def outcome(turn):
    done = turn["steps"][-1][0]
    name, result = done["name"], clip(done["result"].strip())
    if DENIED.search(result[:300]):
        english = f"{name} was denied, so I stop here. The answer was:\n{result}"
        return say(turn, english, f"{name} 被拒绝，我就此停下。原因：\n{result}")
    if FAILED.match(result):
        return say(turn, f"{name} did not succeed. It answered:\n{result}", f"{name} 没有成功，返回：\n{result}")
    return say(turn, f"Done. {name} answered:\n{result}", f"完成。{name} 返回：\n{result}")


def plural(count):
    return f"{count} line{'s' * (count != 1)}"


def once(turn, name, **hints):
    if turn["steps"]:
        return outcome(turn)
    return [call(turn, name, **hints)] if name in turn["schemas"] else introduce(turn)


def run_rule(turn):
    pattern = r"(?:run|execute|运行|执行)\s*[:：]\s*(.+)"
    told = quoted_parts(turn["request"]) or re.findall(pattern, turn["request"], re.IGNORECASE)
    return once(turn, "run_shell", command=told[0] if told else DEFAULT_COMMAND)


def write_rule(turn):
    request, marks = turn["request"], "`'\"“”「」"
    pattern = r"(?:\bwrite\b|写入?)\s*[:：]?\s*(.+?)\s*(?:\binto\b|\bto\b|到|进)\s*(\S+)\s*$"
    match = re.search(pattern, request, re.IGNORECASE)
    text, path = (part.strip(marks) for part in match.groups()) if match else ("", "")
    is_note = not text or re.search(r"^(?:an?|the|一个|一条|个|条)?\s*(?:note|笔记|便条)$", text, re.IGNORECASE)
    path = path or next(iter(file_names(request)), "practice-note.txt")
    return once(turn, "write_file", path=path, content=DEFAULT_NOTE if is_note else text + "\n")


def edit_rule(turn):
    pattern = r"(?:\bedit\b|编辑|修改)\s*(.+?)\s*[:：]\s*(.+?)\s*(?:->|=>|→)\s*(.+)$"
    match = re.search(pattern, turn["request"], re.IGNORECASE)
    if not match and not turn["steps"]:
        return say(turn, "Type it like this: edit FILE: OLD -> NEW", "请这样写：编辑 文件: 旧文字 -> 新文字")
    path, old, new = (part.strip("`'\"") for part in match.groups()) if match else ("", "", "")
    return once(turn, "edit_file", path=path, old=old, new=new)


def use_named_tool(turn):
    name = find_intent(turn["request"], turn["schemas"])
    after = re.split(name, turn["request"], maxsplit=1, flags=re.IGNORECASE)[-1].strip(" :：`")
    told = [*quoted_parts(turn["request"]), after]
    return once(turn, name, text=next((text for text in told if text and text != name), "."))


def look_around(turn):
    """Return the calls that list the folder, through the shell where there is no better tool; [] where neither is."""
    if "list_files" in turn["schemas"]:
        return [call(turn, "list_files")]
    command = "dir /b" if os.name == "nt" else "ls"
    return [call(turn, "run_shell", command=command)] if "run_shell" in turn["schemas"] else []


def listed(text):
    """Return the names of text files in a listing, whatever else its lines say."""
    names = []
    for line in text.splitlines():
        parts = [line.strip(" \t-*│├└─"), *re.split(r"\t|\s{2,}", line.strip()), *FILE.findall(line)]
        names += [part for part in parts if TEXT_FILE.search(part) and not SKIPPED.search(part)][:1]
    return list(dict.fromkeys(name for name in names if not name.startswith("[")))


def list_rule(turn):
    if not turn["steps"]:
        return look_around(turn) or introduce(turn)
    lines = [line for line in turn["steps"][-1][0]["result"].splitlines() if line.strip()]
    if not lines or FAILED.match(lines[0]) or DENIED.search(lines[0]):
        return outcome(turn)
    if lines[0].startswith("no files"):
        return say(turn, "There are no files here yet. Try next: write a note", "这里还没有文件。试试：写一个笔记")
    shown = "\n".join(f"  {clip(line, 120)}" for line in lines[:12])
    english = f"The listing I was given has {plural(len(lines))}. It begins:\n{shown}\nTry next: read three files"
    return say(turn, english, f"我看到的列表有 {len(lines)} 行，开头是：\n{shown}\n接下来可以试试：读三个文件")


def read_rule(turn):
    if turn["steps"]:
        return "\n".join(describe(turn, done) for done in turn["steps"][-1])
    if "read_file" not in turn["schemas"]:
        return introduce(turn)
    return [call(turn, "read_file", path=name) for name in file_names(turn["request"])[:20]]


def three_rule(turn):
    if not turn["steps"]:
        return look_around(turn) if "read_file" in turn["schemas"] and look_around(turn) else introduce(turn)
    if turn["steps"][-1][0]["name"] == "read_file":
        return read_rule(turn)
    names = listed(turn["steps"][-1][0]["result"])[:3]
    calls = [call(turn, "read_file", path=name) for name in names] if "read_file" in turn["schemas"] else []
    return calls or say(turn, "I found no text files to read here.", "这里没有找到可读的文本文件。")


def describe(turn, done):
    name = done["arguments"].get("path", done["name"])
    lines = [line for line in done["result"].splitlines() if line.strip()]
    first = next((line for line in lines if not line.startswith("[")), lines[0] if lines else "")
    first = clip(re.sub(r"^\s*\d+\s*[\t|:→]\s?", "", first).strip(), 100)  # some tools number the lines
    if not lines or FAILED.match(done["result"]) or DENIED.search(lines[0]):
        return say(turn, f"- {name}: could not be read: {first}", f"- {name}：读取失败：{first}")
    count = len(done["result"].splitlines()) - lines[-1].startswith("[")  # such a last line is the tool's own note
    return say(turn, f"- {name}: {plural(count)} shown; begins: {first}", f"- {name}：显示 {count} 行；开头：{first}")


# A long session: the prompt has to jump over the agent's limits for clearing (16,000) and compaction (24,000) and still
# fit the window of 32,000. These numbers are shares of the window.
REACHED, HIGHEST, LOW, SMALL = 0.766, 0.9, 0.45, 0.01  # LOW: clearing below it shows low limits; SMALL: a read
FEW = {2: 4, 3: 4, 4: 6, 5: 6, 13: 4, 14: 4}  # reads in each step; steps 6 to 12 read as much as the window takes
LAST_GROWING, TAIL, MOST_READS, SMALL_READS, LIMIT = 12, 13, 64, 12, 200  # LIMIT: lines in a read
CALL_COST = 65  # tokens of a call and of the frame of its result
CLEARED = re.compile(r"(?s)\D{0,80}(?:cleared|清除).{0,600}\Z")  # short, and no numbered lines of a file
GOES_ON = re.compile(r"^\[.*offset \d+\]\Z", re.MULTILINE)  # then the file has more lines: later starts are safe


def long_rule(turn):
    last = step_number(turn["steps"])
    if "read_file" not in turn["schemas"]:
        return introduce(turn)
    if last == 0:
        return look_around(turn) or introduce(turn)
    reads = [done for step in turn["steps"] for done in step if done["name"] == "read_file"]
    seen = list(dict.fromkeys(done["arguments"].get("path") for done in reads))
    listings = [done for done in turn["steps"][0] if done["name"] != "read_file"]
    names = list(dict.fromkeys([*seen, *(name for done in listings for name in listed(done["result"]))]))
    if all(FAILED.match(done["result"]) for done in reads or listings):
        return outcome(turn)
    if not names:
        return say(turn, "There is no text file to read here; try: write a note", "没有可读的文件；试试：写一个笔记")
    before = re.match(r"call_\d+_([0-9a-f]{4})", turn["steps"][-1][0]["id"])  # the size when this step was planned
    low_limits = before and int(before[1], 16) < LOW * turn["window"]
    low_limits = low_limits and any(CLEARED.match(done["result"]) for done in turn["steps"][-1])
    reached = turn["folded"] or low_limits or turn["size"] >= REACHED * turn["window"]
    step = TAIL if 5 <= last < TAIL and reached else last + 1
    small = bool(reads) and max(map(read_cost, reads)) < SMALL * turn["window"]
    stuck = LAST_GROWING <= last < TAIL and not reached
    stuck |= small and len(reads) >= SMALL_READS and (last >= 5 or len(seen) == len(names))
    calls = [] if stuck or step > max(FEW) else plan_reads(turn, step, names, reads)
    calls = calls[: SMALL_READS - len(reads)] if small and step == 4 else calls
    turn["step"] = step
    return calls or long_answer(turn, reads, reached or last >= TAIL)


def plan_reads(turn, step, names, reads):
    """Return read_file calls that fit. The big steps repeat the largest reads in view, whose cost is known."""
    sized = sorted(reads, key=lambda done: -read_cost(done))[:3]
    sized = [done for done in sized if 2 * read_cost(done) >= read_cost(sized[0])]
    room = HIGHEST * turn["window"] - turn["size"]
    if step in FEW:
        dearest = max([1100, *map(read_cost, sized)])  # 1,100: a result of 4,000 characters with its frame
        numbers = range(len(reads), len(reads) + min(FEW[step], int(room // dearest)))
        spots = [divmod(number, len(names)) for number in numbers]
        long = {done["arguments"].get("path") for done in reads if GOES_ON.search(done["result"])}
        return [read_part(turn, names[at], 1 + 10 * again % LIMIT * (names[at] in long)) for again, at in spots]
    calls, room = [], room - 0.065 * turn["window"]  # the middle between REACHED and HIGHEST
    while len(calls) < MOST_READS and sized and room > (cost := read_cost(sized[len(calls) % len(sized)])):
        done = sized[len(calls) % len(sized)]
        further = 1 + len(calls) // len(sized) if GOES_ON.search(done["result"]) else 0
        calls.append(read_part(turn, done["arguments"].get("path"), done["arguments"].get("offset", 1) + further))
        room -= cost
    return calls


def read_cost(done):
    return count_tokens(json.dumps(done["result"], ensure_ascii=False)) + CALL_COST


def read_part(turn, path, start):
    return call(turn, "read_file", path=path, offset=start, limit=LIMIT)


def long_answer(turn, reads, reached):
    """Say only what the messages show."""
    cleared = any(message["role"] == "tool" and CLEARED.match(message["content"]) for message in turn["messages"])
    gone = say(turn, "Old results were cleared. ", "旧结果已被清除。") if cleared else ""
    if not reached and not cleared:
        english = f"I stop here: the prompt reached about {turn['size']:,} tokens; the files read here are too small "
        english += f"to fill the window. {gone}"
        chinese = f"就此停下：提示词约 {turn['size']:,} tokens；读到的文件太小，填不满窗口。{gone}"
        if all(len(done["result"]) < 200 for done in reads):
            english += "The folder needs a few larger files; then small limits show the effect: "
            chinese += "文件夹里需要几个大一些的文件，然后用小限额就能看到效果："
        else:
            english += "Small limits show clearing and, after a few requests, a summary: "
            chinese += "用小限额能看到清除，几轮请求后还有摘要："
        return say(turn, english, chinese) + "NAMI_SOFT_LIMIT=3000 NAMI_HARD_LIMIT=6000"
    gone = gone or say(turn, "No old result is cleared: that comes above the soft limit. ", "超过软限额才会清除结果。")
    english, chinese = f"Done. {gone}A summary stands for the oldest requests.", f"完成。{gone}最早的请求已成为摘要。"
    if not turn["folded"]:
        english = f"Done. {gone}There is no summary yet: it comes above the hard limit, and compaction keeps the last "
        english += "two requests, so ask once more (a long session)."
        chinese = f"完成。{gone}还没有摘要：超过硬限额才有，而且压缩会保留最近两轮请求，请再说一次“长会话”。"
    return say(turn, english, chinese)


RULES = {"long": long_rule, "three": three_rule, "write": write_rule, "edit": edit_rule}
RULES |= {"run": run_rule, "list": list_rule, "read": read_rule}

# --- The summary by extraction -----------------------------------------------------------------------------------

ROLE_LINE = re.compile(
    r"^\W*?(?:[\[<【(](user|assistant|tool|system|用户|助手|工具|系统)[^\]>】)\n]*[\]>】)][:：]?"
    r"|(user|assistant|tool|system|用户|助手|工具|系统)\s*[:：])\s*(.*)$",
    re.IGNORECASE,
)
TITLES = [("Asked", "请求"), ("Files", "文件"), ("Commands", "命令"), ("Errors", "错误")]
SHARES = [0.4, 0.25, 0.2, 0.1]  # of the room, in the order of TITLES


def is_summary_request(messages):
    last_user = [message["content"] for message in messages if message["role"] == "user"][-1:]
    system = [message["content"] for message in messages if message["role"] == "system"]
    return bool(re.search(r"summar|摘要|总结|概括", " ".join(system + last_user), re.IGNORECASE))


def summarise(messages):
    """Extract requests, files, commands and errors from a rendered history (str); at most 1,500 characters."""
    text = messages[-1]["content"]
    lines = text.splitlines()
    tagged = [number for number, line in enumerate(lines) if ROLE_LINE.match(line)]
    history = lines[tagged[0] :] if tagged else lines  # what stands before is the instruction
    facts = [find_requests(history)]
    body = "\n".join(history).replace('\\"', '"')
    facts.append(re.findall(r"path['\"]?\s*[:=]\s*['\"]([^'\"\n]+)", body))
    commands = re.findall(r"command['\"]?\s*[:=]\s*(?:\"([^\n]+?)\"[,})]|'([^\n]+?)'[,})])", body)
    facts.append(["".join(pair) for pair in commands])
    errors = re.compile(r"\berror\b|denied|错误|Traceback", re.IGNORECASE)
    facts.append([line.strip()[:160] for line in history if errors.search(line)][-3:])
    chinese = sum(bool(CJK.search(line)) for line in facts[0]) * 2 > len(facts[0])
    room, output = min(1500, max(400, len(text) // 3)), []
    for titles, share, found in zip(TITLES, SHARES, facts, strict=True):
        before = re.findall(rf"^\W*(?:{'|'.join(titles)})[:：] (.+)$", text, re.MULTILINE)  # from an earlier summary
        items = newest_that_fit([part for line in before for part in line.split(" | ")] + found, int(room * share))
        if items:
            output.append(f"- {titles[chinese]}: {' | '.join(items)}")
    return ("\n".join(output) or "- Nothing to keep.")[: min(1500, len(text))]


def find_requests(history):
    requests = []
    for number, line in enumerate(history):
        match = ROLE_LINE.match(line)
        if match and (match[1] or match[2]).lower() in ("user", "用户"):
            said = match[3] or next((after for after in history[number + 1 :] if after.strip()), "")
            if not re.match(r"\W*.{0,60}(?:\bsummary\b|摘要)", said, re.IGNORECASE):  # a summary is not a request
                requests.append(said.strip()[:160])
    return requests


def newest_that_fit(items, room):
    kept = []
    for item in reversed(list(dict.fromkeys(items))):
        room -= len(item) + 3
        if room < 0:
            break
        kept.insert(0, item)
    return kept


def main():
    """Serve by hand until Ctrl-C; the process ends with code 2 when the port is taken."""
    import argparse

    parser = argparse.ArgumentParser(description="Serve the practice model on 127.0.0.1.")
    parser.add_argument("--port", type=int, default=8099, help="0 picks a free port (default: 8099)")
    parser.add_argument("--window", type=int, default=WINDOW, help=f"tokens (default: {WINDOW})")
    options = parser.parse_args()
    try:
        server = start(window=options.window, port=options.port)
    except (OSError, OverflowError) as error:
        print(f"Port {options.port} cannot be used ({error}); try --port 0.", file=sys.stderr)
        sys.exit(2)
    print(f"OPENAI_BASE_URL={server.url}  (Ctrl-C stops)", flush=True)
    try:
        while not server.closed.wait(0.5):  # a wait without end would not hear Ctrl-C on Windows
            pass
    except KeyboardInterrupt:
        server.close()


if __name__ == "__main__":
    main()
