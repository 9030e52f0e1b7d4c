"""Schedules of a pipeline on paper."""

from meshwright.layout import ORDERS, Action, Line, forwards, program


def test_one_stage_is_a_plain_loop():
    line = Line(1, (3,))
    (actions,) = program(line, ORDERS["1f1b"](line, 2))
    assert actions == [Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1)]
    assert program(line, forwards(line, 2)) == [[Action("F", 0, 0), Action("F", 0, 1)]]
