"""May this call run? File tools stay inside the workspace, and what changes something asks the person first.

This guards against honest mistakes. It is no sandbox: an approved command can do whatever the person could do.
"""

import os
import sys
from pathlib import Path

# The agent's own memory. context.STATE_DIR is the same folder; each module can be copied without the other.
STATE_DIR = Path(os.path.expanduser(os.environ.get("NAMI_STATE_DIR") or "~/.nami-agent"))
READS = {
    "read_file",
    "list_files",
    "load_skill",
    "compact",
    "update_plan",
}  # these run unasked inside the workspace; a tool not named here asks
ANSWERS = {"y": "yes", "yes": "yes", "a": "always", "always": "always", "n": "no", "no": "no"}


class PermissionManager:
    """The decisions of one run of the program.

    workspace: the folder that file tools may use, by default the current one
    ask: called with the question (str, several lines), returns what the person typed; EOFError: nobody can answer
    """

    def __init__(self, workspace=".", ask=None):
        self.workspace = Path(workspace).resolve()
        self.ask = ask or ask_in_terminal
        self.granted = set()  # (tool, command or path): an answer "always" covers exactly this, until we exit

    def check(self, name, fields):
        """Return None when the call may run, else the reason for the model. fields: the tool's arguments as a dict."""
        if name == "run_shell":
            target = fields["command"]
        else:
            path = fields.get("path") or fields.get("pattern") or "."
            target = self.resolve(path)
            if target is None:
                return f"Denied: {shown(path)} is outside the workspace {self.workspace}, or the agent's own memory."
        if name in READS or (name, target) in self.granted:
            return None
        return self.question(name, fields, target)

    def resolve(self, path):
        """Return where `path` really leads, links and .. followed; None when that is out of bounds."""
        try:
            target = (self.workspace / Path(path).expanduser()).resolve()
            allowed = target.is_relative_to(self.workspace) and not target.is_relative_to(STATE_DIR.resolve())
            os.stat(target)  # from Python 3.13 on, resolve() does not mind a loop of links
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (OSError, RuntimeError, ValueError):  # such a loop, a name too long, a NUL byte, no such ~user
            return None
        return target if allowed else None

    def question(self, name, fields, target):
        """Ask until the answer is exact; return None for yes, else the reason for the model."""
        scope = "this command" if name == "run_shell" else f"{name} on {shown(target.relative_to(self.workspace))}"
        prompt = f"Allow? [y]es / [a]lways {scope}, until exit / [n]o: "
        question = f"{describe(name, fields, target)}\n{prompt}"
        try:
            while (answer := ANSWERS.get(self.ask(question).strip().lower())) is None:
                question = f"Please type y, a or n.\n{prompt}"
            if answer == "no":
                reason = self.ask("Why not? The model is told (Enter: no reason): ").strip()
                return f"Denied by the user. The reason: {reason or 'none was given; ask before you try another way'}"
        except EOFError:
            return "Denied: nobody could be asked, there is no terminal or the input has ended."
        if answer == "always":
            self.granted.add((name, target))
        return None


def ask_in_terminal(question):
    """Return the person's answer. Only a keyboard counts: piped text could approve what nobody has seen."""
    if not sys.stdin.isatty():
        raise EOFError
    details, _, prompt = question.rpartition("\n")
    if details:
        print(details)
    return input(prompt)


def describe(name, fields, target):
    """Return what the call would do: the whole command, or path and size of a write, or what an edit changes."""
    if name == "run_shell":
        return f"Run this command:\n{visible(fields['command'])}"
    if name == "write_file":
        size = len(fields["content"].encode(errors="replace"))
        old = f"replaces {os.path.getsize(target)} bytes" if os.path.isfile(target) else "a new file"
        return f"Write {shown(target)}: {size} bytes, {old}"
    if name == "edit_file":
        times = " everywhere" if fields.get("replace_all") else ""
        old = [f"- {line}" for line in visible(fields["old"]).split("\n")]
        new = [f"+ {line}" for line in visible(fields["new"]).split("\n")]
        return "\n".join([f"Edit {shown(target)}, replacing{times}:", *old, *new])
    return f"{name} {shown(fields)}"


def shown(value):
    """Return a path, which must stay on one line, as visible text: a line break in a name could fake a question."""
    return visible(str(value)).replace("\n", "\\n")


def visible(text):
    """Return `text` with what would hide or reorder it on a screen (escape codes, zero-width marks) spelled out."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
