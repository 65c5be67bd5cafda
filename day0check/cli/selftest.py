"""`day0check selftest`: does this installation catch the known faults, name their place, and let legal variants be?"""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from day0check.cli.app import OUT_KEY


@click.command()
@click.option("--fault", "faults", multiple=True, metavar="ID", help="Only this entry (S-38, F-…, B-…); repeatable.")
@click.option("--kind", "kinds", multiple=True, metavar="KIND", help="Only entries of this kind; repeatable.")
@click.option("--jobs", type=click.IntRange(1, 64), default=1, show_default=True, help="How many processes.")
@click.option("--device", default="cpu", show_default=True, help="Where the candidate runs, as torch names it.")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="[default: reports/TIME]")
@click.option("--json", "as_json", is_flag=True, help="Print selftest.json on stdout and nothing else.")
@click.pass_context
def selftest(
    ctx: click.Context,
    faults: tuple[str, ...],
    kinds: tuple[str, ...],
    jobs: int,
    device: str,
    out: Path | None,
    as_json: bool,
) -> None:
    """Run the known faults and legal variants through the main job and say which were caught, and where.

    Exit code 0 only when every fault was caught and no legal variant raised an alarm.
    """
    from day0check import runner
    from day0check.cli.resolve import check_device
    from day0check.faults.catalogue import select
    from day0check.gate import write_text
    from day0check.report.selftest import selftest_page
    from day0check.selftest import Outcome, counts, exit_code, run
    from day0check.types import to_json

    check_device(device)
    entries = select(faults, kinds)
    folder = out if out is not None else runner.default_out()
    ctx.meta[OUT_KEY] = folder
    runner.prepare_out(folder)
    begin = time.monotonic()

    def tell(outcome: Outcome) -> None:
        click.echo(line(outcome), err=as_json)

    outcomes = run(entries, folder / "entries", jobs=jobs, device=device, tell=tell)
    seconds = time.monotonic() - begin
    table = {"counts": counts(outcomes), "seconds": round(seconds, 1), "entries": [to_json(o) for o in outcomes]}
    text = json.dumps(table, indent=2, ensure_ascii=False) + "\n"
    write_text(folder / "selftest.json", text)
    write_text(folder / "selftest.html", selftest_page(table))
    if as_json:
        click.echo(text, nl=False)
    else:
        click.echo(f"{summary(counts(outcomes))} in {seconds:.0f} s; everything of it: {folder}")
    raise click.exceptions.Exit(int(exit_code(outcomes)))


def line(outcome: object) -> str:
    """One entry in one line."""
    if outcome.benign:
        word = "let through" if outcome.good else f"FALSE ALARM ({outcome.status})"
    elif not outcome.caught:
        word = f"MISSED ({outcome.status})"
    else:
        word = "caught, placed" if outcome.placed else "caught, MISPLACED"
    text = f"{outcome.id:<6} {word:<20} {outcome.seconds:6.1f} s  {outcome.title}"
    if not outcome.good or (outcome.caught and not outcome.placed):
        text += (
            f"\n       expected {outcome.expected or 'ready'}; found {outcome.found or 'nothing'}: {outcome.message}"
        )
    return text


def summary(count: dict[str, int]) -> str:
    """The totals in one sentence."""
    public = f"{count['caught']} of {count['faults']} public faults caught, {count['placed']} placed exactly"
    further = f"{count['further_caught']} of {count['further']} further ones caught, {count['further_placed']} placed"
    return f"{public}; {further}; {count['false_alarms']} of {count['legal']} legal variants raised a false alarm"
