"""Lesson 1: the loop, at a terminal and through pipes."""

from conftest import call, pipe, run_turn


def test_loop_hands_the_result_back_until_the_model_answers(serve, workspace):
    (workspace / "notes.txt").write_text("buy milk\n")
    server = serve(call("read_file", {"path": "notes.txt"}), "It says: buy milk")
    turn = run_turn("what is in notes.txt?")
    assert turn.answer == "It says: buy milk"
    assert [message["role"] for message in turn.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert "buy milk" in server.requests[1]["messages"][-1]["content"]


def test_ctrl_c_then_exit(serve, terminal):
    import threading

    hold = threading.Event()
    server = serve({"wait": hold}, "second answer")
    person = terminal()
    person.expect("> ")
    person.type("first")
    person.expect("first")
    while not server.requests:
        person.read(0.05)
    person.press("C")
    person.expect("> ")
    person.type("second")
    person.expect("second answer")
    person.expect("> ")
    person.press("D")
    assert person.exit_code() == 0
    assert server.refusals == []


def test_end_of_input_leaves_cleanly(serve):
    serve("hello")
    done = pipe("hi\n")
    assert (done.code, done.err) == (0, "") and "hello" in done.out
