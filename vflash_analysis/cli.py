"""The `vflash` command: run, plan, status, figures, clips, doctor, demo, report.

    vflash run --profile pocket --set training.steps=300

Every command takes `--json`, which prints one JSON line last. Exit codes: 0 all is there, 1
something is missing or failed, 2 bad input.
"""

import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vflash_analysis import config, estimate, paths, records, runner, stages, strict, summary
from vflash_analysis.errors import InputError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="VFlash-FM: run the stages, see what is done, draw tables and figures.",
)
clips_app = typer.Typer(
    no_args_is_help=True,
    help="Check clips, freeze the suites' lists, or rehearse without the suites.",
)
app.add_typer(clips_app, name="clips")
ProfileOption = Annotated[str, typer.Option(help="size of everything: a file in data/profiles")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="override a setting, as in training.steps=300")
]
AblationOption = Annotated[bool, typer.Option(help="also train every arm at every budget")]
AllOption = Annotated[
    bool, typer.Option("--all", help="decode clips_per_suite_all clips, and measure the studies")
]
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
    waiting = [shard for shard in runner.select(shards, only or ()) if not shard.done]
    if any(shard.stage == "clips" for shard in waiting):
        _refuse_without_data(config.load_profile(profile, _overrides(set_)), waiting)
    limits = runner.Limits(timeout_s=timeout_s)
    try:
        outcomes = runner.run_plan(shards, profile, only or (), limits, keep_stale)
    except KeyboardInterrupt:
        print("interrupted: run the same command to go on from here", file=sys.stderr)
        raise typer.Exit(130) from None
    seconds = time.monotonic() - started
    for line in summary.summary_lines(outcomes, seconds):
        print(line)
    told = summary.summary_json(outcomes, seconds)
    _say(told, as_json)
    raise typer.Exit(0 if told["ok"] else 1)


def _refuse_without_data(settings: config.Profile, waiting: list[stages.Shard]) -> None:
    """Name all that is not there before anything long begins, a line each."""
    from vflash_analysis.clips import inventory

    lacking = inventory.refusals(settings.clips)
    if not lacking:
        return  # a missing file of another stage is the runner's to name
    pointer = f"`vflash doctor --data --profile {settings.name}` shows how to get the data"
    for line in [*stages.missing_inputs(waiting), *lacking, pointer]:
        print(f"vflash: {line}", file=sys.stderr)
    raise typer.Exit(2)


@app.command()
def plan(
    profile: ProfileOption = "pocket",
    set_: SetOption = None,
    ablation: AblationOption = False,
    all_clips: AllOption = False,
    keep_stale: StaleOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show every shard of a run, and what the run takes: hours, disk and device memory."""
    shards = stages.plan(profile, _overrides(set_), ablation, all_clips, keep_stale)
    rows = [shard.as_json() for shard in shards]
    if not as_json:
        for row in rows:
            row["state"] = ("stale" if row["stale"] else "done") if row["done"] else "to do"
        _print_table(rows, ["name", "state", "run_id", "folder"])
    settings = config.load_profile(profile, _overrides(set_))
    told = estimate.describe(settings, ablation, all_clips)
    if told and not as_json:
        print()
        shown = [row | {"disk": estimate.size(row["disk_bytes"])} for row in told["stages"]]
        hours = ["gpu_hours"] if shown[0]["gpu_hours"] is not None else []
        _print_table(shown, ["stage", "shards", *hours, "disk"])
        for line in told["notes"]:
            print(line)
    _say({"profile": profile, "shards": rows, "estimate": told}, as_json)


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
def doctor(
    profile: ProfileOption = "pocket",
    set_: SetOption = None,
    data: Annotated[
        bool, typer.Option(help="the suites' and the training corpus's data instead")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what this machine has, what the profile wants, and what its target is and needs."""
    settings = config.load_profile(profile, _overrides(set_))
    if data:
        _doctor_data(settings, as_json)
    from vflash_analysis.environment import environment_table

    try:
        needed = estimate.disk_bytes(settings, stages.plan(profile, _overrides(set_)))
    except InputError:  # told by the rows of what cannot be read
        needed = None
    rows: list[dict[Any, Any]] = [*environment_table(settings, needed).to_dict("records")]
    rows += runner.ask_preflight(profile, _overrides(set_))
    for row in rows:
        there = "absent" if row["found"] == "missing" else "ok"
        there = "differs" if row["note"].startswith("differs") else there
        row["state"] = there if row["ok"] else "MISSING"
    _print_table(rows, ["item", "found", "wanted", "state", "note"])
    ok = all(row["ok"] for row in rows)
    _say({"ok": ok, "items": rows}, as_json)
    raise typer.Exit(0 if ok else 1)


def _doctor_data(settings: config.Profile, as_json: bool) -> NoReturn:
    """Show what data is there, why what is not, and the commands that bring it."""
    from vflash_analysis.clips import inventory

    if settings.clips.source != "suites":
        print(f"{settings.name} makes its own clips; --profile h100 needs data")
        _say({"ok": True, "items": []}, as_json)
        raise typer.Exit(0)
    root = config.local_paths().get("data")
    holdings = inventory.take_stock(settings.clips, root)
    rows = [inventory.as_row(holding, root) for holding in holdings]
    shown = [inventory.shown(*pair) for pair in zip(holdings, rows, strict=True)]
    columns = ["name", "state", "videos", "drawn", "hub_id", "revision", "GB", "gated", "licence"]
    _print_table(shown, columns)
    for line in dict.fromkeys(one for row in rows for one in [*row["faults"], *row["gaps"]]):
        print(line)
    print(inventory.disk_line(holdings, root))
    wanted = [line for row in rows for line in row["commands"]]
    if wanted and root is None:
        wanted.insert(0, "export VFLASH_DATA=/path/to/videos")
    if wanted:
        print("", *wanted, sep="\n")
    ok = all(holding.complete for holding in holdings)
    _say({"ok": ok, "free_gb": round(inventory.free_gb(root), 1), "items": rows}, as_json)
    raise typer.Exit(0 if ok else 1)


@clips_app.command()
def check(
    profile: ProfileOption = "pocket",
    set_: SetOption = None,
    paths_: Annotated[
        list[Path] | None, typer.Argument(help="video files; the profile's clips when none")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Read the very frames a run would use and report every clip; resumes."""
    from vflash_analysis.clips import checking, prepare

    overrides = _overrides(set_)
    settings = config.load_profile(profile, overrides).clips
    settings = dataclasses.replace(settings, on_bad_clip="skip")  # all are looked at
    if paths_:
        store = checking.CheckStore(paths.RUNS / ".checked_files.jsonl")
        given = checking.given_files(paths_)
        checked = checking.check_clip_files(given, settings, store, sys.stderr)
        report = paths.RUNS / "checked_files.csv"
    else:
        shard = next(s for s in stages.plan(profile, overrides) if s.stage == "clips")
        if not shard.done:
            raise InputError(
                f"clips: no lists yet; vflash run --profile {profile} --only clips makes them"
            )
        checked = prepare.check_lists(settings, shard.folder, stream=sys.stderr)
        report = paths.RUNS / profile / "checked_clips.csv"
    records.write_text_atomic(report, checked.to_csv(index=False, lineterminator="\n"))
    unusual = checked[checked["status"] != "ok"].to_dict("records")
    n_bad = sum(row["status"] == "bad" for row in unusual)
    if unusual:
        _print_table(unusual, ["path", "status", "reason", "message"])
    print(f"{checking.summary(checked)}; all columns in {paths.relative_to_root(report)}")
    told = {"read": len(checked), "bad": n_bad, "clips": unusual, "report": str(report)}
    _say(told, as_json)
    raise typer.Exit(1 if n_bad else 0)


@clips_app.command()
def freeze(
    profile: ProfileOption = "h100",
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write which videos each suite and sample seed stand for, with hashes; runs replay that."""
    from vflash_analysis.clips import frozen

    settings = config.load_profile(profile, _overrides(set_)).clips
    root = config.data_folder() if settings.source == "suites" else Path()
    rows = frozen.freeze(settings, root, sys.stderr).to_dict("records")
    _print_table(rows, ["list", "clips", "bytes", "state"])
    _say({"lists": rows}, as_json)


@clips_app.command()
def rehearse(
    folder: Annotated[Path, typer.Argument(help="a new or empty folder")],
    as_json: JsonOption = False,
) -> None:
    """Write generated clips as the five suites are laid out, and print the run that reads them."""
    from vflash_analysis.clips import layouts, suites

    if not strict.fits_a_path(str(folder)):
        raise InputError(f"folder: found {strict.shown(str(folder))}, allowed: a path in UTF-8")
    folder = folder.expanduser().resolve()
    described = suites.load_suites(paths.DATA / "suites")
    made = layouts.write_layouts(folder, config.load_profile("smoke").clips, described)
    words = [sys.argv[0], "run", "--profile", "smoke"]
    for setting in (
        "source=suites",
        "training_list=training.jsonl",
        f"benchmarks=[{', '.join(made)}]",
        "target_evaluation_clips=0",
    ):
        words += ["--set", f"clips.{setting}"]
    print(f"{sum(map(len, made.values()))} clips of {len(made)} suites; now run")
    print(f"VFLASH_DATA={shlex.quote(str(folder))} {shlex.join(words)}")
    _say({"folder": str(folder), "clips": {k: len(v) for k, v in made.items()}}, as_json)


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
    from vflash_analysis import publish as publishing
    from vflash_analysis.results.report import build_results

    overrides = _overrides(set_)
    if publish and (profile != config.TRACKED_PROFILE or overrides or keep_stale):
        raise InputError("--publish: allowed with --profile pocket, without --set and --keep-stale")
    samples = config.load_profile(profile or config.TRACKED_PROFILE, overrides).bootstrap_samples
    code = 0
    if publish:
        written = publishing.publish_planned(all_clips, samples)
    else:
        found = publishing.chosen_records(profile, overrides, ablation, all_clips, keep_stale)
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
    table: Annotated[
        str | None, typer.Option(help="print this table, as T1_speedup, instead")
    ] = None,
    section: Annotated[
        str | None,
        typer.Option(help="with --table: the section of this title, or the one that begins so"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="the page's file")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write one HTML page of a run, or of the tracked records; or print a table."""
    from vflash_analysis.publish import chosen_records
    from vflash_analysis.results.report import make_table
    from vflash_analysis.stats import Bootstrap

    if section and not table:
        raise InputError("--section: allowed with --table only")
    if out and table:
        raise InputError("--out: allowed without --table only; a table is printed")

    overrides = _overrides(set_)
    samples = config.load_profile(profile or config.TRACKED_PROFILE, overrides).bootstrap_samples
    found = chosen_records(profile, overrides, ablation, all_clips, keep_stale)
    boot = Bootstrap(n_samples=samples)
    if table is None:
        options = (profile, overrides, ablation, all_clips, keep_stale)
        path = _write_page(found, boot, options, out)
        print(paths.relative_to_root(path))
        _say({"page": str(path)}, as_json)
        raise typer.Exit(_name_lacking(found))
    made = make_table(table, found, boot)
    shown = _chosen_sections(made.sections, section) if section else made.sections
    Console().print(Text(made.title, style="bold"), Text(made.caption), sep="\n")
    for one in shown:
        Console().print("", Text(one.title, style="bold"), sep="\n")
        _print_grid(one)
    _say({"table": made.stem, "rows": json.loads(made.frame.to_json(orient="records"))}, as_json)
    raise typer.Exit(_name_lacking(found))


def _chosen_sections(sections: Sequence[Any], title: str) -> list[Any]:
    """The sections of this title, else those of the one title that begins so."""
    begun = list(dict.fromkeys(one.title for one in sections if one.title.startswith(title)))
    if title not in begun and len(begun) != 1:
        allowed = begun or list(dict.fromkeys(one.title for one in sections))
        raise InputError(
            f"section '{title}': allowed is the title, or its beginning, of one of {allowed}"
        )
    chosen = title if title in begun else begun[0]
    return [one for one in sections if one.title == chosen]


def _write_page(found: Any, boot: Any, options: tuple[Any, ...], out: Path | None) -> Path:
    """Write the HTML page of records; `options` are those that a plan takes, profile first."""
    from vflash_analysis.results.page import report_page
    from vflash_analysis.run_facts import run_facts, tracked_facts

    profile = options[0]
    if profile is None:
        facts, path = tracked_facts(), paths.FIGURES / "latest" / "report.html"
    else:
        facts = run_facts(profile, stages.plan(*options))
        path = paths.RUNS / profile / "report.html"
    path = (out or path).expanduser()
    records.write_text_atomic(path, report_page(found, facts, boot, sys.stderr))
    return path


def _print_grid(section: Any) -> None:
    """A table's section; where it is too wide for the terminal, a line for every value of a row."""
    header, body, n_names = section.header, section.body, section.n_names
    columns = [max(map(len, column)) for column in zip(header, *body, strict=True)]
    width = Console().width if sys.stdout.isatty() else 200  # as in `_print_table`
    if sum(columns) + 2 * len(columns) <= width:
        _print_table([dict(zip(header, row, strict=True)) for row in body], header)
        return
    for row in body:
        Console().print(Text(", ".join(filter(None, row[:n_names])), style="bold"))
        for name, cell in list(zip(header, row, strict=True))[n_names:]:
            Console().print(Text(f"  {name}: {cell}"))


@app.command()
def demo(
    file: Annotated[
        Path | None, typer.Argument(metavar="CLIP", help="decode this video; none: play a record")
    ] = None,
    prompt: Annotated[
        str, typer.Option(help="with CLIP: the question; the target's own without")
    ] = "",
    target: Annotated[
        Path | None, typer.Option(help="with CLIP: folder; the profile's without")
    ] = None,
    drafter: Annotated[
        Path | None, typer.Option(help="with CLIP: folder; the tracked one without")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="with CLIP: gets replay and cycle; figures/latest/demo without"),
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="settings for CLIP (pocket), or whose records are played")
    ] = None,
    set_: SetOption = None,
    all_clips: AllOption = False,
    keep_stale: StaleOption = False,
    clip: Annotated[str | None, typer.Option(help="a clip_id; the longest text without")] = None,
    slower: Annotated[float, typer.Option(help="times slower than recorded", min=0.1)] = 4.0,
    as_json: JsonOption = False,
) -> None:
    """Decode CLIP plainly, as a chain and with Tree-60; or play a recorded clip side by side.

    The pocket target, taken without --target, knows only generated shapes: on a real film its text
    is nonsense and the speed-up can be below 1.
    """
    from vflash_analysis import demo as player
    from vflash_analysis.publish import chosen_records
    from vflash_analysis.results.playback import ONE_TOKEN, pick

    overrides = _overrides(set_)
    if file is not None:
        if clip is not None or all_clips or keep_stale:
            raise InputError("--clip, --all, --keep-stale: allowed without CLIP only")
        place = (out or paths.FIGURES / "latest" / "demo").expanduser().resolve()
        given = {
            name: str(path.expanduser().resolve()) if path else ""
            for name, path in (("clip", file), ("target", target), ("drafter", drafter))
        }
        given |= {"prompt": prompt, "out": str(place / "records")}
        told = player.decode_own(
            {**given, "profile": profile or config.TRACKED_PROFILE, "overrides": overrides}
        )
        print(f"prompt: {told['prompt']}")
        known = player.POCKET_ONLY if told["pocket"] else ""
        if known:
            print(known)
        shown, files = player.show_own(
            place / "records", told["clip_id"], told["methods"], place, known
        )
    else:
        if prompt or target or drafter or out:
            raise InputError("--prompt, --target, --drafter, --out: allowed with CLIP only")
        found = chosen_records(profile, overrides, all_clips=all_clips, keep_stale=keep_stale)
        shown, files = pick(found, clip, ("ar", "tree60")), []
    player.play(shown, slower, Console())
    playable = all(len(one.token_ids) > 1 for one in shown)
    if not playable:
        print(ONE_TOKEN)
    elif file is not None:
        print(player.ONE_DECODE_EACH)
    for one in shown[1:] if playable else ():
        same = one.token_ids == shown[0].token_ids
        ratio = shown[0].decode_s / one.decode_s
        print(
            f"{one.clip_id} alone, {one.title}: same tokens: {same}; decode time ratio {ratio:.2f}"
        )
    for path in files:
        print(paths.relative_to_root(path))
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
