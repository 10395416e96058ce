"""Status and stop: asking a run in another process how it is, or to end.

Owns the client side of the admin endpoint for the command line. A run that is over is read from its files. Does not
signal: a run is stopped by asking it, so that it saves first.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from rondo.launch.machine import show_bytes
from rondo.launch.report.records import evaluation_records, print_json, shown_reward, step_records
from rondo.launch.report.summary import print_table, read
from rondo.launch.report.view import Progress, duration
from rondo.launch.rundir import SupervisorRecord, existing_run, owner, read_json, supervisor_record
from rondo.runtime.admin.tls import client_context
from rondo.runtime.checkpoints import newest_complete
from rondo.runtime.errors import ConfigError, PeerGone, Refused

_ANSWER_S = 10.0
_LOOK_S, _TELL_S = 0.1, 2.0


def show_status(path: Path, *, as_json: bool = False) -> int:
    """Prints how a run is doing, or how it ended. 0, or 1 for a run that ended without a summary."""
    run = existing_run(path)
    record = supervisor_record(run)
    if record is not None:
        found = {"run": run.name, "alive": True, "pid": record.pid, "url": url_of(record)}
        found |= {"health": ask(record, "/healthz"), "roles": ask(record, "/roles"), "waits": ask(record, "/waits")}
        found |= {"scaling": ask(record, "/scaling")["active"]}
        records = (
            path
            for folder in ("endpoints", "agents", "genrm", "scorer")
            for path in sorted((run / folder).glob("*.json"))
        )
        found |= {"endpoints": [read_json(path) for path in records]}
        if as_json:
            print_json(found)
        else:
            _print_alive(run, found)
        return 0
    pid, summary = owner(run), read(run)
    if pid is not None:
        # A resumed run has the summary of its earlier attempt until it ends again.
        if as_json:
            print_json({"run": run.name, "alive": True, "pid": pid, "starting": True})
        else:
            print(f"run {run.name} is starting, or ends, pid {pid}")
        return 0
    if summary is None:
        return _print_unfinished(run, as_json)
    if as_json:
        print_json({"run": run.name, "alive": False, "summary": asdict(summary)})
    else:
        print_table(summary)
    return 0


def ask_to_stop(path: Path, *, reason: str, now: bool = False, wait: bool = True) -> int:
    """Asks a live run to save and end, or with `now` to end at once, waits until it has, and says meanwhile what for. ConfigError
    when none is alive."""
    run, record = existing_run(path), live_record(path, "to be stopped")
    ask(record, "/stop", {"reason": reason, "now": now})
    limits = read_json(run / "config.resolved.json").get("supervision", {})
    within = f"within {limits.get('grace_s', 0):g} s, or {limits.get('save_s', 0):g} s where a save takes so long"
    print(f"run {run.name} {'ends at once' if now else f'saves and ends, {within}'}, pid {record.pid}", flush=True)
    # The run holds itself to its own grace period; whoever waits here can leave at any time.
    told, looked_at = list[str](), time.monotonic()
    while wait and owner(run) == record.pid:
        time.sleep(_LOOK_S)
        if time.monotonic() > looked_at + _TELL_S:
            looked_at, before = time.monotonic(), told
            told = room_waited_for(run) or _leaving(run)
            if told and told != before:
                print("\n".join(told), flush=True)
    return 0


def _leaving(run: Path) -> list[str]:
    """The role groups that a run which is being stopped waits for, and what they do."""
    record = supervisor_record(run)
    try:
        groups = [] if record is None else ask(record, "/roles")
    except (PeerGone, Refused):
        return []
    doing = [
        f"{each['name']}{': ' * bool(each['section'])}{each['section']}"
        for each in groups
        if each["state"] == "leaving"
    ]
    return [f"waits for {', '.join(doing)}"] if doing else []


def live_record(path: Path, what: str) -> SupervisorRecord:
    """Of the run at `path`. PeerGone while it starts or ends, ConfigError where it has ended."""
    run = existing_run(path)
    record = supervisor_record(run)
    if record is None:
        pid = owner(run)
        if pid is not None:
            raise PeerGone(
                f"run {run.name} must have started, and not be ending, {what}, got pid {pid} that does. Try again soon"
            )
        raise ConfigError(f"RUN must be alive {what}, got {run} which has ended. See `rondo status {path}`")
    return record


def url_of(record: SupervisorRecord) -> str:
    """The admin endpoint as seen from this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(record.admin_host, record.admin_host)
    scheme = "http" if record.admin_cert is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{record.admin_port}"


def ask(record: SupervisorRecord, path: str, body: dict[str, Any] | None = None, token: str | None = None) -> Any:
    """One request with the run's token, or that which is given; the answer's JSON. PeerGone when nobody answers, ConfigError or
    Refused with the words of an answer that is no success."""
    try:
        token = Path(record.token_path).read_text().strip() if token is None else token
    except FileNotFoundError:
        raise PeerGone(
            f"a run must not be ending to be asked, got pid {record.pid} that is. See `rondo status`"
        ) from None
    try:
        request = urllib.request.Request(
            url_of(record) + path,
            data=None if body is None else orjson.dumps(body),
            headers={"Authorization": f"Bearer {token}"},
            method="GET" if body is None else "POST",
        )
        # A proxy from the environment has no business between a command and its own machine.
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if record.admin_cert is not None:
            handlers.append(urllib.request.HTTPSHandler(context=client_context(Path(record.admin_cert))))
        opener = urllib.request.build_opener(*handlers)
        try:
            with opener.open(request, timeout=_ANSWER_S) as response:
                return orjson.loads(response.read())
        except urllib.error.HTTPError as error:
            with error:
                told = orjson.loads(error.read())
            if "error" not in told:  # a run that is not well says so
                return told
            words = f"{told['error']['message']} ({request.full_url}, status {error.code})"
            raise (ConfigError if error.code == 400 else Refused)(words) from None
    except OSError as error:
        raise PeerGone(
            f"the run's admin endpoint must answer, got {error} from pid {record.pid}. See its logs, or try again"
        ) from error


def room_waited_for(run: Path) -> list[str]:
    """What a live run waits for that only people give it, room on a disk: a line a wait. It is asked, since a full disk keeps no
    record; of one that does not answer there is nothing to tell."""
    record = supervisor_record(run)
    try:
        waits = [] if record is None else ask(record, "/waits")
    except (PeerGone, Refused):
        return []
    return [
        f"{wait['waiter']} waits for {wait['name']} ({wait['peer']}){_until(wait)}: free some, and the run goes on"
        for wait in waits
        if wait["name"] in ("room for the journal", "room on the disk")
    ]


def _until(wait: dict[str, Any]) -> str:
    if wait.get("deadline_s") is None:
        return ""
    return time.strftime(", until %H:%M:%S", time.localtime(time.time() + wait["deadline_s"] - wait["seconds"]))


def _print_alive(run: Path, found: dict[str, Any]) -> None:
    print(f"run {run.name}  pid {found['pid']}  {found['url']}")
    if progress := _progress(run):
        print(progress)
    print("  ".join(f"{name}={_short(value)}" for name, value in found["health"].items()))
    for role in found["roles"]:
        print("  " + "  ".join(_shown(name, value) for name, value in role.items()))
    scaling = found["scaling"]
    if scaling is not None:
        shown = ("request_id", "action", "role", "num_replicas", "status", "selected_engines", "reason")
        print("  scaling: " + "  ".join(f"{name}={_short(scaling[name])}" for name in shown))
    for endpoint in found["endpoints"]:
        print("  endpoint: " + "  ".join(f"{name}={value}" for name, value in endpoint.items()))
    for wait in found["waits"]:
        print("  waits: " + "  ".join(_shown(name, value) for name, value in wait.items()))


def _print_unfinished(run: Path, as_json: bool) -> int:
    steps, evaluations = step_records(run / "metrics.jsonl"), evaluation_records(run / "metrics.jsonl")
    last = steps[-1] if steps else None
    if as_json:
        print_json({"run": run.name, "alive": False, "summary": None, "last_step": last, "evaluations": evaluations})
        return 1
    reached = (
        "no step"
        if last is None
        else f"step {last['step'] + 1}, reward {shown_reward(last['reward_mean'], last)}"
        if "reward_mean" in last
        else f"step {last['step'] + 1}, loss {last['loss']:.4g}"
    )
    saved = newest_complete(run / "checkpoints") is not None
    advice = f"Go on with `rondo resume {run}`" if saved else "It has no checkpoint: start it again with `rondo train`"
    print(f"run {run.name} ended without a summary after {reached}. {advice}")
    return 1


def _progress(run: Path) -> str:
    """Return the newest step, its reward and loss, the newest evaluation and the time left, "" before the first step."""
    progress = Progress(read_json(run / "config.resolved.json").get("num_steps") or 0)
    for record in [*step_records(run / "metrics.jsonl"), *evaluation_records(run / "metrics.jsonl")]:
        progress.add(record if "step" in record else {"evaluation": record})
    last, left = progress.last, progress.seconds_left()
    figures = {"reward": shown_reward(last["reward_mean"], last)} if "reward_mean" in last else {}
    figures |= {"loss": f"{last['loss']:.4g}"} if "loss" in last else {}
    figures |= {"evaluation": list(progress.evaluations.values())[-1]} if progress.evaluations else {}
    shown = [f"step {progress.num_done}/{progress.num_steps}", *(f"{name} {value}" for name, value in figures.items())]
    return "  ".join(shown + ([f"{duration(left)} left"] if left is not None else [])) if last else ""


def _shown(name: str, value: Any) -> str:
    """`name=value` for people: bytes and seconds in units, "memory=303 MiB"."""
    for suffix, show in (("_bytes", lambda number: show_bytes(int(number))), ("_s", duration)):
        if name.endswith(suffix) and isinstance(value, int | float):
            return f"{'memory' if name == 'rss_bytes' else name.removesuffix(suffix)}={show(value)}"
    return f"{name}={_short(value)}"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return ",".join(_short(part) for part in value) if isinstance(value, list) else str(value)
