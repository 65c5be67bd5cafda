"""Prints, at the end of a run, which fault of the scripted endpoint was named by which check."""

FAULT = "fault of the scripted endpoint"


def pytest_terminal_summary(terminalreporter):
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, ())]
    rows = sorted({(value, r.outcome) for r in reports for name, value in r.user_properties if name == FAULT})
    if rows:
        terminalreporter.section("faults of the scripted endpoint")
        for value, outcome in rows:
            terminalreporter.write_line(f"{'caught' if outcome == 'passed' else 'MISSED':<8}{value}")
