"""The comparison of a run by several processes with the same run by one."""

from process_runs import assert_alike, close


def assert_as_one_process(actual, expected, compare_notes=True):
    """The same masks, and weights and reports equal up to rounding.

    Returns:
        The last note of `actual`, which one process does not have, and the other notes of both.
    """
    assert_alike(actual, expected)
    report, single = ({**result["said"], "notes": [*result["said"]["notes"]]} for result in (actual, expected))
    shared = report["notes"].pop()
    notes = report["notes"], single["notes"]
    if not compare_notes:
        del report["notes"], single["notes"]
    assert close(report, single)
    return shared, notes
