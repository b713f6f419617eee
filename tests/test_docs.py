"""The two READMEs against the code of the top level: what can be typed or set is there, in both languages."""

import ast
import re

import pytest
from conftest import ROOT

READMES = ["README.md", "README.zh.md"]
MODULES = ["agent.py", "context.py", "tools.py", "permissions.py"]
TREES = [ast.parse((ROOT / name).read_text(encoding="utf-8")) for name in MODULES]
NODES = [node for tree in TREES for node in ast.walk(tree)]
TEXTS = {node.value for node in NODES if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def called(name):
    """Yield the calls of a function or method `name` in the modules."""
    for node in NODES:
        if isinstance(node, ast.Call) and name in (getattr(node.func, "attr", ""), getattr(node.func, "id", "")):
            yield node


def assigned(name):
    """Return the values that are assigned to the global `name` in the modules."""
    assignments = [node for tree in TREES for node in tree.body if isinstance(node, ast.Assign)]
    return [node.value for node in assignments if getattr(node.targets[0], "id", "") == name]


def variables():
    return {text for text in TEXTS if re.fullmatch(r"(NAMI|OPENAI)_[A-Z_]+|[A-Z]+_API_KEY", text)}


def flags():
    return {argument.value for node in called("add_argument") for argument in node.args} | {"--help"}


def slash_commands():
    return {key.value for table in assigned("COMMANDS") for key in table.keys}


def tools():
    listed = {node.id for table in assigned("TOOLS") for node in ast.walk(table) if isinstance(node, ast.Name)}
    functions = {node.name for tree in TREES for node in tree.body if isinstance(node, ast.FunctionDef)}
    added = {argument for node in called("describe_tool") for argument in map(ast.unparse, node.args)}
    return (listed & functions | {name.rpartition(".")[2] for name in added} & functions) - {"describe_tool"}


def readme(name):
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text):
    return re.findall(r"^```.*?^```", text, re.DOTALL | re.MULTILINE)


def test_what_the_code_has_is_found():  # else the tests below would demand nothing
    assert {"OPENAI_API_KEY", "OPENAI_BASE_URL", "DEEPSEEK_API_KEY", "NAMI_STATE_DIR", "NAMI_TIMEOUT"} <= variables()
    assert {"-p", "--session", "--base-url", "--help"} <= flags()
    assert {"/help", "/fork", "/exit"} <= slash_commands()
    assert {"read_file", "write_file", "edit_file", "list_files", "run_shell", "load_skill"} <= tools()


@pytest.mark.parametrize("name", READMES)
@pytest.mark.parametrize("kind", [variables, flags, slash_commands, tools])
def test_readme_names_everything_that_can_be_set_typed_or_called(name, kind):
    text = readme(name)
    assert [word for word in sorted(kind()) if not re.search(rf"(?<![\w/-]){word}(?![\w-])", text)] == []


@pytest.mark.parametrize("name", READMES)
def test_readme_names_no_variable_that_the_code_does_not_know(name):
    assert set(re.findall(r"\bNAMI_[A-Z_]+\b", readme(name))) - variables() == set()


@pytest.mark.parametrize("name", READMES)
def test_first_command_stands_in_the_first_thirty_lines(name):
    start = "\n".join(readme(name).splitlines()[:30])
    assert "requirements.txt" in blocks(start)[0] and "agent.py" in blocks(start)[0]


@pytest.mark.parametrize("name", READMES)
def test_sizes_are_the_real_line_counts(name):
    block = readme(name).split("<!-- generated: sizes -->")[1].split("<!-- end -->")[0]
    texts = {module: (ROOT / module).read_text(encoding="utf-8") for module in MODULES}
    counts = {module: sum(bool(line.strip()) for line in text.splitlines()) for module, text in texts.items()}
    assert {module: int(count) for module, count in re.findall(r"`(\w+\.py)` ([\d,]+)", block)} == counts
    assert int(re.search(r"\*\*([\d,]+)\*\*", block)[1].replace(",", "")) == sum(counts.values())


def test_readmes_have_the_same_blocks_and_tables():
    english, chinese = map(readme, READMES)
    assert blocks(english) == blocks(chinese) and len(blocks(english)) >= 3
    rows = [len(re.findall(r"^\|", text, re.MULTILINE)) for text in (english, chinese)]
    assert rows[0] == rows[1]


def test_readme_says_plainly_that_permissions_are_no_sandbox():
    section = readme("README.md").split("## What it does not protect you from")[1].split("\n## ")[0]
    assert re.search(r"permissions.*\bno sandbox\b", section, re.DOTALL) and "沙箱" in readme("README.zh.md")


@pytest.mark.parametrize("name", READMES)
def test_links_to_files_lead_somewhere(name):
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", readme(name))
    assert links and [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
@pytest.mark.parametrize("block", ["sizes", "lessons", "tools"])
def test_readme_is_made_of_what_the_code_says(page, block):
    assert f"<!-- generated: {block} -->" in (ROOT / page).read_text(encoding="utf-8")
