"""The `rondo` command: parse, resolve, import what the verb needs, run.

Owns the verbs, their options and the exit codes: 0 done, 1 failed, 2 wrong usage, settings or files,
75 stopped and can be resumed. Whatever a user got wrong is told in one line a mistake on stderr, without a traceback.

    rondo train examples/quickstart.py --set train.lr=1e-5 --kill actor@5

A verb is a function that gets the values of its options by their names.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from rondo.launch.check.target import Target
    from rondo.launch.config import RunConfig
    from rondo.runtime.supervision.nursery import Nursery

EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130

_KILL_AT_STEP = 1
_RUNS = frozenset({"demo", "train", "sft", "resume", "eval", "serve", "view", "agents"})
"""Verbs whose work is not what they print."""


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
    from rondo.runtime.records import streams

    streams.guard_streams()
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser, verbs = _parser()
    if arguments and not arguments[0].startswith("-") and arguments[0] not in verbs:
        from rondo.runtime.errors import did_you_mean

        advice = did_you_mean(arguments[0], verbs, "Run `rondo --help`")
        print(f"VERB must be one of {', '.join(verbs)}, got {arguments[0]!r}. {advice}", file=sys.stderr)
        return EXIT_USAGE
    if "_ARGCOMPLETE" in os.environ:
        from rondo.launch.completion import complete

        complete(parser, verbs)
    options = vars(parser.parse_args(arguments))
    from rondo.runtime.errors import ConfigError, RondoError, shortage

    try:
        with _stops_clear_up():
            code: int = options.pop("verb")(**options)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    except RondoError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_FAILED
    except OSError as error:
        if (words := shortage(error)) is None:
            raise
        print(words, file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    sys.stdout.flush()
    cut_off = streams.ERRORS.get("stdout")
    if code == EXIT_DONE and cut_off is not None and arguments[0] not in _RUNS:
        if not isinstance(cut_off, BrokenPipeError):  # the reader has left, as `head` does
            print(f"stdout must take all that is printed, got {cut_off.strerror}. Print it elsewhere", file=sys.stderr)
        return EXIT_FAILED
    return code


@contextmanager
def _stops_clear_up() -> Iterator[None]:
    """A signal that ends this process leaves the body first, as Ctrl-C does, so that nothing of it stays on the disk. A run hears
    these signals itself, from its first process on, and to the end of the body."""
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT)}
    stops = [each for each, handler in before.items() if handler is signal.SIG_DFL]
    heard: list[int] = []

    def leave(number: int, frame: object) -> None:
        heard.append(number)
        if len(heard) == 1:
            raise KeyboardInterrupt

    for each in stops:
        signal.signal(each, leave)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        if heard:
            os.kill(os.getpid(), heard[0])


@contextmanager
def _begun(path: Path, sets: Sequence[str]) -> Iterator[tuple[RunConfig, Nursery]]:
    """The settings, and a nursery in which what every run loads for seconds begins to load before anything else is done."""
    from rondo.runtime.supervision.nursery import Nursery

    with Nursery() as nursery:  # no file has its output, which SIGKILL would leave: the last lines are in memory
        nursery.belong(lambda _: (Path(os.devnull), os.environ))
        nursery.open()
        before = dict(os.environ)
        from rondo.launch.config import load

        config = load(path, sets)
        if os.environ != before:  # what is loaded may ask for what the module sets
            nursery.open()
        yield config, nursery


def train(config: Path, sets: Sequence[str], kill: Sequence[str], *, plain: bool, resume_or_start: bool) -> int:
    with _begun(config, sets) as (settings, nursery):
        kills = tuple(_kill(text, settings) for text in kill)
        from rondo.launch import train

        run = train.resume_or_start if resume_or_start else train.main
        return run(settings, train.TrainOptions(config, kills, plain), nursery)


def demo(sets: Sequence[str], kill: Sequence[str], *, plain: bool) -> int:
    quick_start = Path(__file__).resolve().parents[1] / "examples" / "quickstart.py"
    return train(quick_start, sets, kill, plain=plain, resume_or_start=False)


def sft(config: Path, sets: Sequence[str], *, plain: bool) -> int:
    from rondo.runtime.errors import ConfigError

    with _begun(config, sets) as (settings, nursery):
        if settings.sft is None:
            raise ConfigError(f"sft must be set for `rondo sft`, got nothing. Add sft=SftConfig(...) to {config}")
        from rondo.launch.config import override
        from rondo.launch.train import TrainOptions, main

        alone = override(settings, ["job=sft", "num_steps=None", "evaluation=None", f"name={settings.name}-sft"])
        return main(alone, TrainOptions(config, (), plain), nursery)


def check(config: Path, sets: Sequence[str], *, probes: bool, **machines: Any) -> int:
    if config.is_dir():
        return _check_run(config, sets, probes=probes, **machines)
    target: Target | None = None
    if any(value is not None for value in machines.values()):
        from rondo.launch.check.target import described
        from rondo.runtime.errors import ConfigError

        target = described(**machines)
        if probes:
            raise ConfigError("--probe must be of this machine, got options of other ones. Leave it out, or them")
    from rondo.runtime.processes.janitor import swept_folder

    with _begun(config, sets) as (settings, nursery), swept_folder("rondo-code-") as folder:
        from rondo.launch.check.check import inspect, memory_order
        from rondo.launch.check.findings import Finding, print_findings
        from rondo.launch.code import FOLDER, take

        told: list[Finding] = []

        def tell(errors: list[Finding]) -> None:
            """Print errors as soon as they are found, since the rest of the check takes longer."""
            print_findings(errors)
            sys.stdout.flush()
            told.extend(errors)

        findings = inspect(take(settings, config, folder / FOLDER), target, nursery, probes=probes, tell=tell)
        if target is None:
            findings.append(memory_order())
    print_findings([finding for finding in findings if finding not in told])
    return EXIT_USAGE if any(finding.level == "error" for finding in findings) else EXIT_DONE


def _check_run(path: Path, sets: Sequence[str], **others: Any) -> int:
    from rondo.launch.check.check import inspect_run
    from rondo.launch.check.findings import print_findings
    from rondo.runtime.errors import ConfigError

    if sets or any(others.values()):
        raise ConfigError("--set and other options must be left out with a run, whose files are looked at, got some")
    print_findings(findings := inspect_run(path))
    return EXIT_USAGE if any(finding.level == "error" for finding in findings) else EXIT_DONE


def show(config: Path | None, sets: Sequence[str], *, changed: bool, schema: bool, metrics: bool, grafana: bool) -> int:
    import json

    from rondo.launch import config as settings
    from rondo.runtime.errors import ConfigError

    if metrics:
        print(_in("rondo.launch.metrics.page", "page")(), end="")
        return EXIT_DONE
    if grafana:
        found = _in("rondo.launch.metrics.grafana", "dashboard")()
    elif schema:
        found = _in("rondo.launch.schema", "schema")()
    elif config is None:
        raise ConfigError("CONFIG.py must be named to show its settings, got nothing. Name it, or ask for --schema")
    elif changed:
        for path, value in settings.changed(settings.load(config, sets)):
            print(f"{path} = {value!r}")
        return EXIT_DONE
    else:
        found = settings.resolve(settings.load(config, sets))
    print(json.dumps(found, indent=2))
    return EXIT_DONE


def serve(**options: Any) -> int:
    from rondo.launch.serve import ServeOptions, main

    return main(ServeOptions(**options))


def slurm(**options: Any) -> int:
    from rondo.launch.slurm import SlurmOptions, main

    return main(SlurmOptions(**options))


def _in(module: str, name: str) -> Callable[..., Any]:
    """That function, imported when it is called."""
    return lambda **options: getattr(import_module(module), name)(**options)


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser, and those of the verbs."""
    parser = _Parser(prog="rondo", description="Asynchronous reinforcement learning for language models.")
    parser.add_argument("--version", action=_Version, nargs=0, default=argparse.SUPPRESS, help="print the version")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)

    def verb(name: str, run: Callable[..., int], text: str, *parents: _Parser) -> Callable[..., Any]:
        """Takes its options, one call each."""
        made = verbs.add_parser(name, help=text, description=text, parents=parents)
        made.set_defaults(verb=run)
        return made.add_argument

    config, run, steps, as_json, plain, sets, kill = (_Parser(add_help=False) for _ in range(7))
    config.add_argument("config", metavar="CONFIG.py", type=Path, help="a module that defines `config`")
    for each in (config, sets):
        _add_sets(each.add_argument, "change a setting: --set train.lr=1e-6")
    text = f"SIGKILL a role once, when that step is committed (default {_KILL_AT_STEP}): see it recover"
    kill.add_argument("--kill", action="append", default=[], metavar="ROLE[@STEP]", help=text)
    run.add_argument(
        "path", metavar="RUN", type=Path, nargs="?", default=Path("runs/latest"), help="default: runs/latest"
    )
    steps.add_argument("--steps", metavar="A:B", help="steps A to B - 1 only")
    as_json.add_argument("--json", dest="as_json", action="store_true", help="one JSON object")
    plain.add_argument("--plain", action="store_true", help="plain lines instead of the live view")

    verb("demo", demo, "Train the quick start: two cores, no downloads, two minutes.", sets, kill, plain)
    add = verb("train", train, "Train with reinforcement learning.", config, kill, plain)
    text = "go on with the newest run of that name from its checkpoint, where there is one"
    add("--resume-or-start", action="store_true", help=text)
    add = verb("init", _in("rondo.launch.init", "main"), "Write a config module, from questions or from options.")
    add("file", metavar="FILE.py", type=Path, nargs="?", default=Path("config.py"), help="default: config.py")
    for name, text in (
        ("machine", "laptop, gpu (one), or slurm: a node with eight"),
        ("modality", "text, image, audio or video, which lies in the column of that name"),
        ("model", "a Hugging Face folder or name, a GGUF file, or tiny"),
        ("data", "a .jsonl or .parquet file, hub:NAME/SPLIT, or made: rows that the module makes"),
        ("prompt", "column with the prompt (default prompt)"),
        ("label", "column with the right answer (default label)"),
        ("reward", "own, a function in the module; or one with a name, such as math (docs/rewards.md)"),
        ("algorithm", "such as grpo (docs/algorithms.md)"),
    ):
        add(f"--{name}", metavar=name.upper(), help=text)
    verb("sft", sft, "Fine-tune on demonstrations only.", config, plain)
    add = verb("check", check, "Look for what would go wrong, or is broken in a run; starts nothing.", config)
    text = "try this machine too: disk, shared memory, limits, ports, devices, and the way between processes"
    add("--probe", dest="probes", action="store_true", help=text)
    machines = verbs.choices["check"].add_argument_group("other machines than this one", "what a run would take there")
    machines.add_argument("--nodes", type=int, metavar="N", help="equal machines (default 1)")
    machines.add_argument("--devices", type=int, metavar="D", help="accelerators of each, 0 for none")
    machines.add_argument("--device-gib", type=float, metavar="GIB", help="memory of an accelerator")
    machines.add_argument("--memory-gib", type=float, metavar="GIB", help="memory of a machine")
    add = verb("show", show, "Print the settings with all defaults filled in.", sets)
    add("config", metavar="CONFIG.py", type=Path, nargs="?", help="a module that defines `config`")
    add("--schema", action="store_true", help="all settings there are, as a JSON schema")
    add("--metrics", action="store_true", help="all metrics there are, with units and formulas, as Markdown")
    add("--grafana", action="store_true", help="a dashboard of /metrics, which Grafana imports")
    add("--changed", action="store_true", help="only what differs from the defaults")
    status = "rondo.launch.report.status"
    verb("status", _in(status, "show_status"), "Show how a run is doing, or how it ended.", run, as_json)
    add = verb("stop", _in(status, "ask_to_stop"), "Ask a run to save and end; `resume` goes on.", run)
    add("--reason", default="rondo stop", help="for the logs")
    add("--now", action="store_true", help="end at once, without saving")
    add("--no-wait", action="store_false", dest="wait", help="return before the run has ended")
    elastic = _Parser(add_help=False)
    elastic.add_argument(
        "--run", dest="path", metavar="RUN", type=Path, default=Path("runs/latest"), help="default: runs/latest"
    )
    elastic.add_argument("--reason", default="asked by hand", help="for the logs")
    elastic.add_argument("--dry-run", action="store_true", help="say what it would be, and change nothing")
    elastic.add_argument("--wait", action="store_true", help="return when it is done")
    elastic.add_argument("--force", action="store_true", help="end replicas at once: what they have goes to others")
    text = "until new replicas are up, or those that leave are ended; default: as long as a start may take, or 300 s"
    elastic.add_argument("--timeout", type=float, metavar="S", help=text)
    ask = "rondo.launch.elastic.ask"
    add = verb("scale", _in(ask, "scale"), "Have more or fewer replicas of a role, while the run goes on.", elastic)
    add("role", metavar="ROLE", help="rollout, or another one that keeps no state")
    add("num_replicas", metavar="N", type=int, help="how many there are to be")
    add = verb("restart", _in(ask, "restart"), "Replace the replicas of a role, one after another.", elastic)
    add("roles", metavar="ROLE", nargs="+", help="rollout, actor, or any other; several one after another")
    add = verb("resume", _in("rondo.launch.train", "resume"), "Go on with a run from its newest checkpoint.", run)
    _add_sets(add, "change a setting from there on: --set num_steps=200 (docs/resume.md)")
    text = "go on with data, packages, code or settings that change what is learnt"
    add("--accept-changes", action="store_true", help=text)
    add("--reset-optimizer", action="store_true", help="with the weights alone: its moments and schedule begin anew")
    _add_checkpoint(add)
    text = "Say what ended a run, where it is over; which role limits it, who waits for whom, and what to change."
    verb("explain", _in("rondo.launch.report.explain", "show"), text, run, steps, as_json)
    text = "Make the decisions of a run's autoscaler again, from its events."
    add = verb("autoscale", _in("rondo.launch.autoscale.replay", "main"), text, run, as_json)
    _add_sets(add, "what other rules had wanted: --set autoscale.wait_out=0.2")
    text = "Write what every process did when as a Chrome trace."
    add = verb("timeline", _in("rondo.launch.report.timeline", "export"), text, run, steps)
    add("--out", metavar="TRACE.json", type=Path, help="default: trace.json in the run directory")
    text = "Tell a tracker of a run, from where it was told last; of one that goes on, until it ends."
    add = verb("track", _in("rondo.launch.track.follow", "by_hand"), text, run)
    services = ("tensorboard", "wandb", "trackio", "mlflow", "swanlab", "clearml", "otel")
    add("--to", required=True, choices=services, help="where to; as the run's settings have it, but for what follows")
    add("--project", metavar="NAME", help="under which it stands there (default: rondo)")
    add("--name", dest="run", metavar="NAME", help="the run's there; default: that of its directory")
    add("--url", metavar="URL", help="the server; default: as the service's own settings say")
    add("--folder", metavar="FOLDER", type=Path, help="for what it writes here; default: in the run directory")
    add("--offline", action="store_true", help="write files to upload later")
    text = "Tell who is to be told of a run what is left to tell; of one that goes on, until it ends."
    add = verb("alert", _in("rondo.launch.alert.follow", "by_hand"), text, run)
    add("--test", action="store_true", help="send one message to each address instead; RUN may be a CONFIG.py")
    text = "Compare two runs: settings, code, packages, data, machine, the first step at which they part, and the end."
    add = verb("compare", _in("rondo.launch.report.compare", "show"), text, as_json)
    add("first", metavar="RUN_A", type=Path)
    add("second", metavar="RUN_B", type=Path)
    text = "of deterministic runs: compare which samples were trained, and their order, alone"
    add("--ids", dest="ids_only", action="store_true", help=text)
    text = "Write the weights of a checkpoint as a Hugging Face folder, or its adapter as one that peft loads."
    add = verb("export", _in("rondo.launch.export", "main"), text)
    add("source", metavar="RUN|CHECKPOINT", type=Path, help="of a run its newest checkpoint")
    add("out", metavar="OUT", type=Path, help="a folder that is not there yet")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights")
    add(
        "--merged",
        action="store_true",
        help="of a run that trains adapters: its whole model, the adapter merged into it",
    )
    _add_checkpoint(add)
    text = "Evaluate a checkpoint, or any model, on evaluation sets."
    add = verb("eval", _in("rondo.launch.evaluate", "main"), text, plain)
    add("source", metavar="RUN|CHECKPOINT|MODEL", help="of a run its newest checkpoint; MODEL: a Hugging Face folder")
    text = "a module whose settings say on what and how; default: those of the run"
    add("--config", type=Path, metavar="CONFIG.py", help=text)
    add(
        "--only",
        action="append",
        default=[],
        metavar="SET",
        help="this evaluation set, and others named so; default: all",
    )
    _add_sets(add, "change a setting: --set evaluation.num_prompts=64")
    _add_checkpoint(add)
    text = "a set with a name, such as aime24 or HuggingFaceH4/MATH-500, in the place of the settings' own; its rows in PATH"
    add("--benchmark", dest="benchmarks", action="append", default=[], metavar="NAME[=PATH]", help=text)
    text = "a run that goes on evaluates the newest weights that it has, beside its training"
    add("--live", action="store_true", help=text)
    _add_serving(verb("serve", serve, "Serve a model over HTTP, in SGLang's dialect and OpenAI's."))
    add = verb(
        "view", _in("rondo.launch.dashboard.server", "main"), "Show runs in a browser, live or over, side by side."
    )
    add(
        "paths",
        metavar="RUN",
        type=Path,
        nargs="*",
        default=[Path("runs/latest")],
        help="or a folder with runs (default: runs/latest)",
    )
    _add_place(add, 8265)
    text = "Make the samples of a run with programs of yours, here or on another machine, until it ends."
    add = verb("agents", _in("rondo.launch.agents", "main"), text)
    add("--run", metavar="RUN", type=Path, default=Path("runs/latest"), help="on this machine (default: runs/latest)")
    add(
        "--url",
        dest="urls",
        action="append",
        default=[],
        metavar="URL",
        help="or each replica's, as `rondo status` says",
    )
    add("--token-file", metavar="FILE", type=Path, help="of --url: a file (mode 0600) with the token of the settings")
    add("--processes", type=int, default=8, metavar="N", help="programs that run at once (default 8)")
    text = "of --url: how long the run may take to its first answer (default 3600)"
    add("--timeout", type=float, default=3600.0, metavar="S", help=text)
    add("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what rollout.agent.command would be")
    _add_job(verb("slurm", slurm, "Write a run as a batch job of SLURM, or submit it.", config))
    add = verb("bench", _in("rondo.launch.bench", "run"), "Measure this machine; `rondo bench` lists what with.")
    add("name", metavar="NAME", nargs="?", help="a module of benchmarks/")
    add("options", metavar="...", nargs=argparse.REMAINDER, help="options of that benchmark")
    install = _in("rondo.launch.sglang_env", "install")
    add = verb("sglang", lambda action, **options: install(**options), "Build an environment for SGLang's servers.")
    add("action", choices=("install",), help="the environment is built, unless it is there")
    add("path", metavar="PATH", type=Path, help="a folder for it")
    add("--cpu", action="store_true", help="for a machine without a GPU")
    add = verb("completion", _in("rondo.launch.completion", "script"), "Print what completes lines in a shell.")
    add("shell", choices=("bash", "zsh", "fish"), help='bash and zsh: eval "$(rondo completion bash)"; fish: | source')
    return parser, dict(verbs.choices)


def _add_sets(add: Callable[..., Any], text: str) -> None:
    add("--set", dest="sets", action="append", default=[], metavar="PATH=VALUE", help=text)


def _add_checkpoint(add: Callable[..., Any]) -> None:
    add("--checkpoint", metavar="NAME", help="of a run: best, or step_000050; default: the newest")


def _add_serving(add: Callable[..., Any]) -> None:
    add("model", metavar="MODEL", help="a Hugging Face folder or name, or a run with a checkpoint")
    length = "tokens of prompt and answer together; default: the model's positions, at most 8192"
    _add_place(add, 30000)
    for name, kind, default, text in (
        ("--dtype", str, None, "float32, bfloat16 or float16; default: float32 on the CPU, else bfloat16"),
        ("--device", str, None, "such as cpu or cuda:0; default: the first accelerator, else the CPU"),
        ("--num-slots", int, 32, "sequences that are decoded at once"),
        ("--max-length", int, None, length),
        ("--served-model-name", str, None, "the model's name in answers; default: MODEL"),
    ):
        shown = "" if default is None else f" (default {default})"
        add(name, type=kind, default=default, metavar=name[2:].upper(), help=text + shown)


def _add_place(add: Callable[..., Any], port: int) -> None:
    """Where a server of ours listens, and who may ask."""
    tls = "a certificate (PEM), with those that lead to its root behind it: TLS, 1.2 or newer"
    for name, kind, default, text in (
        ("--host", str, "127.0.0.1", "address; any but loopback needs --token-file (default 127.0.0.1)"),
        ("--port", int, port, f"0 takes a free one (default {port})"),
        ("--token-file", Path, None, "a file (mode 0600) with the bearer token; default: one of its own"),
        ("--tls-cert", Path, None, tls),
        ("--tls-key", Path, None, "its key (PEM, mode 0600, without a password)"),
    ):
        add(name, type=kind, default=default, metavar=name[2:].upper(), help=text)


def _add_job(add: Callable[..., Any]) -> None:
    add("--submit", action="store_true", help="give it to sbatch, instead of printing it")
    for name, kind, default, meta, text in (
        ("--nodes", int, 1, "N", "1: all groups of a run start on one machine"),
        ("--gpus", int, None, "N", "default: what the groups ask for"),
        ("--cpus", int, None, "N", "cores; default: what the groups take"),
        ("--mem", str, None, "SIZE", "such as 64G; default: what `rondo check` estimates, and a quarter more"),
        ("--time", str, None, "TIME", "such as 24:00:00"),
        ("--partition", str, None, "NAME", "where it is queued"),
        ("--account", str, None, "NAME", "who pays"),
        ("--container-image", str, None, "IMAGE", "of pyxis and enroot, or a .sif file of apptainer"),
        ("--container-mounts", str, None, "A:B,...", "folders for it, beside the one that this is called in"),
        (
            "--grace",
            int,
            None,
            "S",
            "seconds from the signal to the limit; default: 600, or what preemption.grace_s needs",
        ),
        ("--max-requeues", int, 100, "N", "how often it may be queued again (default 100)"),
        ("--max-kills", int, 3, "N", "how often in a row after the run was killed (default 3)"),
    ):
        add(name, type=kind, default=default, metavar=meta, help=text)
    add("--sbatch", action="append", default=[], metavar="OPTION", help="for sbatch: --sbatch=--qos=high")
    add("--before", action="append", default=[], metavar="LINE", help="of shell, before the run: 'module load cuda'")


def _kill(text: str, config: RunConfig) -> tuple[str, int]:
    """(role, group or service; step) of a `--kill`."""
    import re

    from rondo.runtime.errors import ConfigError
    from rondo.runtime.section import nearest

    role, at, step = text.partition("@")
    most = config.num_steps or 10**9  # by epochs: nobody knows yet
    if not role or (at and not re.fullmatch("[0-9]{1,9}", step)) or not int(step or _KILL_AT_STEP) <= most:
        raise ConfigError(f"--kill must look like ROLE or ROLE@STEP with STEP up to {most}, got {text!r}. Try actor@1")
    known = sorted(
        {"coordinator", "store"} | {name for group in config.role_groups for name in (*group.roles, group.name)}
    )
    if role not in known:
        raise ConfigError(f"--kill must name a role of this run, got {role!r}. {nearest(role, known)}")
    return role, int(step or _KILL_AT_STEP)


if __name__ == "__main__":
    sys.exit(main())
