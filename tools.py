"""The tools. Each is one plain function: its signature and its docstring are all that the model is told about it."""

import fnmatch
import inspect
import json
import os
import re
import secrets
import signal
import subprocess
import tempfile
from pathlib import Path

MAX_RESULT_CHARS = 8000
MAX_OUTPUT_BYTES = 1_000_000
HIDDEN_FOLDERS = {".git", ".venv", ".nami-agent", ".pytest_cache", "node_modules", "__pycache__"}
JSON_TYPES = {str: {"type": "string"}, int: {"type": "integer"}, bool: {"type": "boolean"}}
JSON_TYPES[list] = {
    "type": "array",
    "items": {"type": "string"},
}  # some providers refuse an array of they know not what


def read_file(path: str, offset: int = 1, limit: int = 500) -> str:
    """Read a text file, with line numbers.

    path: the file, relative to the workspace
    offset: the first line to read, counted from 1
    limit: how many lines to read
    """
    text = existing_file(path).read_text(encoding="utf-8", errors="replace")
    if not text:
        return f"{path} is empty"
    lines = text.removesuffix("\n").split("\n")  # splitlines() would also split where no editor does
    if offset < 1 or offset > len(lines) or limit < 1:
        raise ValueError(f"{path} has lines 1 to {len(lines)}; offset {offset} with limit {limit} shows none of them")
    shown = lines[offset - 1 : offset - 1 + limit]
    text = "\n".join(f"{number}\t{line}" for number, line in enumerate(shown, offset))
    last = offset + len(shown) - 1
    return text if last == len(lines) else f"{text}\n[{len(lines)} lines in all; go on with offset {last + 1}]"


def write_file(path: str, content: str) -> str:
    """Write a text file: a new one, or the whole of an old one.

    path: the file, relative to the workspace; missing folders are made
    content: the complete new text
    """
    data = content.encode()  # before the file is opened: what cannot be encoded must not empty it
    target = Path(path).expanduser()
    if target.exists() and not target.is_file():
        raise ValueError(f"{path} is a folder or a device, not a file")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
    return f"wrote {len(data)} bytes to {path}"


def edit_file(path: str, old: str, new: str, replace_all: bool = False) -> str:
    """Replace one piece of text in a file.

    path: the file, relative to the workspace
    old: the exact text to replace, without line numbers; it must occur once, so give enough lines around it
    new: the text to put in its place
    replace_all: replace every occurrence
    """
    target = existing_file(path)
    text = target.read_bytes().decode()  # strict, and bytes: a file that is not UTF-8, or has CRLF, must stay as it is
    if not old:
        raise ValueError("old is empty; give the text to replace, or use write_file")
    count = text.count(old)
    if count == 0:
        raise ValueError(f"old does not occur in {path}; read the file again and copy the text exactly")
    if count > 1 and not replace_all:
        raise ValueError(f"old occurs {count} times in {path}; give more of the lines around it, or set replace_all")
    target.write_bytes(text.replace(old, new).encode())
    return f"replaced {count} {'place' if count == 1 else 'places'} in {path}"


def list_files(pattern: str = "*") -> str:
    """List the files of the workspace, one path a line.

    pattern: which ones, such as *.py or src/*; a folder stands for all that is in it
    """
    pattern = Path(os.path.relpath(os.path.expanduser(pattern or "."))).as_posix()
    folder = "" if pattern == "." else f"{pattern}/"
    # fnmatch lets * cross slashes; "**/" means any folders, or none.
    globs = [pattern.replace("**/", "*/"), pattern.replace("**/", "")]
    found = []
    for root, subfolders, files in os.walk("."):
        subfolders[:] = sorted(set(subfolders) - HIDDEN_FOLDERS)
        for path in (Path(root, name).as_posix() for name in sorted(files)):
            if path == pattern or path.startswith(folder) or any(fnmatch.fnmatchcase(path, glob) for glob in globs):
                found.append(path)
    return "\n".join(found) or f"no files match {pattern}"


def run_shell(command: str, timeout: int = 120) -> str:
    """Run a shell command in the workspace; return its exit status, then what it printed.

    command: the command line; it gets no input, so it must not ask anything
    timeout: seconds after which it is killed
    """
    if timeout < 1:
        raise ValueError(f"timeout is {timeout}; give a number of seconds above 0")
    # Into a file, not a pipe: a program left running in the background would keep a pipe open, and us waiting.
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a process group of its own, so that its children can be killed with it
        )
        try:
            status = describe_exit(process.wait(timeout))
        except subprocess.TimeoutExpired:
            status = f"killed: it still ran after {timeout} seconds"
        finally:
            if process.returncode is None:  # also after Ctrl-C
                kill_group(process)
        size = os.fstat(output.fileno()).st_size
        output.seek(0)
        text = output.read(MAX_OUTPUT_BYTES).decode(errors="replace")
    if size > MAX_OUTPUT_BYTES:  # `yes` writes gigabytes
        status += f", the first {MAX_OUTPUT_BYTES} of {size} bytes of output:"
    return f"{status}\n{text or '(no output)'}"


def existing_file(path):
    """Return `path` as a Path to a regular file: a folder cannot be read, and a named pipe would wait for ever."""
    target = Path(path).expanduser()
    if not target.is_file():
        raise ValueError(f"there is no file {path}; list_files shows which there are")
    return target


def kill_group(process):
    """Kill a command and all that it has started."""
    if os.name == "posix":
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()


def describe_exit(code):
    names = {number.value: f" ({number.name})" for number in signal.Signals}
    return f"exit status {code}" if code >= 0 else f"killed by signal {-code}{names.get(-code, '')}"


def describe_tool(function):
    """Make a tool's one entry out of its function: name, description, schema of the parameters, function."""
    description, _, fields = inspect.getdoc(function).partition("\n\n")
    notes = dict(line.split(": ", 1) for line in fields.splitlines())
    parameters = inspect.signature(function).parameters.values()
    schema = {
        "type": "object",
        "properties": {p.name: {**JSON_TYPES[p.annotation], "description": notes[p.name]} for p in parameters},
        "required": [p.name for p in parameters if p.default is p.empty],
    }
    return {"name": function.__name__, "description": description, "schema": schema, "function": function}


TOOLS = {f.__name__: describe_tool(f) for f in (read_file, write_file, edit_file, list_files, run_shell)}


def get_schemas():
    """Return the tools as the API wants them: a list of {"type": "function", "function": {...}}."""
    named = [(tool["name"], tool["description"], tool["schema"]) for tool in TOOLS.values()]
    return [{"type": "function", "function": {"name": n, "description": d, "parameters": p}} for n, d, p in named]


def decode_arguments(arguments):
    """Return what the model sent as a dict; ValueError when it is none.

    arguments: normally the JSON text of an object; models also send nothing, broken JSON, or an object already decoded
    """
    if arguments is None or isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments and arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the arguments are not valid JSON ({error}): {arguments[:200]!r}") from None
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments must be a JSON object, not {str(arguments)[:100]}")
    return arguments


def sendable_call(call):
    """Return a tool call as every provider takes it back in the history: an id, a plain name, the JSON of an object."""
    call.id = call.id or f"call_{secrets.token_hex(4)}"  # some local servers give none
    name, arguments = call.function.name or "", call.function.arguments
    try:
        fields = decode_arguments(arguments)
    except ValueError:
        arguments = "{}"
    else:
        arguments = arguments if isinstance(arguments, str) and arguments.strip() else json.dumps(fields)
    name = name if re.fullmatch(r"[\w-]{1,64}", name, re.ASCII) else "no_such_tool"
    return {"id": call.id, "type": "function", "function": {"name": name, "arguments": arguments}}


def parse_arguments(name, arguments):
    """Return the keyword arguments for tool `name` as a dict; ValueError tells the model what is wrong with them."""
    if name not in TOOLS:
        raise ValueError(f"there is no tool {name!r}; the tools are {', '.join(TOOLS)}")
    known, required = TOOLS[name]["schema"]["properties"], TOOLS[name]["schema"]["required"]
    usage = f"{name} takes {', '.join(known)}"
    try:
        fields = decode_arguments(arguments)
    except ValueError as error:
        raise ValueError(f"{error}; {usage}") from None
    fields = {field: value for field, value in fields.items() if value is not None}  # null: models mean "not given"
    if extra := [field for field in fields if field not in known]:
        raise ValueError(f"there is no field {', '.join(extra)}; {usage}")
    if missing := [field for field in required if field not in fields]:
        raise ValueError(f"{', '.join(missing)} is missing; {usage}")
    return {field: convert(field, value, known[field]["type"]) for field, value in fields.items()}


def convert(field, value, kind):
    """Return `value` as the type the schema asks for. Models write 30 as "30": taken where the meaning is exact."""
    text = str(value)
    if kind == "string" and isinstance(value, str):
        return value
    if kind == "array" and isinstance(value, list):
        return [item if isinstance(item, str) else json.dumps(item, ensure_ascii=False) for item in value]
    if kind == "integer" and re.fullmatch(r"-?\d+(\.0)?", text):
        return int(text.removesuffix(".0"))
    if kind == "boolean" and text.lower() in ("true", "false"):
        return text.lower() == "true"
    raise ValueError(f"{field} must be of type {kind}, not {text[:100]!r}")


def execute(name, arguments, limit=MAX_RESULT_CHARS):
    """Run tool `name` and return its result as text. Never raises: a failure is text that the model can act on."""
    try:
        fields = parse_arguments(name, arguments)
        result = TOOLS[name]["function"](**fields)
    except Exception as error:
        result = f"Error: {type(error).__name__}: {error}"
    return cut(result.encode(errors="replace").decode(), limit)  # a file name may hold bytes that no JSON can carry


def cut(text, limit):
    """Keep the first `limit` characters, and say what is missing: else the model takes the part for the whole."""
    left = len(text) - limit if limit else 0
    return text if left <= 0 else f"{text[:limit]}\n[… {left} characters omitted 后面省略 {left} 字符 …]"
