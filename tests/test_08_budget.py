"""Lesson 8: the window in numbers. C2…C16: the rules of the context engine. R…: a reported failure."""

import copy
import itertools
import json
import os
import random
import re
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import agent
import context
import practice_server
import pytest
import tools
from conftest import call, pipe, repl, run_turn, status_error
from rich.console import Console

REQUEST = "Read all the files; never touch vendor/; 用中文回答; then finish. UNIQUE-REQUEST"
SYSTEM = {"role": "system", "content": "You are a coding agent." + " the workspace is here " * 4}
NO_RETRY = {"x-should-retry": "false"}
CHANGE = re.compile(
    r"^context ([\d,]+) → ([\d,]+) tokens · (cleared (\d+) results|compacted(?: without a model)?|only the last step)$",
    re.M,
)
ZERO = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
NO_USAGE = {"absent": None, "null": "null", "empty": {}, "zero": ZERO}
WINDOWS = [8_000, 16_000, 32_000, 64_000, 128_000, 200_000, 1_000_000]


def user(text):
    return {"role": "user", "content": text}


def step(number, *results, name="read_file", **arguments):
    """One step of a conversation: the calls of one reply, then their results."""
    fields = arguments or {"path": f"notes-{number}.txt"}
    function = {"name": name, "arguments": json.dumps(fields, ensure_ascii=False)}
    calls = [{"id": f"c{number}-{i}", "type": "function", "function": function} for i in range(len(results))]
    answers = [{"role": "tool", "tool_call_id": f"c{number}-{i}", "content": text} for i, text in enumerate(results)]
    return [{"role": "assistant", "tool_calls": calls}, *answers]


def text_of(characters, chinese=False, name="x"):
    line = (
        "第{}行 给薄荷浇水把豆子绑好记下今天的气温和风向"
        if chinese
        else "line {} of this file: water the mint, tie up the beans"
    )
    return "".join(f"{name} {line.format(number)}\n" for number in range(characters // 20 + 1))[:characters]


def one_line(characters):
    return text_of(characters).replace("\n", " ").strip()


def history(steps=12, characters=4000, chinese=False):
    """A conversation of whole turns; each has read a file of so many characters."""
    messages = [SYSTEM]
    for number in range(steps):
        messages += [user(f"request {number}"), *step(number, text_of(characters, chinese, f"file {number}"))]
        messages.append({"role": "assistant", "content": f"answer {number}"})
    return copy.deepcopy(messages)


def size(body):
    return practice_server.prompt_size(body["messages"], body.get("tools"))


def asks(body):
    """Is this a request of the loop, not for a summary? Only the loop offers tools."""
    return "tools" in body


def number_of(text):
    return int(text.replace(",", ""))


def changes(screen):
    """Return (tokens before, tokens after, what was done) of each line that tells of a change."""
    return [(number_of(found[1]), number_of(found[2]), found[3]) for found in CHANGE.finditer(screen)]


def cleared(body):
    return [m for m in body["messages"] if m["role"] == "tool" and m["content"].startswith(context.PLACEHOLDER)]


def as_item(reply):
    return {"content": reply} if isinstance(reply, str) else reply


class Model:
    """A client whose model calls `reply(body)`: the checks and the window of the practice server, without its HTTP."""

    api_key, base_url = "no-key", "http://127.0.0.1:9/v1"

    def __init__(self, reply, window=32_000, usage=1.0):
        self.reply, self.window, self.usage = reply, window, usage
        self.requests, self.refusals, self.sizes, self.ids = [], [], [], itertools.count(1)
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self.create))

    def create(self, **body):
        from openai.types.chat import ChatCompletion

        practice_server.check_request(body)
        self.requests.append(body)
        tokens = size(body)
        self.sizes += [tokens] * asks(body)
        if tokens > self.window:
            text = f"This model's maximum context length is {self.window} tokens; your messages have {tokens} tokens."
            self.refusals.append(text)
            raise status_error(400, text, code="context_length_exceeded")
        item = self.reply(body)
        counted = {"prompt_tokens": round(tokens * self.usage)} if isinstance(self.usage, float) else self.usage
        item = {"usage": counted, "finish_reason": "stop", **as_item(item)}
        calls = [practice_server.make_call(self, one) for one in item.get("tool_calls", [])]
        message = {"role": "assistant", "content": item.get("content"), "tool_calls": calls or None}
        choice = {"index": 0, "message": message, "finish_reason": item["finish_reason"]}
        usage = None if item["usage"] == "null" else item["usage"]
        return ChatCompletion.construct(id="1", choices=[choice], usage=usage)

    @property
    def main(self):
        return [body for body in self.requests if asks(body)]


def reader(steps, parallel):
    """Return the reply of a model that reads `parallel` files in each of so many steps, then answers."""
    numbers = itertools.count()

    def reply(body):
        if not asks(body):
            return "Summary: files were read; go on."
        if (number := next(numbers)) == steps:
            return "all done"
        names = [f"file-{number * parallel + i:04}.txt" for i in range(parallel)]
        return {"tool_calls": [{"name": "read_file", "arguments": {"path": name}} for name in names]}

    return reply


@pytest.fixture
def load(monkeypatch, workspace):
    """Return a function: ONE request, many steps of parallel reads; returns the turn, with model and session."""

    def run(window=32_000, steps=60, parallel=1, characters=4000, chinese=False, usage=1.0, told=None, system=SYSTEM):
        text = text_of(characters - 11, chinese, "of it:")
        for number in range(steps * parallel):
            (workspace / f"file-{number:04}.txt").write_text(f"{number:04} {text}\nTAIL\n", encoding="utf-8")
        seen = []
        monkeypatch.setattr(context, "save", seen.append)  # the disk has its own tests, and so has the screen
        monkeypatch.setattr(agent, "show", lambda console, text: None)
        monkeypatch.setattr(Console, "status", lambda self, text: nullcontext())
        monkeypatch.setattr(agent, "MAX_STEPS", steps + 5)
        monkeypatch.setenv("NAMI_WINDOW", str(told or window))
        model = Model(reader(steps, parallel), window, usage)
        turn = run_turn(REQUEST, [system], client=model)
        return SimpleNamespace(**vars(turn), model=model, session=seen[-1])

    return run


def check_finished(turn, window, refused=0):
    assert turn.answer == "all done"
    assert len(turn.model.refusals) <= refused
    assert refused or max(turn.model.sizes) <= window
    for body in turn.model.main:
        assert user(REQUEST) in body["messages"] or REQUEST in json.dumps(body["messages"], ensure_ascii=False)


# --- C3: the limits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", WINDOWS)
def test_c3_soft_hard_and_usable_are_shares_that_leave_room_for_the_answer(window):
    soft, hard, usable = context.limits(window)
    assert 0 < soft < hard < usable < window
    assert (soft, hard) == (usable * 70 // 100, usable * 85 // 100)
    assert window - usable >= min(3000, window // 5) and usable > window // 2


def test_c3_limits_of_the_person_lower_ours_and_never_raise_them(monkeypatch):
    soft, hard, usable = context.limits(32_000)
    monkeypatch.setenv("NAMI_SOFT_LIMIT", "3000")
    monkeypatch.setenv("NAMI_HARD_LIMIT", "6000")
    assert context.limits(32_000) == (3000, 6000, usable)
    monkeypatch.setenv("NAMI_SOFT_LIMIT", "900000")
    monkeypatch.setenv("NAMI_HARD_LIMIT", "900000")
    assert context.limits(32_000) == (soft, hard, usable)


def test_c3_clearing_begins_at_the_limit_of_the_person(load, monkeypatch):
    monkeypatch.setenv("NAMI_SOFT_LIMIT", "5000")
    turn = load(steps=12)
    assert cleared(turn.model.main[-1]) and max(turn.model.sizes) < 7000


@pytest.mark.parametrize("window", [16_000, 32_000])
def test_c3_r060_server_that_keeps_3000_tokens_for_the_answer_never_refuses(load, window):
    turn = load(window=window - 3000, told=window, steps=25, parallel=3)
    assert turn.answer == "all done" and turn.model.refusals == []


def test_c3_window_of_the_person_is_taken(load):
    turn = load(told=8000, steps=15)
    assert turn.answer == "all done" and 4000 < max(turn.model.sizes) <= 8000


def test_c3_window_is_a_common_size_where_nobody_tells():
    assert (agent.default_window("practice"), agent.default_window("gpt-9")) == (32_000, 128_000)


@pytest.mark.parametrize("name, text", [("NAMI_SOFT_LIMIT", "70%"), ("NAMI_HARD_LIMIT", "0"), ("NAMI_WINDOW", "32k")])
def test_c3_limit_that_is_no_number_is_one_line_and_exit_2(name, text):
    done = pipe("hi\n", **{name: text})
    (line,) = done.err.splitlines()
    assert (done.code, done.out) == (2, "") and name in line and repr(text) in line


@pytest.mark.parametrize("text", ["32k", "-1", "0", "8000.5"])
def test_c3_window_that_is_no_number_is_one_line_and_exit_2(serve, monkeypatch, capsys, text):
    server = serve("not asked")
    monkeypatch.setenv("NAMI_WINDOW", text)
    with pytest.raises(SystemExit) as ended:
        run_turn("hi")
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and "NAMI_WINDOW" in line and repr(text) in line and server.requests == []


# --- C2: the size, known beforehand ------------------------------------------------------------------------------


@pytest.mark.parametrize("usage", NO_USAGE.values(), ids=NO_USAGE)
def test_c2_r059_without_usage_all_is_estimated_tools_too_and_shown_with_a_mark(serve, usage):
    server = serve({"content": "fine", "usage": usage})
    turn = run_turn("and now?", history(4) + history(2, 3000, chinese=True)[1:])
    (shown,) = re.findall(r"prompt_tokens ~([\d,]+)", turn.screen)
    assert turn.answer == "fine" and abs(number_of(shown) - size(server.requests[0])) < 0.03 * size(server.requests[0])


def test_c2_real_usage_is_shown_as_it_is(serve):
    serve({"content": "fine", "usage": {"prompt_tokens": 1234, "completion_tokens": 1, "total_tokens": 1235}})
    assert "prompt_tokens 1,234" in run_turn("hi").screen


@pytest.mark.parametrize("factor", [0.7, 1.5])
def test_c2_how_the_server_counts_is_learned_from_its_numbers(load, monkeypatch, factor):
    ours = practice_server.count_tokens
    monkeypatch.setattr(practice_server, "count_tokens", lambda text: round(factor * ours(text)))
    turn = load(steps=40)
    soft, hard, _ = context.limits(32_000)
    assert turn.answer == "all done" and turn.model.refusals == []
    peak = max(turn.model.sizes)  # in the server's tokens
    assert 0.9 * soft < peak <= hard
    assert changes(turn.screen) and abs(changes(turn.screen)[0][0] - soft) < 0.15 * soft


def test_c2_what_was_learned_holds_where_a_number_is_missing(serve):
    many = {"prompt_tokens": 6000, "completion_tokens": 1, "total_tokens": 6001}
    server = serve({"content": "one", "usage": many}, {"content": "two", "usage": None})
    done = repl(f"{one_line(12_000)}\nmore\n")
    first, second = [number_of(text) for text in re.findall(r"prompt_tokens ~?([\d,]+)", done.out)]
    expected = 6000 / size(server.requests[0]) * size(server.requests[1])
    assert first == 6000 and abs(second - expected) < 0.05 * expected


@pytest.mark.parametrize("usage", NO_USAGE.values(), ids=NO_USAGE)
def test_c2_r058_40000_chinese_characters_are_counted_as_they_cost(usage):
    model = Model(lambda body: "fine", window=16_000, usage=usage)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NAMI_WINDOW", "16000")
        turn = run_turn("go on", history(10, 4000, chinese=True), client=model)
    assert turn.answer == "fine" and model.refusals == [] and changes(turn.screen)


def test_c2_results_are_counted_before_they_are_sent(load):
    turn = load(
        window=16_000, steps=1, parallel=10, chinese=True
    )  # the first request is small, the second would not be
    assert turn.answer == "all done" and turn.model.refusals == [] and len(turn.model.main) == 2


# --- C4: independent steps, and one request of sixty steps -------------------------------------------------------


@pytest.mark.parametrize(
    "window, parallel, chinese", [(16_000, 1, True), (16_000, 10, False), (32_000, 4, True), (32_000, 10, True)]
)
def test_c4_one_request_of_sixty_steps_stays_inside_the_window(load, window, parallel, chinese):
    check_finished(load(window, parallel=parallel, chinese=chinese), window)


@pytest.mark.parametrize("usage", [None, "null", ZERO, 0.5, 2.0], ids=["absent", "null", "zero", "half", "double"])
def test_c4_sixty_steps_finish_whatever_the_server_says_of_usage(load, usage):
    check_finished(load(16_000, parallel=4, usage=usage), 16_000, refused=3 if usage == 0.5 else 0)


def test_c4_where_clearing_is_enough_no_summary_is_made(load):
    turn = load(steps=25)
    assert len(turn.model.requests) == len(turn.model.main) and {what[:7] for _, _, what in changes(turn.screen)} == {
        "cleared"
    }


def test_c4_above_hard_with_nothing_to_compact_clearing_is_done_all_the_same(monkeypatch):
    monkeypatch.setenv("NAMI_WINDOW", "16000")
    messages = [SYSTEM, user("one")]
    for number in range(14):
        messages += step(number, text_of(4000))
    model = Model(lambda body: "Summary: nothing yet." if not asks(body) else "fine", window=16_000)
    turn = run_turn("two", [*messages, {"role": "assistant", "content": "so far"}], client=model)
    assert turn.answer == "fine" and model.refusals == [] and changes(turn.screen)[0][2].startswith("cleared")


def test_c4_clear_then_compact_each_only_while_needed(monkeypatch):
    monkeypatch.setenv("NAMI_WINDOW", "16000")
    soft, hard, _ = context.limits(16_000)
    messages = [SYSTEM]
    for number in range(8):
        messages += [user(f"rule {number}"), *step(number, text_of(3000))]
        messages.append({"role": "assistant", "content": text_of(5000, name=f"answer {number}")})
    model = Model(lambda body: "Summary: go on." if not asks(body) else "fine", window=16_000)
    turn = run_turn("go on", messages, client=model)
    (_, middle, first), (before, after, second) = changes(turn.screen)
    assert first.startswith("cleared") and second == "compacted" and middle == before > hard > after
    assert turn.answer == "fine" and [asks(body) for body in model.requests] == [False, True]


def test_c4_where_neither_helps_the_last_step_is_sent_with_its_results_cut(load):
    turn = load(window=8000, steps=2, parallel=12, chinese=True)
    last = turn.model.main[-1]
    assert turn.answer == "all done" and turn.model.refusals == [] and REQUEST in json.dumps(last, ensure_ascii=False)
    assert [message["role"] for message in last["messages"][-13:]] == ["assistant", *["tool"] * 12]


# --- C5: clearing ------------------------------------------------------------------------------------------------


def test_c5_r064_nothing_is_cleared_far_below_soft(load):
    turn = load(steps=60, characters=300)
    texts = ["".join(practice_server.serialise(body["messages"], None))[:-1] for body in turn.model.main]
    assert turn.answer == "all done" and changes(turn.screen) == [] and len(texts) == 61
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))


# Clearing in batches keeps what the provider has in its cache; at four results a step a batch is soon used up.
@pytest.mark.parametrize("parallel, least", [(1, 0.84), (4, 0.66)])
def test_c5_most_of_each_prompt_is_byte_for_byte_the_one_before(load, parallel, least):
    turn = load(parallel=parallel)
    texts = ["".join(practice_server.serialise(body["messages"], body["tools"])) for body in turn.model.main]
    shares = [len(os.path.commonprefix(pair)) / len(pair[1]) for pair in itertools.pairwise(texts)]
    check_finished(turn, 32_000)
    assert len(shares) == 60 and sum(shares) / len(shares) >= least


@pytest.mark.parametrize("fixed", [0, 72_000])  # characters that nobody can clear: with many there is little to win
def test_c5_a_batch_is_worth_a_tenth_of_soft_unless_hard_is_passed(load, fixed):
    soft, hard, _ = context.limits(32_000)
    turn = load(steps=25, system={"role": "system", "content": SYSTEM["content"] + text_of(fixed)})
    lines = [line for line in changes(turn.screen) if line[2].startswith("cleared")]
    assert turn.answer == "all done" and lines and all(before > soft for before, _, _ in lines)
    assert all(before - after >= soft // 10 or before > hard for before, after, _ in lines)


@pytest.mark.parametrize("parallel", [1, 5])
def test_c5_results_of_the_last_step_are_never_cleared(load, parallel):
    turn = load(window=16_000, parallel=parallel, steps=20)
    bodies = turn.model.main[1:]
    assert len(bodies) == 20 and any(map(cleared, bodies))
    for number, body in enumerate(bodies):
        for i, message in enumerate(body["messages"][-parallel:]):
            assert message["content"].startswith(f"1\t{number * parallel + i:04} ")


def test_c5_the_newest_results_are_kept_by_tokens_and_the_last_step_in_any_case():
    messages = history(10, 400)
    whole = [m["content"] for m in messages if m["role"] == "tool"]
    for protected, kept in ((0, 1), (250, 2), (100_000, 10)):
        results = [m["content"] for m in context.clear_all_but(protected, messages) if m["role"] == "tool"]
        assert results[-kept:] == whole[-kept:]
        assert all(text.startswith(context.PLACEHOLDER) for text in results[:-kept])
    last = step(99, *[text_of(4000, chinese=True)] * 5)
    assert context.clear_all_but(0, [*messages, user("more"), *last])[-6:] == last


def stub_of(result, name="run_shell", **arguments):
    messages = [SYSTEM, user("go"), *step(1, result, name=name, **arguments), *step(2, "short")]
    before = copy.deepcopy(messages)
    (stub,) = (
        m["content"] for m in context.clear_old_tool_results(messages, 1) if m["role"] == "tool" and "c1" in str(m)
    )
    assert [{**m, "content": ""} for m in messages] == [{**m, "content": ""} for m in before]
    return stub


def test_c5_stub_of_a_failed_command_says_what_it_was_and_how_it_ended_and_not_to_repeat_it():
    noise = text_of(3000)
    result = f"exit status 3\n{noise}\nValueError: first\n{noise}\nKeyError: 'mint' is missing\n{noise}"
    stub = stub_of(result, command="python grow.py --all", timeout=60)
    assert "run_shell" in stub and "python grow.py --all" in stub and "exit status 3" in stub
    assert "KeyError: 'mint' is missing" in stub and "first" not in stub and f"{len(result):,}" in stub
    assert "do not repeat" in stub and "again if needed" not in stub and "\n" not in stub and len(stub) < 500


def test_c5_stub_of_a_command_that_went_well_says_so_and_tells_of_no_error():
    stub = stub_of("exit status 0\n0 errors, no failure\n" + text_of(3000), command="make test")
    assert "exit status 0" in stub and "make test" in stub and "0 errors" not in stub


@pytest.mark.parametrize(
    "result, words",
    [
        ("killed: it still ran after 60 seconds\n", "killed: it still ran after 60 seconds"),
        ("killed by signal 9 (SIGKILL)\n", "killed by signal 9"),
        ("Denied by the user. The reason: not on a Sunday\n", "Denied"),
        ("exit status -9\n", "exit status -9"),
        ("exit status 10\n", "exit status 10"),
    ],
)
def test_c5_stub_tells_how_a_call_ended_that_did_not_end_well(result, words):
    assert words in stub_of(result + text_of(3000), command="sleep 99")


@pytest.mark.parametrize("name, safe", [("read_file", True), ("write_file", False), ("edit_file", False)])
def test_c5_only_reads_are_to_be_repeated(name, safe):
    stub = stub_of(text_of(3000), name=name, path="src/garden.py")
    assert name in stub and "src/garden.py" in stub and "3,000" in stub
    assert ("again if needed" in stub) == safe and ("do not repeat" in stub) != safe


def test_c5_result_that_is_shorter_than_its_stub_stays():
    assert stub_of("exit status 0\nok", command="true") == "exit status 0\nok"


@pytest.mark.parametrize("name, field", [("write_file", "content"), ("edit_file", "new")])
def test_c5_long_arguments_of_old_writes_shrink_and_stay_json(name, field):
    text = text_of(4000, chinese=True) + ' "quoted" \\ \n'
    messages = [SYSTEM, user("go"), *step(1, "wrote 9 bytes", name=name, path="a.md", **{field: text})]
    messages += step(2, "wrote 9 bytes", name=name, path="b.md", **{field: text})
    last = copy.deepcopy(messages[-2:])
    context.clear_old_tool_results(messages, 1)
    arguments = messages[2]["tool_calls"][0]["function"]["arguments"]
    fields = json.loads(arguments)
    assert fields["path"] == "a.md" and set(fields) == {"path", field} and len(arguments) < 700
    assert fields[field].startswith(text[:50]) and fields[field].endswith(text[-50:]) and "omitted" in fields[field]
    assert messages[-2:] == last and messages[3]["content"] == "wrote 9 bytes"


def test_c5_long_write_of_the_session_shrinks_on_its_way_to_the_model(monkeypatch):
    monkeypatch.setenv("NAMI_WINDOW", "16000")
    texts = [text_of(9000, name=f"chapter {number}") for number in range(8)]
    calls = [call("write_file", {"path": f"{number}.md", "content": text}) for number, text in enumerate(texts)]
    model = Model(lambda body: "Summary." if not asks(body) else calls.pop(0) if calls else "done", window=16_000)
    monkeypatch.setattr(context, "save", lambda session: None)
    turn = run_turn("write a book", [SYSTEM], ask=lambda question: "y", client=model)
    assert turn.answer == "done" and model.refusals == []
    last = [m for m in model.main[-1]["messages"] if m.get("tool_calls")][-1]
    assert json.loads(last["tool_calls"][0]["function"]["arguments"])["content"] == texts[-1]


@pytest.mark.parametrize("arguments", ["{}", "[]", "null", "not JSON", '{"path": 3}', '{"path": null}', "[" * 5000])
def test_c5_arguments_that_are_no_object_do_not_stop_clearing(arguments):
    messages = [SYSTEM, user("go"), *step(1, text_of(3000)), *step(2, "short")]
    messages[2]["tool_calls"][0]["function"]["arguments"] = arguments
    context.clear_old_tool_results(messages, 1)
    assert messages[3]["content"].startswith(context.PLACEHOLDER) and "read_file" in messages[3]["content"]
    assert messages[2]["tool_calls"][0]["function"]["arguments"] == arguments


def test_c5_clearing_changes_only_contents_and_long_arguments_and_a_second_time_nothing():
    for seed in range(100):
        messages, _ = context.repair(random_messages(random.Random(seed)))
        keep, before = seed % 5, copy.deepcopy(messages)
        once = copy.deepcopy(context.clear_old_tool_results(messages, keep))
        assert context.clear_old_tool_results(messages, keep) == once, seed
        for old, new in zip(before, once, strict=True):
            if old["role"] == "tool":
                assert {**new, "content": ""} == {**old, "content": ""} and len(new["content"]) <= len(old["content"])
            else:
                assert without_long(new) == without_long(old)
        protected = context.clear_all_but(500, before)
        assert context.clear_all_but(500, protected) == protected, seed


def without_long(message):
    """The message without the arguments of its calls where they were long."""
    message = copy.deepcopy(message)
    for one in message.get("tool_calls") or []:
        if len(one["function"]["arguments"]) > 250:
            assert isinstance(json.loads(one["function"]["arguments"]), dict)
            one["function"]["arguments"] = "long"
    return message


# --- C12: no compaction without end ------------------------------------------------------------------------------


def tight_window(system):
    """A window of which the system prompt and the tools alone are more than HARD, but less than usable."""
    run_turn("hi", client=Model(lambda body: "fine"))  # lesson 9 adds its tools there
    fixed = context.estimate_tokens([[system], tools.get_schemas()])
    return max(window for window in range(500, 20_000, 10) if context.limits(window)[1] < fixed)


def test_c12_r052_two_compactions_without_gain_are_the_last_of_the_turn_and_it_is_said_once(monkeypatch):
    rules = {"role": "system", "content": text_of(24_000)}
    monkeypatch.setenv("NAMI_WINDOW", str(tight_window(rules)))
    replies = iter([call("read_file", {"path": "none.txt"})] * 5)
    model = Model(lambda body: next(replies, "done") if asks(body) else "s" * 300, window=10**6)
    talk = [m for n in range(4) for m in (user(f"r{n}"), {"role": "assistant", "content": f"a{n}"})]
    turn = run_turn("go", [rules, *talk], client=model)
    assert len(model.requests) - len(model.main) <= 2
    assert turn.screen.count("Compacting does not help") == 1
    assert turn.answer == "done" and len(model.main) == 6


@pytest.mark.parametrize("window", ["500", "1200", "2000"])
def test_c12_r052_tiny_window_never_loops(monkeypatch, window):
    monkeypatch.setenv("NAMI_WINDOW", window)
    replies = iter([call("read_file", {"path": "none.txt"}), "one"] * 3)
    model = Model(lambda body: next(replies) if asks(body) else "s" * 300, window=10**6)
    messages = [SYSTEM]
    for number in range(3):
        turn = run_turn(f"request {number}", messages, client=model)
        messages = turn.messages
        assert turn.answer == "one" or ("NAMI_WINDOW" in turn.screen and "/undo" in turn.screen)
        assert turn.screen.count("Compacting does not help") <= 1
    assert len(model.requests) <= 12


# --- C13: refused for length -------------------------------------------------------------------------------------

NUMBERED = {  # of a window of 8,192 tokens
    "openai": "This model's maximum context length is 8192 tokens. However, your messages resulted in 12345 tokens.",
    "openai, commas": "This model's maximum context length is 8,192 tokens, but 12,345 tokens were sent.",
    "openrouter": "This endpoint's maximum context length is 8192 tokens. However, you requested about 12345 tokens "
    "(12245 of text input, 100 in the output). Please reduce the length of either one.",
    "deepseek": "This model's maximum context length is 8192 tokens. However, you requested 12345 tokens (12345 in the "
    "messages, 0 in the completion). Please reduce the length of the messages or completion.",
    "litellm": "litellm.BadRequestError: ContextWindowExceededError: OpenAIException - This model's maximum context "
    "length is 8192 tokens. However, your messages resulted in 12345 tokens.",
    "vllm": "This model's maximum context length is 8192 tokens. However, you requested 500 output tokens and your "
    "prompt contains at least 12345 input tokens, for a total of at least 12845 tokens.",
    "vllm, older": "The decoder prompt (length 12345) is longer than the maximum model length of 8192. Make sure that "
    "`max_model_len` is no smaller than the number of text tokens.",
    "anthropic": "prompt is too long: 12345 tokens > 8192 maximum",
    "anthropic, max_tokens": "input length and `max_tokens` exceed context limit: 7500 + 1000 > 8192, decrease input "
    "length or `max_tokens` and try again",
    "copilot": "prompt token count of 12345 exceeds the limit of 8192",
    "gemini": "The input token count (12345) exceeds the maximum number of tokens allowed (8192).",
    "xai": "This model's maximum prompt length is 8192 but the request contains 12345 tokens.",
    "together": "The input (12345 tokens) is longer than the model's context length (8192 tokens).",
    "mistral": "Prompt contains 12345 tokens and 0 draft tokens, too large for model with 8192 maximum context length",
    "llama.cpp": "the request exceeds the available context size (8192 tokens), try increasing it",
    "llama.cpp, newer": "request (12345 tokens) exceeds the available context size (8192 tokens), try increasing it",
    "lm studio": "Trying to keep the first 12345 tokens when context overflows. However, the model is loaded with "
    "context length of only 8192 tokens, which is not enough. Try to load it with a larger context length.",
    "kimi": "Invalid request: Your request exceeded model token limit: 8192 (requested: 12345)",
    "dashscope": "<400> InternalError.Algo.InvalidParameter: Range of input length should be [1, 8192]",
    "siliconflow": "length of prompt_tokens (12345) must be less than max_seq_len (8192).",
    "siliconflow, input": "number of input tokens (12345) have exceeded max_prompt_tokens (8192) limit.",
    "lm studio, n_ctx": "Cannot truncate prompt with n_keep (12345) >= n_ctx (8192)",
    "lm studio, older": "The number of tokens to keep from the initial prompt is greater than the context length "
    "(n_keep: 12345>= n_ctx: 8192). Try to load the model with a larger context length.",
}
UNNUMBERED = {
    "openai, responses": "Your input exceeds the context window of this model. Please adjust your input and try again.",
    "litellm": "ContextWindowExceededError: the context window of the model is exceeded",
    "vllm": "The sum of prompt and requested max output tokens is more than max_model_len.",
    "anthropic, bytes": {"type": "request_too_large", "message": "Request exceeds the maximum size"},
    "bedrock": "Input is too long for requested model.",
    "groq": "Please reduce the length of the messages or completion.",
    "lm studio": "The number of tokens to keep from the initial prompt is greater than the context length.",
    "ollama": "prompt too long; exceeded max context length by 4153 tokens",  # the number is a difference
    "minimax": "invalid params, context window exceeds limit (2013)",  # a code
    "z.ai": {"code": "model_context_window_exceeded", "message": "The request could not be finished."},
    "code alone": {"code": "context_length_exceeded", "message": "Bad request."},
    "doubao": "Total tokens of text exceed max message tokens for this model.",
    "zhipu": {"code": "1261", "message": "Prompt exceeds max length"},
    "baidu": {"code": "tokens_too_long", "message": "Prompt tokens too long"},
    "zhipu, chinese": {"code": "1261", "message": "Prompt 超长"},
    "chinese": "输入内容超过最大长度，请缩短后重试",
    "chinese, other": "请求的 tokens 数超出了模型的上下文长度",
    "cerebras": None,  # not a word
}


def refusal(text, status=400):
    """A script item that refuses as a provider does; text: the message, or the whole error, None for no body."""
    error = {"message": text, "type": "invalid_request_error", "code": None} if isinstance(text, str) else text
    body = {"raw": ""} if text is None else {"body": {"error": error}}
    return {"status": status, "headers": NO_RETRY, **body}


def answers(body):
    return "fine" if asks(body) else "Summary: go on."


@pytest.fixture
def refuse(serve, monkeypatch):
    """Return a function: a turn on 12,000 tokens of history, whose first requests are refused with these items."""
    monkeypatch.setenv("NAMI_WINDOW", "1000000")
    monkeypatch.setattr(context, "save", lambda session: None)

    def run(*refusals, **options):
        left = list(refusals)
        replies = [lambda body: left.pop(0) if left and asks(body) else answers(body)] * 9
        server = serve(*replies, **options)
        client = agent.make_client(server.url, "no-key").with_options(max_retries=0)
        turn = run_turn("and now?", history(12), client=client)
        return SimpleNamespace(**vars(turn), server=server, sizes=[size(b) for b in server.requests if asks(b)])

    return run


def learned(screen):
    return [number_of(text) for text in re.findall(r"its window counts as ([\d,]+) tokens", screen)]


@pytest.mark.parametrize("text", NUMBERED.values(), ids=NUMBERED)
def test_c13_window_is_learned_from_the_number_in_the_refusal_and_the_next_request_fits(refuse, text):
    turn = refuse(refusal(text))
    assert turn.answer == "fine" and learned(turn.screen) == [8192] and len(turn.sizes) == 2
    assert turn.sizes[0] > 8192 > turn.sizes[1] and changes(turn.screen)


@pytest.mark.parametrize("text", UNNUMBERED.values(), ids=UNNUMBERED)
def test_c13_refusal_without_a_number_teaches_a_little_less_than_was_sent(refuse, text):
    turn = refuse(refusal(text))
    (window,) = learned(turn.screen)
    assert turn.answer == "fine" and len(turn.sizes) == 2 and turn.sizes[1] < window < turn.sizes[0]
    assert window > 0.7 * turn.sizes[0]


@pytest.mark.parametrize("status, text", [(413, NUMBERED["openai"]), (422, NUMBERED["openai"]), (413, None)])
def test_c13_refusal_for_length_may_have_another_status(refuse, status, text):
    turn = refuse(refusal(text, status))
    window = 8192 if text else turn.sizes[0] * 85 // 100
    assert turn.answer == "fine" and learned(turn.screen) == [pytest.approx(window, abs=4)]


NEAR_MISSES = {
    "429 a minute": (429, "Rate limit reached for tokens per min (TPM): Limit 30000, Requested 31000."),
    "429 wait": (429, "Too many tokens, wait a minute before trying again."),
    "429 context": (429, "Request too large: it exceeds the limit of 8192 tokens a minute; context length 12345."),
    "413 a minute": (
        413,
        {"message": "Request too large for model with TPM: Limit 6000, Requested 12345", "code": "rate_limit_exceeded"},
    ),
    "400 wait": (400, "Too many tokens, wait"),
    "400 throttled": (400, "ThrottlingException: input is too long for the rate of this account"),
    "pairing 1": (400, "messages with role 'tool' must be a response to a preceding message with 'tool_calls'."),
    "pairing 2": (400, "An assistant message with 'tool_calls' must be followed by tool messages for each id."),
    "pairing 3": (400, "The following tool_call_ids did not have response messages: call_12345."),
    "pairing 4": (400, "insufficient tool messages following tool_calls message"),
    "pairing 5": (400, "tool_call_id call_12345 not found in the messages before"),
    "max_tokens": (400, "max_tokens is too large: 100000. This model supports at most 16384 completion tokens."),
    "max_tokens, range": (400, "Range of max_tokens should be [1, 8192]"),
    "parameter": (400, "Unsupported value: 'temperature' does not support 0.2 with this model."),
    "empty 500": (500, None),
    "500": (500, "Internal error: the prompt is too long to be logged"),
    "503": (503, "Service unavailable, the context window service is down"),
    "401": (401, "Incorrect key; the maximum length of a key is 8192"),
    "403": (403, "The limit of 8192 requests is reached"),
}


@pytest.mark.parametrize("status, text", NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_c13_other_errors_change_nothing_in_the_context(refuse, status, text):
    turn = refuse(refusal(text, status))
    assert turn.answer is None and len(turn.server.requests) == 1 and str(status) in turn.screen
    assert changes(turn.screen) == [] and learned(turn.screen) == []
    assert turn.messages[: len(history(12))] == history(12)


def test_c13_small_request_refused_without_a_word_is_not_too_long(serve):
    server = serve(refusal(None), "fine")
    turn = run_turn("hi", client=agent.make_client(server.url, "no-key"))
    assert turn.answer is None and len(server.requests) == 1 and learned(turn.screen) == []


def test_c13_server_that_keeps_a_smaller_window_refuses_once(refuse):
    turn = refuse(window=6000)
    assert turn.answer == "fine" and len(turn.server.refusals) == 1 and learned(turn.screen) == [6000]


def test_c13_window_stays_learned_for_the_session(serve, monkeypatch):
    monkeypatch.setenv("NAMI_WINDOW", "1000000")
    server = serve(*[answers] * 30, window=4000)
    done = repl(f"{one_line(2400)}\n" * 8)
    assert (done.code, len(server.refusals)) == (0, 1) and done.out.count("fine") == 8


def test_c13_refused_twice_the_last_step_alone_is_sent(refuse):
    turn = refuse(refusal(UNNUMBERED["bedrock"]), refusal(UNNUMBERED["bedrock"]))
    assert turn.answer == "fine" and len(turn.sizes) == 3 and turn.sizes[0] > turn.sizes[1] > turn.sizes[2]
    last = turn.server.requests[-1]["messages"]
    assert last[0] == SYSTEM and last[-1] == user("and now?") and not any(m["role"] == "tool" for m in last)


@pytest.mark.parametrize("text", [NUMBERED["openai"], UNNUMBERED["ollama"]])
def test_c13_refused_for_ever_ends_after_three_tries_with_what_to_do(refuse, text):
    turn = refuse(*[refusal(text)] * 3)
    assert turn.answer is None and len(turn.sizes) == 3
    (line,) = [line for line in turn.screen.splitlines() if "does not fit" in line]
    assert "/undo" in line and "NAMI_WINDOW" in line


def test_c13_window_smaller_than_the_tools_ends_with_what_to_do(refuse):
    turn = refuse(window=300)
    assert turn.answer is None and len(turn.sizes) <= 3
    (line,) = [line for line in turn.screen.splitlines() if "does not fit" in line]
    assert "/undo" in line and "NAMI_WINDOW" in line


@pytest.mark.parametrize("chinese", [False, True])
def test_c13_request_larger_than_the_window_is_not_sent_and_the_session_is_intact(serve, monkeypatch, chinese):
    monkeypatch.setenv("NAMI_WINDOW", "8000")
    server = serve(answers, answers)
    huge = text_of(30_000, chinese)
    before = history(2, 500)
    turn = run_turn(huge, copy.deepcopy(before))
    assert turn.answer is None and server.requests == []
    (line,) = [line for line in turn.screen.splitlines() if "does not fit" in line]
    assert "/undo" in line and "NAMI_WINDOW" in line and "8,000" in line
    ((path, _),) = context.saved_sessions()
    saved = context.load_session(path.stem)
    assert saved == turn.messages and saved[: len(before) + 1] == [*before, user(huge)]
    again = run_turn("small", turn.messages)  # also without /undo
    assert again.answer == "fine" and server.refusals == [] and server.requests[-1]["messages"][-1] == user("small")


def test_c13_undo_after_a_request_that_did_not_fit_leaves_all_as_before(serve, monkeypatch):
    monkeypatch.setenv("NAMI_WINDOW", "8000")
    server = serve("one", "two")
    done = repl(f"first\n{'large ' * 8000}\n/undo\nsmall\n")
    texts = [message["content"] for message in server.requests[-1]["messages"][1:]]
    assert done.code == 0 and "does not fit" in done.out and texts == ["first", "one", "small"]


# --- R062, R066 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("newline", ["", "\\n"])
def test_r062_one_result_of_5_mb_is_bounded_with_a_mark(monkeypatch, newline):
    monkeypatch.setenv("NAMI_WINDOW", "8000")
    program = f"print('{'x' * 50}{newline}' * 100_000, 'LAST WORD')"
    calls = [call("run_shell", {"command": f'"{sys.executable}" -c "{program}"'}), "done"]
    model = Model(lambda body: calls.pop(0), window=8000)
    turn = run_turn("go", [SYSTEM], ask=lambda question: "y", client=model)
    assert turn.answer == "done" and model.refusals == []
    result = model.main[-1]["messages"][-1]["content"]
    assert result.startswith("exit status 0, the first ") and len(result) < 40_000
    assert "omitted" in result or "more lines like this" in result  # lesson 9 folds lines


FEW = {"prompt_tokens": 2048, "completion_tokens": 5, "total_tokens": 2053}


@pytest.mark.parametrize(
    "item", [{"content": "fine", "usage": FEW}, {"content": "", "finish_reason": "length"}], ids=["tokens", "length"]
)
def test_r066_server_that_cuts_without_a_word_gives_one_warning_with_the_remedy(serve, item):
    serve(*[item] * 3)
    done = repl(f"{one_line(24_000)}\n" * 3)
    assert done.code == 0 and done.out.count("without a word") == 1
    assert "NAMI_WINDOW" in done.out and "OLLAMA_CONTEXT_LENGTH" in done.out and done.out.count("prompt_tokens") == 3


def test_r066_server_that_cuts_is_noticed_also_where_the_conversation_grows_slowly(load):
    turn = load(128_000, steps=20, usage=FEW)
    assert turn.answer == "all done" and turn.screen.count("without a word") == 1


@pytest.mark.parametrize(
    "item",
    [
        {"content": "fine", "usage": {"prompt_tokens": 7000, "completion_tokens": 1, "total_tokens": 7001}},
        {"content": "a long answer that was cut off at the end", "finish_reason": "length"},
        {"content": "fine", "usage": None},
        {"content": "fine", "usage": ZERO},
    ],
    ids=["a little less", "long answer", "absent", "zero"],
)
def test_r066_no_warning_where_nothing_was_cut(serve, item):
    serve(item)
    assert "without a word" not in run_turn(text_of(40_000)).screen


def test_r066_no_warning_for_a_small_conversation(serve):
    serve({"content": "fine", "usage": {"prompt_tokens": 12, "completion_tokens": 1, "total_tokens": 13}})
    assert "without a word" not in run_turn("hi").screen


# --- C14: what is sent can be sent -------------------------------------------------------------------------------


def random_messages(dice):
    """A history with all that goes wrong: interrupts, missing results, orphans, empty texts, two answers in a row."""
    messages, number = [SYSTEM], 0

    def text(most=3000):
        return text_of(dice.choice([0, 1, 30, 500, most]), dice.random() < 0.3)

    for _ in range(dice.randrange(1, 7)):
        messages.append(user(text() or "go on"))
        for _ in range(dice.randrange(5)):
            number += 1
            long = {"path": "a.md", "content": text()}
            more = dice.choice([{}, {"name": "run_shell", "command": "make"}, {"name": "write_file", **long}])
            made = step(
                number, *[dice.choice(["", "exit status 2\n"]) + text() for _ in range(dice.randint(1, 4))], **more
            )
            fault = dice.randrange(8)
            if fault == 0:
                del made[dice.randrange(len(made))]
            elif fault == 1:
                made = made[: dice.randrange(len(made)) + 1]
            elif fault == 2:
                dice.shuffle(made)
            messages += made
        if dice.random() < 0.8:
            messages.append({"role": "assistant", "content": text()})
    if dice.random() < 0.2:
        messages.insert(dice.randrange(1, len(messages)), {"role": "tool", "tool_call_id": "x", "content": "orphan"})
    return copy.deepcopy(messages)


def test_c14_whatever_the_history_is_what_is_sent_is_taken_and_fits(monkeypatch):
    monkeypatch.setattr(context, "save", lambda session: None)
    run_turn("hi", client=Model(lambda body: "fine"))
    schemas, stopped, changed = tools.get_schemas(), 0, 0
    for seed in range(150):
        dice = random.Random(seed)
        session = context.new_session(context.Path.cwd(), SYSTEM["content"], "m", warn=lambda text: None)
        session.window = dice.choice([2000, 3000, 4000, 6000, 9000, 16_000, 32_000])
        session.drift = dice.choice([0.7, 1.0, 1.0, 1.6])
        context.append(session, *random_messages(dice)[1:], user(text_of(dice.choice([5, 200, 6000]))))
        context.repair_session(session)
        before = copy.deepcopy(session.messages)
        model = Model(lambda body, dice=dice: dice.choice(["Summary.", "", "s" * 9000]), window=10**6)
        try:
            tokens = context.fit_context(session, model, schemas, nullcontext)
        except context.ContextUnrecoverable:
            stopped += 1
            assert session.messages == before, seed
            continue
        body = {"model": "m", "messages": list(map(context.sendable, session.messages)), "tools": schemas}
        practice_server.check_request(body)
        assert size(body) * session.drift <= session.window, seed
        assert abs(tokens - size(body)) <= 2 + 0.02 * size(body), seed
        assert body["messages"][-1] == context.sendable(before[-1]), seed
        changed += session.messages != before
    assert stopped < 75 and changed > 40


def test_c14_interrupted_turn_is_repaired_before_the_next_request(serve):
    server = serve("fine")
    messages = [SYSTEM, user("one"), *step(1, "a", "b", "c")[:3]]
    assert run_turn("two", messages).answer == "fine" and server.refusals == []


def test_c14_model_that_counts_its_calls_from_0_in_every_reply_is_answered():
    replies = iter([call("read_file", {"path": "none.txt"})] * 3)
    model = Model(lambda body: next(replies, "done"))
    model.ids = itertools.repeat(0)
    assert run_turn("go", [SYSTEM], client=model).answer == "done" and len(model.main) == 4


# --- C16: each change in one line --------------------------------------------------------------------------------


@pytest.mark.parametrize("parallel, chinese", [(1, False), (6, True)])
def test_c16_each_change_is_one_line_with_both_numbers_and_what_was_done(load, parallel, chinese):
    turn = load(16_000, steps=25, parallel=parallel, chinese=chinese)
    lines = changes(turn.screen)
    records = [record["kind"] for record in turn.session.pending if record["kind"] not in ("message", "repair")]
    assert len(lines) == len(records) > 0 and turn.screen.count(" → ") == len(lines)
    assert all(before > after for before, after, _ in lines)
    for (_, _, what), kind in zip(lines, records, strict=True):
        assert what.split()[0] in {"clear": ["cleared"], "compact": ["compacted", "only"], "prune": ["only"]}[kind]


def test_c16_the_numbers_are_those_of_the_requests(load):
    turn = load(steps=25)
    (before, after, what), *_ = changes(turn.screen)
    first = next(number for number, body in enumerate(turn.model.main) if cleared(body))
    body = turn.model.main[first]
    assert what == f"cleared {len(cleared(body))} results" and abs(after - size(body)) < 0.02 * after
    assert abs(before - turn.model.sizes[first - 1] - 1050) < 150
