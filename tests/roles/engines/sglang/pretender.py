"""A program in the place of `sglang.launch_server`: as many processes, the same arguments, and answers that take no model.

It stands in a folder of its own as the package `sglang`, so that a server is started, found, killed and ended as a real one is,
in tenths of a second. Token n of an answer is 1000 + n, and takes PRETEND_STEP_S seconds, none while the file PRETEND_HOLD is
there; the weights of a version go by its name. With PRETEND_STARTING it has that file open, and never answers that it is there.
A stream has its first two tokens at once, also while the file is there; it tells
them every `stream_interval`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from rondo.roles.engines.sglang.server import Launch

_PROGRAM = """
import json, mmap, os, signal, subprocess, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

settings = json.load(open(sys.argv[sys.argv.index("--config") + 1]))
fails = os.environ.get("PRETEND_FAIL")
if fails:
    print(fails, flush=True)
    sys.exit(3)
CHILD = "import ctypes, signal, time; ctypes.CDLL(None).prctl(1, 9); signal.signal(15, signal.SIG_IGN)"
CHILD += "; print(flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-S", "-c", CHILD], stdout=subprocess.PIPE)
child.stdout.readline()
if os.environ.get("PRETEND_DEAF"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
starting = os.environ.get("PRETEND_STARTING")
if starting:  # as a scheduler does long before the first answer
    held = mmap.mmap(os.open(starting, os.O_RDWR), 0)
state = {"version": settings["weight-version"], "aborted": set()}
STEP_S, HOLD = float(os.environ.get("PRETEND_STEP_S", "0.001")), os.environ.get("PRETEND_HOLD", "")

def names_in_shared_memory():  # a semaphore and a block of media, as a scheduler makes them while it works
    import _multiprocessing, multiprocessing.process as own
    prefix = own.current_process()._config["semprefix"]
    state["lock"] = _multiprocessing.SemLock(0, 1, 1, prefix + "-late", False)
    block = f"/dev/shm/sgl_shm_mm_{os.getpid()}_late"
    open(block, "w").close()
    return [f"/dev/shm/sem.{prefix[1:]}-late", block]

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *_): pass
    def answer(self, told, status=200):
        data = json.dumps(told).encode()
        self.send_response(status); self.send_header("Content-Length", str(len(data))); self.end_headers(); self.wfile.write(data)
    def do_GET(self):
        if self.path == "/server_info":
            told = {name.replace("-", "_"): value for name, value in settings.items() if name != "api-key"}
            told |= {"version": os.environ.get("PRETEND_VERSION", "0.5.23"), "max_running_requests": 8, "child": child.pid}
        elif self.path == "/model_info":
            told = {"architectures": ["Pretended"], "weight_version": state["version"]}
        elif self.path == "/names":
            told = names_in_shared_memory()
        elif self.path == "/v1/loads":
            told = {"loads": [{"num_running_reqs": 0}]}
        elif self.path == "/health_generate" and starting:
            return self.answer({}, 503)
        else:
            told = {}
        self.answer(told)
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        if self.headers.get("Authorization") != "Bearer " + settings["api-key"]:
            return self.answer({"error": "Unauthorized"}, 401)
        if self.path == "/abort_request":
            state["aborted"].add(asked["rid"])
            return self.answer({})
        if self.path == "/update_weight_version":
            state["version"] = asked["new_version"]
            return self.answer({})
        if self.path != "/generate":
            return self.answer({"error": "unknown"}, 404)
        num, rid, made = asked["sampling_params"]["max_new_tokens"], asked.get("rid"), 0
        stream, every = asked.get("stream"), asked["sampling_params"].get("stream_interval", 1)
        if stream:
            self.send_response(200); self.send_header("Transfer-Encoding", "chunked"); self.end_headers()
        def told(finish):
            ids = list(range(1000, 1000 + made))
            meta = {"finish_reason": finish, "output_token_logprobs": [[-1.0, i, None] for i in ids],
                "prompt_tokens": len(asked.get("input_ids", "?")), "completion_tokens": made, "weight_version": state["version"],
                "output_top_logprobs": [[[-5.0, 1, None], [-5.0, 2, None]]] * (made if asked.get("top_logprobs_num") else 0)}
            if finish: meta["weight_versions"] = [{"version": state["version"], "start": 0, "end": made}]
            return {"output_ids": ids, "meta_info": meta}
        def chunk(data):
            self.wfile.write(b"%x\\r\\n%b\\r\\n" % (len(data), data))
        while made < num and rid not in state["aborted"]:
            time.sleep(STEP_S)
            grown = not os.path.exists(HOLD) or bool(stream and made < 2)
            made += grown
            if stream and grown and made < num and made % every == 1 % every:
                chunk(b"data: " + json.dumps(told(None)).encode() + b"\\n\\n")
        whole = told({"type": "length", "length": made} if made == num else {"type": "abort", "message": "Aborted"})
        if not stream:
            return self.answer(whole)
        chunk(b"data: " + json.dumps(whole).encode() + b"\\n\\ndata: [DONE]\\n\\n"); chunk(b"")

ThreadingHTTPServer(("127.0.0.1", settings["port"]), Handler).serve_forever()
"""


def pretend(folder: Path) -> Path:
    """Writes it into `folder`, which belongs on PYTHONPATH then."""
    package = folder / "pretended" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "launch_server.py").write_text(_PROGRAM)
    return package.parent


def launch(folder: Path, arguments: Mapping[str, bool | int] | None = None, **environment: str) -> Launch:
    """How it is started; it tells these arguments as its own."""
    surroundings = {"PYTHONPATH": str(pretend(folder)), **environment}
    return Launch(sys.executable, model_path=str(folder), arguments=arguments or {}, environment=surroundings)
