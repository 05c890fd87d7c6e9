"""The `vflash` command: run, plan, status, figures, clips, doctor, demo, report.

    vflash run --profile pocket --set training.steps=300

Every command takes `--json`, which prints one JSON line last. Exit codes: 0 all is there, 1
something is missing or failed, 2 bad input.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vflash_analysis import config, paths, runner, stages, strict
from vflash_analysis.errors import InputError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="VFlash-FM: run the stages, see what is done, draw tables and figures.",
)
ProfileOption = Annotated[str, typer.Option(help="size of everything: a file in data/profiles")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="override a setting, as in training.steps=300")
]
AblationOption = Annotated[bool, typer.Option(help="also train every arm at every budget")]
AllOption = Annotated[bool, typer.Option("--all", help="decode clips_per_suite_all clips")]
StaleOption = Annotated[bool, typer.Option(help="reuse results whose code or inputs have changed")]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON line last")]


def _say(value: Any, as_json: bool) -> None:
    if as_json:
        print(json.dumps(value, ensure_ascii=False, default=str), flush=True)


def _print_table(rows: list[dict[Any, Any]], columns: Sequence[str]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(row.get(column, ""))) for column in columns))
    wide = None if sys.stdout.isatty() else 200  # a pipe or a log has no width to wrap at
    Console(width=wide).print(table)


def _overrides(texts: list[str] | None) -> dict[str, Any]:
    return dict(strict.parse_override(text) for text in texts or [])


@app.command()
def run(
    profile: ProfileOption = "pocket",
    set_: SetOption = None,
    ablation: AblationOption = False,
    all_clips: AllOption = False,
    only: Annotated[list[str] | None, typer.Option(help="a stage or a shard's name")] = None,
    keep_stale: StaleOption = False,
    retry_failed: Annotated[
        bool, typer.Option(help="try clips again that finished shards have no result for")
    ] = False,
    timeout_s: Annotated[
        int | None, typer.Option(help="wall limit of one notebook cell; none without", min=1)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run what is not done yet, in order; a second run does nothing."""
    started = time.monotonic()
    shards = stages.plan(profile, _overrides(set_), ablation, all_clips, keep_stale)
    if retry_failed:
        runner.reopen_lacking(shards)
    limits = runner.Limits(timeout_s=timeout_s)
    try:
        outcomes = runner.run_plan(shards, profile, only or (), limits, keep_stale)
    except KeyboardInterrupt:
        print("interrupted: run the same command to go on from here", file=sys.stderr)
        raise typer.Exit(130) from None
    seconds = time.monotonic() - started
    for line in runner.summary_lines(outcomes, seconds):
        print(line)
    summary = runner.summary_json(outcomes, seconds)
    _say(summary, as_json)
    raise typer.Exit(0 if summary["ok"] else 1)


@app.command()
def plan(
    profile: ProfileOption = "pocket",
    set_: SetOption = None,
    ablation: AblationOption = False,
    all_clips: AllOption = False,
    keep_stale: StaleOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show every shard of a run: its notebook, folder and what it needs."""
    shards = stages.plan(profile, _overrides(set_), ablation, all_clips, keep_stale)
    rows = [shard.as_json() for shard in shards]
    if not as_json:
        for row in rows:
            row["state"] = ("stale" if row["stale"] else "done") if row["done"] else "to do"
        _print_table(rows, ["name", "state", "run_id", "folder"])
    _say({"profile": profile, "shards": rows}, as_json)


@app.command()
def status(
    profile: ProfileOption = "pocket",
    set_: SetOption = None,
    ablation: AblationOption = False,
    all_clips: AllOption = False,
    as_json: JsonOption = False,
) -> None:
    """Say what is done, and why each other shard does not count as done."""
    shards = stages.plan(profile, _overrides(set_), ablation, all_clips)
    rows = [{"shard": s.name, "why": s.why_not_done() or ""} for s in shards]
    waiting = [row for row in rows if row["why"]]
    print(f"{profile}: {len(rows) - len(waiting)} of {len(rows)} shards done")
    if waiting:
        _print_table(waiting, ["shard", "why"])
    _say({"done": len(rows) - len(waiting), "planned": len(rows), "waiting": waiting}, as_json)
    raise typer.Exit(1 if waiting else 0)


@app.command()
def doctor(profile: ProfileOption = "pocket", as_json: JsonOption = False) -> None:
    """Show what this machine has and what the profile wants."""
    from vflash_analysis.environment import environment_table

    table = environment_table(config.load_profile(profile))
    rows = table.to_dict("records")
    for row in rows:
        there = "absent" if row["found"] == "missing" else "ok"
        row["state"] = there if row["ok"] else "MISSING"
    _print_table(rows, ["item", "found", "wanted", "state", "note"])
    _say({"ok": bool(table["ok"].all()), "items": rows}, as_json)
    raise typer.Exit(0 if table["ok"].all() else 1)


@app.command()
def clips(
    profile: ProfileOption = "pocket",
    set_: SetOption = None,
    paths_: Annotated[
        list[Path] | None, typer.Argument(help="video files; the profile's clips when none")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Read the very frames a run would use and list the clips that cannot be used."""
    from vflash_analysis.clips import prepare
    from vflash_analysis.clips.read import check_clips

    overrides = _overrides(set_)
    settings = config.load_profile(profile, overrides).clips
    if paths_:
        with prepare.open_reader(settings) as reader:
            rows: list[dict[Any, Any]] = [*check_clips(paths_, settings.num_frames, reader)]
    else:
        shard = next(s for s in stages.plan(profile, overrides) if s.stage == "clips")
        if not shard.done:
            raise InputError(
                f"clips: no lists yet; vflash run --profile {profile} --only clips makes them"
            )
        rows = prepare.check_lists(settings, shard.folder).to_dict("records")
    unusual = [row for row in rows if row["status"] != "ok"]
    bad = [row for row in unusual if row["status"] == "bad"]
    print(f"{len(rows)} clips read: {len(bad)} bad, {len(unusual) - len(bad)} flagged")
    if unusual:
        _print_table(unusual, ["path", "status", "reason", "message"])
    _say({"read": len(rows), "bad": len(bad), "clips": unusual}, as_json)
    raise typer.Exit(1 if bad else 0)


def _records(
    profile: str | None,
    overrides: dict[str, Any],
    ablation: bool = False,
    all_clips: bool = False,
    keep_stale: bool = False,
) -> Any:
    """Records of the finished shards of a plan; the tracked ones without a profile."""
    from vflash_analysis.publish import records_of
    from vflash_analysis.results.sources import load_records

    if profile is None:
        if overrides or ablation or all_clips or keep_stale:
            raise InputError(
                "--set, --ablation, --all, --keep-stale: allowed with --profile only; the tracked "
                "records are drawn as they are"
            )
        return load_records()
    return records_of(stages.plan(profile, overrides, ablation, all_clips, keep_stale))


def _name_lacking(found: Any) -> int:
    """Say which shards of a run its records lack; returns the exit code, 0 where none is."""
    from vflash_analysis.results.sources import some_names

    if not found.lacking:
        return 0
    names = some_names(found.lacking)
    print(f"not in it, as not done: {names}; vflash status says why", file=sys.stderr)
    return 1


RecordsOption = Annotated[
    str | None, typer.Option("--profile", help="a run's records; the tracked pocket ones without")
]


@app.command()
def figures(
    profile: RecordsOption = None,
    set_: SetOption = None,
    ablation: AblationOption = False,
    all_clips: AllOption = False,
    keep_stale: StaleOption = False,
    publish: Annotated[bool, typer.Option(help="also replace the tracked pocket records")] = False,
    as_json: JsonOption = False,
) -> None:
    """Draw every table and figure: tracked records into figures/pocket, a run's into figures/latest.

    A run's records are those of the finished shards that `vflash run` with the same options plans.
    """
    from vflash_analysis.publish import publish as publish_run
    from vflash_analysis.results.report import build_results

    overrides = _overrides(set_)
    if publish and (profile != config.TRACKED_PROFILE or overrides or keep_stale):
        raise InputError("--publish: allowed with --profile pocket, without --set and --keep-stale")
    samples = config.load_profile(profile or config.TRACKED_PROFILE, overrides).bootstrap_samples
    code = 0
    if publish:
        shards = stages.plan(config.TRACKED_PROFILE, all_clips=all_clips)
        planned = {shard.name for shard in shards}
        whole = stages.plan(config.TRACKED_PROFILE, ablation=True, all_clips=all_clips)
        written = publish_run(shards, [s for s in whole if s.name not in planned], samples)
    else:
        found = _records(profile, overrides, ablation, all_clips, keep_stale)
        written = build_results(found, n_samples=samples)
        code = _name_lacking(found)
    names = [paths.relative_to_root(path) for path in written]
    folders = sorted({name.rpartition("/")[0] or "." for name in names})
    print(f"{len(names)} files in {', '.join(folders)}")
    _say({"files": names}, as_json)
    raise typer.Exit(code)


@app.command()
def report(
    profile: RecordsOption = None,
    set_: SetOption = None,
    ablation: AblationOption = False,
    all_clips: AllOption = False,
    keep_stale: StaleOption = False,
    table: Annotated[str, typer.Option(help="a table's stem")] = "T9_beside_paper",
    as_json: JsonOption = False,
) -> None:
    """Print a table: ours beside the published numbers unless another is named."""
    from vflash_analysis.results.report import make_table
    from vflash_analysis.stats import Bootstrap

    overrides = _overrides(set_)
    samples = config.load_profile(profile or config.TRACKED_PROFILE, overrides).bootstrap_samples
    found = _records(profile, overrides, ablation, all_clips, keep_stale)
    made = make_table(table, found, Bootstrap(n_samples=samples))
    Console().print(Text(made.title, style="bold"), Text(made.caption), sep="\n")
    for section in made.sections:
        Console().print("", Text(section.title, style="bold"), sep="\n")
        _print_table(
            [dict(zip(section.header, row, strict=True)) for row in section.body], section.header
        )
    _say({"table": made.stem, "rows": json.loads(made.frame.to_json(orient="records"))}, as_json)
    raise typer.Exit(_name_lacking(found))


@app.command()
def demo(
    profile: RecordsOption = None,
    set_: SetOption = None,
    all_clips: AllOption = False,
    keep_stale: StaleOption = False,
    clip: Annotated[str | None, typer.Option(help="a clip_id; the longest text without")] = None,
    slower: Annotated[float, typer.Option(help="times slower than recorded", min=0.1)] = 4.0,
    as_json: JsonOption = False,
) -> None:
    """Play one recorded clip side by side: autoregressive decoding and Tree-60."""
    from vflash_analysis import demo as player

    found = _records(profile, _overrides(set_), all_clips=all_clips, keep_stale=keep_stale)
    shown = player.pick(found, clip, ("ar", "tree60"))
    player.play(shown, slower, Console())
    speedup = shown[0].decode_s / shown[1].decode_s
    same = shown[0].text == shown[1].text
    print(f"{shown[0].clip_id} alone: same text: {same}; decode time ratio {speedup:.2f}")
    _say({one.method: {"decode_s": one.decode_s, "text": one.text} for one in shown}, as_json)


def main() -> None:
    """Run the command line; bad input is one line and exit code 2."""
    try:
        app()
    except InputError as error:
        print(f"vflash: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except OSError as error:  # a folder that is not there, is full or must not be written
        print(f"vflash: {error.filename or 'files'}: {error.strerror or error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
