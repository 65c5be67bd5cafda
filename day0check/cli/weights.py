"""`day0check weights DIR`: the audit of a checkpoint alone, with a verdict and an exit code; no model is run."""

from __future__ import annotations

import time
from pathlib import Path

import click

from day0check.cli.app import OUT_KEY
from day0check.cli.options import RUN_FACTS, deliver, today, waivers_of
from day0check.types import Verdict


@click.command()
@click.argument("model", metavar="DIR|PRESET")
@click.option(
    "--waivers", type=click.Path(path_type=Path), metavar="FILE", help="[default: waivers.toml if it is there]"
)
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="[default: reports/TIME]")
@click.option("--json", "as_json", is_flag=True, help="Print verdict.json on stdout and nothing else.")
@click.pass_context
def weights(ctx: click.Context, model: str, waivers: Path | None, out: Path | None, as_json: bool) -> None:
    """Say whether the checkpoint is whole and what its configuration says: files, names, shapes, dtypes, scales, keys.

    Reads headers and scales, no weights. `run` asks the same before it runs anything.
    """
    from day0check import runner
    from day0check.cli.resolve import model_directory

    directory = model_directory(model, where="DIR")
    folder = out if out is not None else runner.default_out()
    ctx.meta[OUT_KEY] = folder
    verdict = audited(directory, model, waivers)
    runner.prepare_out(folder)
    deliver(verdict, folder, as_json=as_json)


def audited(directory: Path, model: str, waivers: Path | None) -> Verdict:
    """The verdict on the checkpoint in `directory`. Raises InputError when there is nothing to audit."""
    from day0check import env, gate
    from day0check.audit import inspect
    from day0check.checks.weights import NAME, judge_audit
    from day0check.cli.assemble import moment
    from day0check.cli.resolve import content_digest

    allowed, file = waivers_of(waivers, on=today())
    begin, started = time.monotonic(), moment()
    found = inspect(directory)
    answer = judge_audit(found.findings, tensors=found.tensors, files=found.files)
    scene = gate.Scene(
        model={
            "name": directory.name if Path(model).is_dir() else model,
            "digest": content_digest(directory),
            "tensors": found.tensors,
        },
        profile="",
        cases=(),
        expected=(("", NAME),),
        environment={**env.capture(), RUN_FACTS: {"started": started, "waivers": str(file) if file else ""}},
        measured={"seconds": time.monotonic() - begin},
        partial=True,  # waivers of other checks are not out of use because only this one was asked
    )
    return gate.decide((answer.outcome,), answer.findings, scene, waivers=allowed, today=today())
