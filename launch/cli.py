"""The `rondo` command: parse, resolve, import what the verb needs, run.

Owns the verbs, their options and the exit codes: 0 done, 1 failed, 2 wrong usage or settings (nothing was started),
75 stopped and can be resumed. Whatever a user got wrong is told in one line a mistake on stderr, without a traceback.

    rondo train examples/quickstart.py --set train.lr=1e-5 --kill actor@5
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from rondo.launch.check.target import Target
    from rondo.runtime.supervision.nursery import Nursery

EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130

_KILL_AT_STEP = 1
_GIB = 1 << 30


class _Parser(argparse.ArgumentParser):
    """Errors in one line, with the way to more."""

    def error(self, message: str) -> NoReturn:
        print(f"{message}. Run `{self.prog} --help`", file=sys.stderr)
        raise SystemExit(EXIT_USAGE)


class _Version(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *ignored: object) -> NoReturn:
        from importlib.metadata import version

        print(f"rondo {version('rondo-rl')}")
        parser.exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser, verbs = _parser()
    if arguments and not arguments[0].startswith("-") and arguments[0] not in verbs:
        print(
            f"VERB must be one of {', '.join(verbs)}, got {arguments[0]!r}. {_similar(arguments[0], verbs)}",
            file=sys.stderr,
        )
        return EXIT_USAGE
    options = parser.parse_args(arguments)
    from rondo.runtime.errors import ConfigError, RondoError

    try:
        code: int = options.verb(options)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    except RondoError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has left, as `head` does
        code = EXIT_FAILED
    _finish_stdout()
    return code


def _finish_stdout() -> None:
    """What is left goes out now: where it cannot, Python would complain at the end, with an exit code of its own."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def train(options: argparse.Namespace) -> int:
    from rondo.launch.config import load

    config = load(options.config, options.set)
    kill = tuple(_kill(text, config.num_steps) for text in options.kill)
    roles = {role for group in config.groups for role in group.roles} | {group.name for group in config.groups}
    _known_roles(kill, roles | ({"partitions"} if config.bus.partitions else set()))
    with _nursery() as nursery:
        from rondo.launch.train import TrainOptions, resume_or_start
        from rondo.launch.train import main as start

        run = resume_or_start if options.resume_or_start else start
        return run(config, TrainOptions(options.config, kill, options.plain), nursery)


@contextmanager
def _nursery() -> Iterator[Nursery]:
    """What every run loads for seconds begins to load, beside what this process loads."""
    from rondo.runtime.supervision.nursery import Nursery

    with tempfile.NamedTemporaryFile(prefix="rondo-nursery-") as log, Nursery() as nursery:
        nursery.belong(lambda _: (Path(log.name), os.environ))
        nursery.open()
        yield nursery


def sft(options: argparse.Namespace) -> int:
    from rondo.launch.config import load
    from rondo.runtime.errors import ConfigError

    config = load(options.config, options.set)
    if config.sft is None:
        raise ConfigError(f"sft must be set for `rondo sft`, got nothing. Add sft=SftConfig(...) to {options.config}")
    with _nursery() as nursery:
        from rondo.launch.train import TrainOptions, fine_tune

        return fine_tune(config, TrainOptions(options.config, (), options.plain), nursery)


def check(options: argparse.Namespace) -> int:
    target = _target(options)
    from rondo.launch.check.check import inspect, memory_order
    from rondo.launch.check.findings import print_findings
    from rondo.launch.code import FOLDER, take
    from rondo.launch.config import load

    config = load(options.config, options.set)
    with tempfile.TemporaryDirectory(prefix="rondo-code-") as folder:
        findings = inspect(take(config, options.config, Path(folder) / FOLDER), target)
    if target is None:
        findings.append(memory_order())
    print_findings(findings)
    return EXIT_USAGE if any(finding.level == "error" for finding in findings) else EXIT_DONE


def show(options: argparse.Namespace) -> int:
    import json

    from rondo.launch.config import changed, load, resolve

    config = load(options.config, options.set)
    if options.changed:
        for path, value in changed(config):
            print(f"{path} = {value!r}")
    else:
        print(json.dumps(resolve(config), indent=2))
    return EXIT_DONE


def status(options: argparse.Namespace) -> int:
    from rondo.launch.report.status import show_status

    return show_status(options.run, as_json=options.json)


def stop(options: argparse.Namespace) -> int:
    from rondo.launch.report.status import ask_to_stop

    return ask_to_stop(options.run, reason=options.reason, now=options.now, wait=not options.no_wait)


def resume(options: argparse.Namespace) -> int:
    from rondo.launch.rundir import existing_run

    run = existing_run(options.run)
    from rondo.launch.train import resume as go_on

    return go_on(run, options.set, accept_changes=options.accept_changes)


def diff(options: argparse.Namespace) -> int:
    from rondo.launch.report.diff import show_diff
    from rondo.launch.rundir import existing_run

    return show_diff(existing_run(options.first), existing_run(options.second), ids_only=options.ids)


def timeline(options: argparse.Namespace) -> int:
    from rondo.launch.report.timeline import export

    return export(options.run, options.out, options.steps)


def explain(options: argparse.Namespace) -> int:
    from rondo.launch.report.explain import show

    return show(options.run, options.steps, as_json=options.json)


def serve(options: argparse.Namespace) -> int:
    from rondo.launch.serve import ServeOptions
    from rondo.launch.serve import main as run

    names = ("model", "host", "port", "dtype", "device", "num_slots", "max_length", "token_file", "served_model_name")
    return run(ServeOptions(**{name: getattr(options, name) for name in names}))


def bus(options: argparse.Namespace) -> int:
    import asyncio

    import uvloop

    from rondo.comm.partitions.host import serve_until_told

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_until_told(options.folder))
    return EXIT_DONE


def bench(options: argparse.Namespace) -> int:
    from rondo.launch.bench import run

    return run(options.name, options.rest)


def sglang(options: argparse.Namespace) -> int:
    from rondo.launch.sglang_env import install

    return install(options.path, cpu=options.cpu)


def _parser() -> tuple[argparse.ArgumentParser, list[str]]:
    """The parser, and the names of the verbs."""
    parser = _Parser(prog="rondo", description="Asynchronous reinforcement learning for language models.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)

    def verb(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=text, description=text)
        made.set_defaults(verb=run)
        return made

    for name, run, text in (
        ("train", train, "Train with reinforcement learning."),
        ("sft", sft, "Fine-tune on demonstrations only."),
        ("check", check, "Look for what would go wrong; starts nothing."),
        ("show", show, "Print the settings with all defaults filled in."),
    ):
        made = verb(name, run, text)
        made.add_argument("config", metavar="CONFIG.py", type=Path, help="a module that defines `config`")
        made.add_argument(
            "--set", action="append", default=[], metavar="PATH=VALUE", help="change a setting: --set train.lr=1e-6"
        )
        if name == "check":
            _add_target(made)
        if name in ("train", "sft"):
            made.add_argument("--plain", action="store_true", help="plain lines instead of the live view")
        if name == "train":
            made.add_argument(
                "--resume-or-start",
                action="store_true",
                help="go on with the newest run of that name from its checkpoint, where there is one",
            )
            made.add_argument(
                "--kill",
                action="append",
                default=[],
                metavar="ROLE[@STEP]",
                help=f"SIGKILL a role once, when that step is committed (default {_KILL_AT_STEP}): see it recover",
            )
        if name == "show":
            made.add_argument("--changed", action="store_true", help="only what differs from the defaults")
    for name, run, text in (
        ("status", status, "Show how a run is doing, or how it ended."),
        ("stop", stop, "Ask a run to save and end; `resume` goes on."),
        ("resume", resume, "Go on with a run from its newest checkpoint."),
        ("explain", explain, "Say which role limits a run, who waits for whom, and what to change."),
        ("timeline", timeline, "Write what every process did when as a Chrome trace."),
    ):
        made = verb(name, run, text)
        made.add_argument(
            "run", metavar="RUN", type=Path, nargs="?", default=Path("runs/latest"), help="default: runs/latest"
        )
        if name in ("explain", "timeline"):
            made.add_argument("--steps", metavar="A:B", help="steps A to B - 1 only")
        if name == "timeline":
            made.add_argument("--out", metavar="TRACE.json", type=Path, help="default: trace.json in the run directory")
        if name in ("status", "explain"):
            made.add_argument("--json", action="store_true", help="one JSON object")
        if name == "resume":
            made.add_argument(
                "--set", action="append", default=[], metavar="PATH=VALUE",
                help="place roles otherwise than before: --set groups.1.processes=2",
            )  # fmt: skip
            made.add_argument(
                "--accept-changes", action="store_true",
                help="go on with data, packages or code that are not those the run began with",
            )  # fmt: skip
        if name == "stop":
            made.add_argument("--reason", default="rondo stop", help="for the logs")
            made.add_argument("--now", action="store_true", help="end at once, without saving")
            made.add_argument("--no-wait", action="store_true", help="return before the run has ended")
    made = verb("diff", diff, "Tell where two deterministic runs part.")
    made.add_argument("first", metavar="RUN_A", type=Path)
    made.add_argument("second", metavar="RUN_B", type=Path)
    made.add_argument("--ids", action="store_true", help="compare which samples were trained, and their order, alone")
    _add_serving(verb("serve", serve, "Serve a model over HTTP, in SGLang's dialect and OpenAI's."))
    made = verb("bus", bus, "Serve a bus of its own to programs on this node, which join by its folder.")
    made.add_argument("folder", metavar="FOLDER", type=Path, help="made where it is not there; a short path")
    made = verb("bench", bench, "Measure this machine; `rondo bench` lists what with.")
    made.add_argument("name", metavar="NAME", nargs="?", help="a module of benchmarks/")
    made.add_argument("rest", metavar="...", nargs=argparse.REMAINDER, help="options of that benchmark")
    made = verb("sglang", sglang, "Build an environment for SGLang's servers.")
    made.add_argument("action", choices=("install",), help="the environment is built, unless it is there")
    made.add_argument("path", metavar="PATH", type=Path, help="a folder for it")
    made.add_argument("--cpu", action="store_true", help="for a machine without a GPU")
    return parser, list(verbs.choices)


def _add_serving(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face folder or name, or a run with a checkpoint")
    for name, kind, default, text in (
        ("--host", str, "127.0.0.1", "address; any but loopback needs --token-file"),
        ("--port", int, 30000, "0 takes a free one"),
        ("--dtype", str, None, "float32 or bfloat16; default: float32 on the CPU, else bfloat16"),
        ("--device", str, None, "such as cpu or cuda:0; default: the first accelerator, else the CPU"),
        ("--num-slots", int, 32, "sequences that are decoded at once"),
        (
            "--max-length",
            int,
            None,
            "tokens of prompt and answer together; default: the model's positions, at most 8192",
        ),
        ("--token-file", Path, None, "a file (mode 0600) with the bearer token; default: one of its own"),
        ("--served-model-name", str, None, "the model's name in answers; default: MODEL"),
    ):
        shown = "" if default is None else f" (default {default})"
        parser.add_argument(name, type=kind, default=default, metavar=name[2:].upper(), help=text + shown)


def _add_target(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("other machines than this one", "what a run would take there, by estimate")
    for name, metavar, text in (
        ("--nodes", "N", "equal machines (default 1)"),
        ("--devices", "D", "accelerators of each, 0 for none"),
        ("--device-gib", "GIB", "memory of an accelerator"),
        ("--memory-gib", "GIB", "memory of a machine"),
    ):
        kind = float if metavar == "GIB" else int
        group.add_argument(name, type=kind, metavar=metavar, help=text)


def _target(options: argparse.Namespace) -> Target | None:
    """The machines that the options describe; None without any of them. ConfigError for half a description."""
    given = {name: getattr(options, name) for name in ("nodes", "devices", "device_gib", "memory_gib")}
    if all(value is None for value in given.values()):
        return None
    from rondo.launch.check.target import Target
    from rondo.runtime.errors import ConfigError

    needed = ["devices", "memory_gib"] + ["device_gib"] * bool(options.devices)
    missing = ["--" + name.replace("_", "-") for name in needed if given[name] is None]
    if missing:
        raise ConfigError(f"a check for other machines must be told their {', '.join(missing)}, got none. Add it")
    num_nodes = 1 if options.nodes is None else options.nodes
    sizes = [size for size in (options.memory_gib, options.device_gib) if size is not None]
    if num_nodes < 1 or options.devices < 0 or min(sizes) <= 0:
        raise ConfigError(
            "--nodes and memory must be greater than 0 and --devices at least 0, got "
            + ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in given.items() if value is not None)
            + ". Correct them"
        )
    return Target(num_nodes, options.devices, int((options.device_gib or 0) * _GIB), int(options.memory_gib * _GIB))


def _similar(word: str, known: Sequence[str]) -> str:
    import difflib

    matches = difflib.get_close_matches(word, known, n=1)
    return f"Did you mean {matches[0]!r}?" if matches else "Run `rondo --help`"


def _kill(text: str, num_steps: int) -> tuple[str, int]:
    from rondo.runtime.errors import ConfigError

    role, at, step = text.partition("@")
    if not role or (at and not step.isdigit()) or not int(step or _KILL_AT_STEP) <= num_steps:
        raise ConfigError(
            f"--kill must look like ROLE or ROLE@STEP with STEP up to {num_steps}, got {text!r}. Try actor@1"
        )
    return role, int(step or _KILL_AT_STEP)


def _known_roles(kill: Sequence[tuple[str, int]], roles: set[str]) -> None:
    from rondo.runtime.errors import ConfigError
    from rondo.runtime.section import nearest

    known = sorted(roles | {"coordinator", "store"})
    for role, _ in kill:
        if role not in known:
            raise ConfigError(f"--kill must name a role of this run, got {role!r}. {nearest(role, known)}")


if __name__ == "__main__":
    sys.exit(main())
